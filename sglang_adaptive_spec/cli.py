"""The plugin's flags on SGLang's command line.

``ServerArgs.from_cli_args`` keeps declared fields only, so the settings are read from the parsed arguments
there and carried to the child processes in one environment variable.
"""

from __future__ import annotations

import argparse
from typing import Any

from sglang_adaptive_spec.config import (
    CONFIG_VARIABLE,
    DEFAULT_CATCH_UP_TOKENS,
    DEFAULT_MIN_DWELL_STEPS,
    Settings,
    read_config_variable,
    write_config_variable,
)
from sglang_adaptive_spec.errors import Refusal

_DESTINATIONS = {
    "policy": "adaptive_spec_policy",
    "disable_batch_threshold": "speculative_disable_batch_threshold",
    "resume_batch_threshold": "adaptive_spec_resume_batch_threshold",
    "min_dwell_steps": "adaptive_spec_min_dwell_steps",
    "catch_up_tokens": "adaptive_spec_catch_up_tokens",
}


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to SGLang's parser; a flag not given stays None."""
    group = parser.add_argument_group("sglang-adaptive-spec")
    group.add_argument(
        "--speculative-disable-batch-threshold",
        type=int,
        metavar="N",
        help="Decode plainly, without speculation, while more than N requests run.",
    )
    group.add_argument(
        "--adaptive-spec-policy",
        choices=("threshold", "spec", "plain"),
        help="threshold: by load (the default). spec, plain: always that mode.",
    )
    group.add_argument(
        "--adaptive-spec-resume-batch-threshold",
        type=int,
        metavar="M",
        help="Speculate again once at most M requests run; M < N. Default: three quarters of N.",
    )
    group.add_argument(
        "--adaptive-spec-min-dwell-steps",
        type=int,
        metavar="K",
        help=f"Decode steps a mode lasts before the next switch. Default: {DEFAULT_MIN_DWELL_STEPS}.",
    )
    group.add_argument(
        "--adaptive-spec-catch-up-tokens",
        type=int,
        metavar="T",
        help="Tokens of a request that wait during plain steps until the draft sees them, all in one forward. "
        f"Default: {DEFAULT_CATCH_UP_TOKENS}.",
    )


def carry_flags(arguments: argparse.Namespace) -> None:
    """Read the plugin's flags and put the settings where the child processes find them.

    Raises:
        Refusal: a value is wrong, or the command line and the environment variable both set something.
    """
    given: dict[str, Any] = {
        name: getattr(arguments, destination)
        for name, destination in _DESTINATIONS.items()
        if getattr(arguments, destination, None) is not None
    }
    if not given:
        return
    settings = Settings.from_mapping(given)
    carried = read_config_variable()
    # The same flags may be parsed twice in one process, and the variable is ours then.
    if carried is not None and Settings.from_mapping(carried) != settings:
        raise Refusal(
            f"{CONFIG_VARIABLE} is set, and so are flags of this plugin.",
            "They differ, and it would not be clear which of the two holds.",
            f"Unset {CONFIG_VARIABLE}, or drop the flags.",
        )
    write_config_variable(settings)

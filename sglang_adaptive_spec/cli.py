"""The plugin's flags on SGLang's command line.

``ServerArgs.from_cli_args`` keeps declared fields only, so the settings are read from the parsed arguments
there and carried to the child processes in one environment variable.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

from sglang_adaptive_spec.config import (
    CONFIG_VARIABLE,
    DEFAULT_CATCH_UP_TOKENS,
    DEFAULT_MIN_DWELL_STEPS,
    FLAGS,
    POLICIES,
    Settings,
    read_config_variable,
    write_config_variable,
)
from sglang_adaptive_spec.errors import Refusal

_DESTINATIONS = {name: flag.removeprefix("--").replace("-", "_") for name, flag in FLAGS.items()}
_carried_by_us: str | None = None


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Add the plugin's flags to SGLang's parser; a flag not given stays None."""
    group = parser.add_argument_group("sglang-adaptive-spec")
    group.add_argument(
        FLAGS["disable_batch_threshold"],
        type=int,
        metavar="N",
        help="Decode plainly, without speculation, while more than N requests run.",
    )
    group.add_argument(
        FLAGS["policy"],
        choices=POLICIES,
        help="auto: by measured cost (the default without a threshold). threshold: by load. spec, plain: always that "
        "mode.",
    )
    group.add_argument(
        FLAGS["resume_batch_threshold"],
        type=int,
        metavar="M",
        help="Speculate again once at most M requests run; M < N. Default: three quarters of N.",
    )
    group.add_argument(
        FLAGS["min_dwell_steps"],
        type=int,
        metavar="K",
        help=f"Decode steps a mode lasts before the next switch. Default: {DEFAULT_MIN_DWELL_STEPS}.",
    )
    group.add_argument(
        FLAGS["catch_up_tokens"],
        type=int,
        metavar="T",
        help="Tokens of a request that wait during plain steps until the draft sees them, all in one forward. "
        f"Default: {DEFAULT_CATCH_UP_TOKENS}.",
    )
    group.add_argument(
        FLAGS["dry_run"],
        action="store_true",
        default=None,
        help="Decide and report, but let SGLang run every step as it would alone.",
    )
    group.add_argument(
        FLAGS["costs"],
        metavar="FILE",
        help="Step times that python -m sglang_adaptive_spec.calibrate saved. Measured at start unless given.",
    )


def carry_flags(arguments: argparse.Namespace) -> None:
    """Read the plugin's flags and put the settings where the child processes find them.

    Raises:
        Refusal: a value is wrong, or the command line and the environment variable both set something.
    """
    global _carried_by_us
    given: dict[str, Any] = {
        name: getattr(arguments, destination)
        for name, destination in _DESTINATIONS.items()
        if getattr(arguments, destination, None) is not None
    }
    if not given:
        return
    carried = read_config_variable()
    # The same flags may be parsed twice in one process, and the variable is ours then.
    ours = _carried_by_us == os.environ.get(CONFIG_VARIABLE)
    if carried is not None and not ours:
        raise Refusal(
            f"{CONFIG_VARIABLE} is set, and so are flags of this plugin.",
            "It would not be clear which of the two holds.",
            f"Unset {CONFIG_VARIABLE}, or drop the flags.",
        )
    write_config_variable(Settings.from_mapping(given))
    _carried_by_us = os.environ[CONFIG_VARIABLE]

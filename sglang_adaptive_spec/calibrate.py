"""Measure the step times of a server, show from where plain decode wins, and save them for its next starts.

::

    python -m sglang_adaptive_spec.calibrate --save costs.json --png costs.png --model-path ... --speculative-...

Everything but the options of this module goes to SGLang, as to ``sglang.launch_server``.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

from sglang_adaptive_spec.activate import installed_sglang, release_for
from sglang_adaptive_spec.calibration import Calibration
from sglang_adaptive_spec.config import Settings, read_config_variable, write_config_variable
from sglang_adaptive_spec.costs import StepCosts
from sglang_adaptive_spec.crossover import ACCEPT_LENGTHS, Pair, as_text, most_spec_requests, pairs
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.plugin import ENABLE_VARIABLE

DEFAULT_MEASURE_SECONDS = 60


def main(arguments: Sequence[str]) -> None:
    """Start the engine, read what it measured, print it, and write what was asked for.

    Raises:
        Refusal: nothing was measured.
    """
    options, server_arguments = _parse(arguments)
    if options.png:
        _drawing()  # before minutes of start-up, not after
    os.environ[ENABLE_VARIABLE] = "1"
    release = release_for(installed_sglang())

    def ask_for_time() -> None:
        settings = Settings.from_mapping({**(read_config_variable() or {}), "measure_seconds": options.measure_seconds})
        write_config_variable(settings)

    # First, so that a policy given by the user is the one that counts, and is refused below.
    with release.offline_engine(["--adaptive-spec-policy", "auto", *server_arguments], ask_for_time) as state:
        _report(state, options)


def _report(state: dict[str, Any], options: argparse.Namespace) -> None:
    measured = pairs(state["step_costs"])
    if not measured or not state["measured_sizes"]:
        raise Refusal(
            "No step times were measured.",
            f"The server runs the policy {state['policy']!r} and counted {state['faults']} faults; its log says more.",
            "Calibrate with the policy 'auto', without a threshold and without --adaptive-spec-costs.",
        )
    setup = state["setup"]
    sys.stdout.write(f"\n{setup['device']}, {setup['attention_backend']}, tp {setup['tp_size']}\n{as_text(measured)}\n")
    if options.save:
        costs = StepCosts.from_json({"steps": state["step_costs"]}).to_json()
        Calibration(setup, costs, most_spec_requests(measured, setup["num_steps"] + 1)).save(options.save)
        sys.stdout.write(f"wrote {options.save}\n")
    if options.png:
        _plot(measured, options.png, f"{setup['device']}, {setup['attention_backend']}")
        sys.stdout.write(f"wrote {options.png}\n")
    sys.stdout.flush()


def _parse(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(
        prog="python -m sglang_adaptive_spec.calibrate",
        description=__doc__.partition("\n")[0],
        epilog="All other arguments go to SGLang, as to sglang.launch_server.",
        allow_abbrev=False,
    )
    parser.add_argument("--save", metavar="FILE", help="Write the step times, for --adaptive-spec-costs FILE.")
    parser.add_argument("--png", metavar="FILE", help="Draw them; needs matplotlib.")
    parser.add_argument(
        "--measure-seconds",
        type=int,
        default=DEFAULT_MEASURE_SECONDS,
        metavar="S",
        help="Begin no further batch size after this time. Default: %(default)s.",
    )
    return parser.parse_known_args(arguments)


def _drawing() -> type[Any]:
    """Matplotlib's figure, without pyplot: it needs no display and keeps no figure alive."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise Refusal(
            "--png needs matplotlib.", "It is not installed.", "pip install matplotlib, or drop --png."
        ) from None
    drawing: type[Any] = Figure
    return drawing


def _plot(measured: Sequence[Pair], path: str, title: str) -> None:
    figure = _drawing()(figsize=(10, 4), layout="constrained")
    times, crossover = figure.subplots(1, 2)
    sizes = [pair.requests for pair in measured]
    times.plot(sizes, [1e3 * pair.spec_seconds for pair in measured], marker=".", label="spec step")
    times.plot(sizes, [1e3 * pair.plain_seconds for pair in measured], marker=".", label="plain step")
    times.set(xlabel="requests", ylabel="ms", title=title)
    times.legend()
    crossover.plot(sizes, [pair.break_even_accept_length for pair in measured], marker=".", color="tab:green")
    crossover.set(xlabel="requests", ylabel="accept length", title="speculation wins above the line")
    crossover.set_yticks(ACCEPT_LENGTHS)
    crossover.grid(axis="y", alpha=0.4)
    for axes in (times, crossover):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter("{x:.0f}")
    figure.savefig(path, dpi=120)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except Refusal as refusal:
        refusal.end_process()

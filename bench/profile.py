"""Where a busy server's time goes: SGLang's own torch profiler on some forwards of a saturated server of each mode.

It measures nothing that counts: the profiler slows the host down. What it tells is which of host and GPU waits for the
other, and what a mode does that another does not.
"""

from __future__ import annotations

import argparse
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median

import requests

from bench.modes import BenchMode
from bench.ramp.__main__ import ramp_modes
from bench.ramp.client import warm_up
from bench.ramp.load import Load, add_load_options, phases_of, settle_load
from bench.ramp.trace import boundaries
from bench.report import acceptance, in_turns, measured_on, model_of, save, when
from bench.results import Results
from bench.server import Server
from bench.serving import Labels, Measurement, NotProvenError, add_options, result_file, say, settle_options, state_of
from bench.timeline import summarize

PHASES = "3s@60/s,7s@70/s"
"""About the busiest seconds of the ramp."""

_WRITING_S = 60.0
"""Longest wait for SGLang to write a trace."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.profile", description=__doc__)
    add_options(parser, "base,spec,ours-threshold")
    add_load_options(parser, PHASES)
    add = parser.add_argument
    add("--after-seconds", type=float, default=3.5, metavar="S", help="of load, until the profiler starts")
    add("--forwards", type=int, default=120, metavar="N", help="prefills and decode steps profiled")
    add("--stacks", action="store_true", help="record Python functions, too: slows the host down far more")
    add("--traces", type=Path, metavar="DIR", help="keep the profiler's files there")
    # In pieces by graph, a prefill could not be told from decode steps.
    parser.set_defaults(prefill_graph_sizes=[])
    args = parser.parse_args(argv)
    settle_options(parser, args, ramp_modes(args.threshold))
    settle_load(parser, args)
    return args


class Profiler:
    """Starts SGLang's profiler on a server after some seconds, beside whatever loads it."""

    def __init__(self, server: Server, args: argparse.Namespace, folder: Path) -> None:
        self._folder = folder
        self._body = {
            "output_dir": str(folder),
            "num_steps": args.forwards,
            "activities": ["CPU", "GPU"] if args.device == "cuda" else ["CPU"],
            "with_stack": args.stacks,
            "record_shapes": False,
        }
        self._earlier: set[Path] = set()
        self._error: requests.RequestException | None = None
        self._timer = threading.Timer(args.after_seconds, self._ask, [f"{server.url}/start_profile"])

    def __enter__(self) -> Profiler:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._earlier = self._files()
        self._timer.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._timer.cancel()

    def _ask(self, url: str) -> None:
        try:
            requests.post(url, json=self._body, timeout=_WRITING_S).raise_for_status()
        except requests.RequestException as error:  # in a thread of its own
            self._error = error

    def _files(self) -> set[Path]:
        return set(self._folder.glob("*.trace.json.gz"))

    def trace(self) -> Path:
        """The file that SGLang wrote, complete.

        Raises:
            NotProvenError: there is none.
        """
        deadline, size = time.monotonic() + _WRITING_S, -1
        while time.monotonic() < deadline and self._error is None:
            found = sorted(self._files() - self._earlier)
            if found and size == (size := found[-1].stat().st_size) and size > 0:
                return found[-1]
            time.sleep(1.0)
        raise NotProvenError(f"SGLang wrote no trace: {self._error or 'were there enough forwards?'}")


def markdown(results: Results) -> str:
    """What was seen."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    head = results.header
    settings = head["settings"]
    yield f"# Profile of a saturated server, {head['started']}"
    yield ""
    yield f"{measured_on(results)}; {settings['attention_backend']}."
    yield (
        f"{model_of(results)}; {settings['input_tokens']} tokens in, {(settings['output_tokens'] + 1) // 2} to "
        f"{settings['output_tokens']} out; {acceptance(results)}; requests a second: {settings['phases']}; profiled "
        f"from second {settings['after_seconds']:g} on, {settings['forwards']} forwards"
        f"{', with Python functions' if settings['stacks'] else ''}."
    )
    yield from in_turns(results)
    yield ""
    yield f"    {head['command']}"
    yield ""
    yield (
        "Under the profiler, which slows the host down, and each server in whatever its load was then: compare what a "
        "step takes, not the sums. Graphs: GPU time in CUDA graphs; the rest was launched kernel by kernel. From graph "
        "to graph: medians, with few kernels launched between two, and with a prefill's hundreds."
    )
    yield ""
    head_row = (
        "mode",
        "wall, ms",
        "GPU busy",
        "in graphs, ms",
        "launched singly, ms",
        "from graph to graph, ms (times)",
    )
    yield f"| {' | '.join((*head_row, 'with a prefill between, ms (times)'))} |"
    yield f"| --- |{' ---: |' * len(head_row)}"
    for row in results.of_kind("profile"):
        gaps = row["graph_to_graph_ms"]
        short, long = (f"{median(gap):.1f} ({len(gap)})" if (gap := gaps[kind]) else "" for kind in ("short", "long"))
        yield (
            f"| {row['mode']}{when(row)} | {row['wall_ms']:.0f} | {row['gpu_busy_ms'] / row['wall_ms']:.0%} | "
            f"{row['gpu_in_graphs_ms']:.0f} | {row['gpu_single_ms']:.0f} | {short} | {long} |"
        )
    for row in results.of_kind("error"):
        yield ""
        yield f"Not profiled: {row['mode']}{when(row)}: {row['error']}"


def write(path: Path) -> None:
    """Write and print the table beside a result file."""
    save(path, markdown)


def main(argv: list[str]) -> int:
    args = parse(argv)
    modes = ramp_modes(args.threshold)
    load_s = boundaries(phases_of(args))[-1]
    with result_file("bench.profile", args, argv) as work:
        measurement = Measurement(
            args, [modes[name] for name in args.modes], warm_up_s=10.0, pass_s=load_s + 25.0, work=work
        )
        vocab = measurement.pair.vocab_size
        load = Load.of(args, vocab)

        def warm(server: Server) -> None:
            warm_up(server.url, args.max_running_requests, args.input_tokens, vocab)

        def measure(mode: BenchMode, server: Server, labels: Labels) -> None:
            folder = (args.traces or work).resolve() / "-".join(str(labels[part]) for part in ("mode", "round", "pass"))
            before = state_of(server)
            with Profiler(server, args, folder) as profiler:
                load.send(server.url)
                row = summarize(profiler.trace())
            after = state_of(server)
            steps = {name: after.steps(name) - before.steps(name) for name in ("plain", "spec")}
            measurement.write(labels, "profile", {**row, "plugin_steps": steps})
            say(f"{mode.name}: GPU busy {row['gpu_busy_ms']:.0f} of {row['wall_ms']:.0f} ms")

        measurement.run(warm, measure)
    write(args.out)
    return 1 if measurement.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

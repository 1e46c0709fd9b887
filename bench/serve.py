"""Throughput end to end: SGLang's own ``bench_serving`` saturates a server of each mode through HTTP.

Prefill, tokenizer process and HTTP server included. Unless ``--stream`` is given, answers come whole: with as many
events a second as a GPU makes tokens, what is measured would be the Python between client and scheduler.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any
from unittest import mock

from bench.modes import BenchMode
from bench.ramp.__main__ import ramp_modes
from bench.report import acceptance, in_turns, measured_on, model_of, save, when
from bench.results import Results, Row
from bench.server import Server
from bench.serving import (
    Labels,
    Measurement,
    NotProvenError,
    add_options,
    comma,
    result_file,
    say,
    settle_options,
    state_of,
)

_KEPT = {
    "duration_s": "duration",
    "output_tokens_per_s": "output_throughput",
    "requests_per_s": "request_throughput",
    "ttft_mean_ms": "mean_ttft_ms",
    "ttft_p50_ms": "median_ttft_ms",
    "ttft_p99_ms": "p99_ttft_ms",
    "itl_mean_ms": "mean_itl_ms",
    "itl_p50_ms": "median_itl_ms",
    "itl_p99_ms": "p99_itl_ms",
    "latency_mean_ms": "mean_e2e_latency_ms",
    "most_running": "max_concurrent_requests",
}
"""Figures of bench_serving, by the name they have here."""


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.serve", description=__doc__)
    add_options(parser, "base,ours-plain,ours-threshold")
    add = parser.add_argument
    add("--request-rates", type=comma(float), default=[float("inf")], metavar="R,S", help="default: inf, all at once")
    add("--num-prompts", type=int, default=1024, metavar="N", help="requests a run (default: %(default)s)")
    add("--repeats", type=int, default=3, help="runs a rate and pass; an untimed run comes before all")
    add("--input-tokens", type=int, default=256, metavar="N", help="default: %(default)s")
    add("--output-tokens", type=int, default=128, metavar="N", help="default: %(default)s")
    add("--stream", action="store_true", help="stream the answers")
    args = parser.parse_args(argv)
    settle_options(parser, args, ramp_modes(args.threshold))
    return args


class Client:
    """``bench_serving`` against one server, a process of its own except for its name."""

    def __init__(self, args: argparse.Namespace, measurement: Measurement, url: str) -> None:
        self._args = args
        self._model = str(measurement.pair.target)
        self._work = measurement.work
        self._url = url

    def run(self, rate: float, prompts: int, seed: int) -> dict[str, Any]:
        """One run of it; its result.

        Raises:
            NotProvenError: a request was not answered as asked.
        """
        args, out = self._args, self._work / f"{time.monotonic_ns()}.jsonl"
        words = ["bench_serving", "--backend", "sglang", "--base-url", self._url, "--model", self._model]
        words += ["--dataset-name", "random-ids", "--tokenize-prompt", "--random-range-ratio", "1"]
        words += ["--random-input-len", str(args.input_tokens), "--random-output-len", str(args.output_tokens)]
        words += ["--num-prompts", str(prompts), "--request-rate", str(rate), "--seed", str(seed)]
        words += ["--warmup-requests", "0", "--output-file", str(out), "--output-details", "--disable-tqdm"]
        words += [] if args.stream else ["--disable-stream"]
        log = self._work / "client.log"
        sys.modules.pop("sglang.bench_serving", None)  # runpy warns of a module that it runs a second time
        with log.open("a") as output, contextlib.redirect_stdout(output), mock.patch.object(sys, "argv", words):
            # As python -m would, without the half minute of imports for each run.
            runpy.run_module("sglang.bench_serving", run_name="__main__")
        result: dict[str, Any] = json.loads(out.read_text().splitlines()[-1])
        lacking = [error for error in result["errors"] if error]
        if result["completed"] != prompts or result["total_output_tokens"] != prompts * args.output_tokens:
            answered = f"{result['completed']} of {prompts} requests, {result['total_output_tokens']} tokens"
            why = lacking[0].strip().splitlines()[-1][:300] if lacking else "no error said why"
            raise NotProvenError(f"answered were {answered}; {why}")
        return result


def markdown(results: Results) -> str:
    """What was measured."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    head = results.header
    settings = head["settings"]
    yield f"# Serving through HTTP, {head['started']}"
    yield ""
    yield f"{measured_on(results)}; {settings['attention_backend']}."
    yield (
        f"{model_of(results)}; {settings['num_prompts']} "
        f"requests a run, {settings['input_tokens']} tokens in, {settings['output_tokens']} out, at most "
        f"{settings['max_running_requests']} at once; {acceptance(results)}; answers "
        f"{'streamed' if settings['stream'] else 'whole'}. Medians of the runs."
    )
    yield from in_turns(results)
    yield ""
    yield f"    {head['command']}"
    yield ""
    yield (
        "| requests/s sent | mode | output tokens/s | of base | TTFT p50 / p99, ms | inter-token p50 / p99, ms | runs |"
    )
    yield "| ---: | --- | ---: | ---: | ---: | ---: | ---: |"
    for rate in dict.fromkeys(row["request_rate"] for row in results.of_kind("measurement")):
        for mode in dict.fromkeys(row["mode"] for row in results.of_kind("measurement")):
            if runs := runs_of(results, mode, rate):
                yield _line(rate, mode, runs, runs_of(results, "base", rate), streamed=settings["stream"])
    for row in results.of_kind("error"):
        yield ""
        yield f"Not measured: {row['mode']}{when(row)}: {row['error']}"


def _line(rate: str, mode: str, runs: list[Row], base: list[Row], *, streamed: bool) -> str:
    def middle(name: str, of: list[Row] = runs) -> float:
        return median(run[name] for run in of)

    share = f"{middle('output_tokens_per_s') / middle('output_tokens_per_s', base):.3f}" if base else ""
    ttft = f"{middle('ttft_p50_ms'):.0f} / {middle('ttft_p99_ms'):.0f}" if streamed else ""
    itl = f"{middle('itl_p50_ms'):.1f} / {middle('itl_p99_ms'):.1f}" if streamed else ""
    return f"| {rate} | {mode} | {middle('output_tokens_per_s'):.0f} | {share} | {ttft} | {itl} | {len(runs)} |"


def runs_of(results: Results, mode: str, rate: str | None = None) -> list[Row]:
    """The runs of a mode at a rate, of all rounds and passes; at every rate unless one is given."""
    rows = [row for row in results.of_kind("measurement") if row["mode"] == mode]
    return [run for row in rows if rate in (None, row["request_rate"]) for run in row["repeats"]]


def write(path: Path) -> None:
    """Write and print the table beside a result file."""
    save(path, markdown)


def main(argv: list[str]) -> int:
    args = parse(argv)
    modes = ramp_modes(args.threshold)
    with result_file("bench.serve", args, argv) as work:
        runs = args.repeats * len(args.request_rates)
        measurement = Measurement(
            args, [modes[name] for name in args.modes], warm_up_s=15.0, pass_s=15.0 * runs, work=work
        )

        def warm_up(server: Server) -> None:
            client = Client(args, measurement, server.url)
            client.run(float("inf"), min(args.num_prompts, args.max_running_requests), args.seed)

        def measure(mode: BenchMode, server: Server, labels: Labels) -> None:
            client = Client(args, measurement, server.url)
            first_seed = args.seed + 1 + labels["pass"] * args.repeats
            for rate in args.request_rates:
                before = state_of(server)
                results = [client.run(rate, args.num_prompts, first_seed + n) for n in range(args.repeats)]
                after = state_of(server)
                runs = [{name: round(float(result[theirs]), 3) for name, theirs in _KEPT.items()} for result in results]
                tokens_per_s = median(run["output_tokens_per_s"] for run in runs)
                plain, spec = (after.steps(name) - before.steps(name) for name in ("plain", "spec"))
                row = {
                    "request_rate": str(rate),  # JSON knows no infinity
                    "output_tokens_per_s": tokens_per_s,
                    "plugin_steps": {"plain": plain, "spec": spec},
                    "repeats": runs,
                }
                measurement.write(labels, "measurement", row)
                say(f"{mode.name}, {rate} requests/s: {tokens_per_s:.0f} tokens/s")
                if mode.name == "ours-plain" and (spec or not plain):
                    raise NotProvenError(f"{plain} plain and {spec} speculative steps: not all plain")

        measurement.run(warm_up, measure)
    write(args.out)
    return 1 if measurement.failures else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

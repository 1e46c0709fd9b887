"""What the measurements through the HTTP server share: the model pair, the servers, their options."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import requests
from aiohttp import ClientError

from bench import host, models
from bench.budget import Budget
from bench.child import log_tail
from bench.modes import BenchMode, Served, complaints_about_server
from bench.results import RESULTS, Results, Row, append_row, now
from bench.server import Server, ServerError

_CLOSING_S = 10.0
"""Kept for ending a server, and for the table and the plot."""


class NotProvenError(Exception):
    """A run did not do what it was to be measured for."""


@dataclass(frozen=True)
class Pair:
    """A target, its draft, and how many token ids the target knows."""

    target: Path
    draft: Path
    vocab_size: int


class Measurement:
    """One invocation of a tool: its servers, one after another, and its result file.

    Args:
        args: The command line, with the options of :func:`add_options`.
        work: A folder for models and logs.
    """

    def __init__(self, args: argparse.Namespace, modes: Sequence[BenchMode], measure_s: float, work: Path) -> None:
        self.args = args
        self.work = work
        self.modes = modes
        self.pair = _pair(args, work)
        self.budget = Budget(args.budget_seconds - _CLOSING_S, args.startup_seconds, measure_s)
        self.failures = 0

    def run(self, measure: Callable[[BenchMode, Server, dict[str, Any]], None]) -> None:
        """Start each server in turn and measure it.

        Args:
            measure: Gets the mode, its server and the labels of its rows; an error of its own kind is written down,
                and the next server measured.
        """
        args, backend = self.args, self.args.attention_backend
        for number in range(args.rounds):
            shift = number % len(self.modes)
            for mode in (*self.modes[shift:], *self.modes[:shift]):
                labels = {"backend": backend, "mode": mode.name, "round": number}
                if not self.budget.allows(backend):
                    left, needed = self.budget.left_s, self.budget.needed_s(backend)
                    say(f"{mode.name}: skipped, {left:.0f} s left, about {needed:.0f} s needed")
                    self.fail(labels, "not started: out of time")
                    continue
                self._measure(mode, labels, measure)

    def _measure(self, mode: BenchMode, labels: dict[str, Any], measure: Any) -> None:
        started = time.monotonic()
        startup_s, complete = None, False
        log = self.work / f"{labels['round']}-{mode.name}.log"
        server = Server(mode.name, self._arguments(mode), self._environment(mode), log)
        say(f"{mode.name}: started, {self.budget.left_s:.0f} s left")
        try:
            with server:
                import sglang.bench_serving  # noqa: F401  (takes seconds: while the server starts)

                server.wait_until_healthy(self.budget.left_s)
                startup_s = time.monotonic() - started
                say(f"{mode.name}: up after {startup_s:.0f} s")
                state = state_of(server)
                self.write(labels, "server", _server_row(state, startup_s))
                if found := complaints_about_server(mode, state):
                    raise NotProvenError("; ".join(found))
                measure(mode, server, labels)
                if found := complaints_about_server(mode, state_of(server)):
                    raise NotProvenError("; ".join(found))
                complete = True
        except (ServerError, NotProvenError, requests.RequestException, ClientError, ValueError) as error:
            self.fail(labels, f"{type(error).__name__}: {error}", log_tail(log))
        finally:
            if startup_s is not None:
                self.budget.learn(labels["backend"], [startup_s], time.monotonic() - started, complete=complete)
            if self.args.logs is not None:
                self.args.logs.mkdir(parents=True, exist_ok=True)
                (self.args.logs / log.name).write_bytes(log.read_bytes())

    def write(self, labels: Mapping[str, Any], kind: str, values: Row) -> None:
        """Add a row to the result file."""
        append_row(self.args.out, {"kind": kind, **labels, **values})

    def fail(self, labels: Mapping[str, Any], error: str, tail: Sequence[str] = ()) -> None:
        """Write down what went wrong."""
        self.failures += 1
        self.write(labels, "error", {"error": error, "log_tail": list(tail)})
        say(f"{labels['mode']}: {error}", *(f"    {line}" for line in tail))

    def _environment(self, mode: BenchMode) -> dict[str, str]:
        env = mode.environment(os.environ, self.args.simulate_accept_length)
        return env if self.args.device == "cuda" else {"OMP_NUM_THREADS": "1", **env}

    def _arguments(self, mode: BenchMode) -> list[str]:
        args = self.args
        arguments: dict[str, Any] = {
            "model_path": str(self.pair.target),
            "grammar_backend": "none",
            "sampling_backend": "pytorch",
            "disable_radix_cache": True,
            "max_running_requests": args.max_running_requests,
            "stream_interval": args.stream_interval,
            # Each event carries its new tokens only, or the client would spend its time on parsing.
            "incremental_streaming_output": True,
            "random_seed": 1,
            "log_level_http": "warning",
            "skip_server_warmup": True,  # it is warmed up with the load's own kind of request
        }
        if args.model_path is None:
            arguments["load_format"] = "dummy"
        if args.device == "cpu":
            arguments |= {"device": "cpu", "dtype": "float32", "disable_cuda_graph": True}
        else:
            arguments |= {
                "attention_backend": args.attention_backend,
                "cuda_graph_backend_prefill": "disabled",
                "cuda_graph_max_bs_decode": args.max_running_requests,
                "mem_fraction_static": args.mem_fraction,
            }
            arguments |= {"dtype": "bfloat16"} if args.model_path is None else {}
        return flags(arguments | mode.engine_arguments(self.pair.draft, self.work)) + list(args.server_args)


def add_options(parser: argparse.ArgumentParser, modes: str) -> None:
    """The options of every tool that measures through the HTTP server.

    Args:
        modes: The modes measured unless others are asked for.
    """
    add = parser.add_argument
    add("--modes", type=comma(str), default=comma(str)(modes), metavar="A,B", help="default: %(default)s")
    add("--rounds", type=int, default=1, help="fresh servers a mode; the order rotates between rounds")
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--attention-backend", metavar="A", help="default: fa3; on a CPU its own")
    add("--model-shape", choices=sorted(models.SHAPES), help="dummy weights; default: llama-8b, on a CPU tiny")
    add("--model-path", type=Path, metavar="DIR", help="real weights instead")
    add("--draft-path", type=Path, metavar="DIR", help="their EAGLE3 draft")
    add("--simulate-accept-length", type=float, metavar="X", help="default: 2.5 for dummy weights; 0: not simulated")
    add("--threshold", type=int, default=32, metavar="N", help="of the mode ours-threshold (default: %(default)s)")
    add("--max-running-requests", type=int, default=256, metavar="N")
    add("--stream-interval", type=int, default=1, metavar="N", help="SGLang's; above 1 it holds speculation back")
    add("--mem-fraction", type=float, default=0.8, help="SGLang's mem_fraction_static")
    add("--seed", type=int, default=1, help="of prompts and arrivals: the same in every mode")
    add("--budget-seconds", type=float, default=3600.0, metavar="S", help="start no server that won't finish by then")
    add("--startup-seconds", type=float, default=120.0, metavar="S", help="expected first start")
    add("--out", type=Path, help="result file; default: one named by date and tool in bench/results")
    add("--logs", type=Path, metavar="DIR", help="keep the servers' logs there")
    add("server_args", nargs="*", metavar="-- ARG", help="more arguments for every server")


def settle_options(parser: argparse.ArgumentParser, args: argparse.Namespace, known: Mapping[str, BenchMode]) -> None:
    """Fill in what depends on other options, and refuse what does not fit together."""
    if unknown := [name for name in args.modes if name not in known]:
        parser.error(f"no such mode: {', '.join(unknown)} (known: {', '.join(known)})")
    if (args.model_path is None) != (args.draft_path is None):
        parser.error("--model-path and --draft-path belong together")
    if args.model_path is not None and args.model_shape is not None:
        parser.error("--model-path and --model-shape exclude each other")
    on_gpu = args.device == "cuda"
    if args.model_path is None:
        args.model_shape = args.model_shape or ("llama-8b" if on_gpu else "tiny")
        if args.simulate_accept_length is None:
            args.simulate_accept_length = 2.5
    args.simulate_accept_length = args.simulate_accept_length or None
    args.attention_backend = args.attention_backend or ("fa3" if on_gpu else "cpu")
    if args.out is None:
        stamp = datetime.now(timezone.utc).strftime("%Y%m%d-%H%M")
        args.out = RESULTS / f"{stamp}-{parser.prog.rpartition('.')[2]}-{args.device}.jsonl"


def comma(kind: type) -> Callable[[str], list[Any]]:
    """A list separated by commas."""
    return lambda text: [kind(part) for part in text.split(",") if part]


def flags(arguments: Mapping[str, Any]) -> list[str]:
    """Arguments of ``sgl.Engine`` as ``sglang.launch_server`` takes them."""
    words: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words += map(str, value) if isinstance(value, (list, tuple)) else [str(value)]
    return words


def state_of(server: Server) -> Served:
    """What a running server says about itself."""
    answer = requests.get(f"{server.url}/server_info", timeout=30)
    answer.raise_for_status()
    return Served(answer.json()["internal_states"][0])


def say(*lines: str) -> None:
    """Progress, for whoever watches."""
    for line in lines:
        print(line, flush=True)


@contextmanager
def result_file(tool: str, args: argparse.Namespace, argv: Sequence[str]) -> Iterator[Path]:
    """A new result file with its header, and a folder to work in.

    Raises:
        SystemExit: the file exists, or the plugin is not installed.
    """
    if any(name.startswith("ours") for name in args.modes) and not host.plugin_is_installed():
        say("The plugin is not installed in this environment, so SGLang would not load it.")
        raise SystemExit(2)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    if args.out.exists() and args.out.stat().st_size:
        say(f"{args.out.name} exists; a file holds one run.")
        raise SystemExit(2)
    # So that a server is ended, and what was measured reported, when somebody ends us.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    append_row(args.out, _header(tool, args, argv))
    start = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        try:
            yield Path(work)
        finally:
            failures = len(Results.read(args.out).of_kind("error"))
            seconds = round(time.monotonic() - start, 1)
            append_row(args.out, {"kind": "end", "at": now(), "seconds": seconds, "failures": failures})


def _header(tool: str, args: argparse.Namespace, argv: Sequence[str]) -> Row:
    paths = ("out", "logs", "model_path", "draft_path")
    settings = {name: value for name, value in vars(args).items() if name not in paths}
    # Where things lie is a matter of the machine.
    words = [Path(word).name if word.startswith("/") else word for word in argv]
    return {
        "kind": "header",
        "tool": tool,
        "started": now(),
        "command": " ".join(["python -m", tool, *words]),
        "settings": settings | {"model": args.model_path and args.model_path.name},
        "shape": asdict(models.SHAPES[args.model_shape]) if args.model_shape else None,
        "host": host.facts(),
    }


def _pair(args: argparse.Namespace, work: Path) -> Pair:
    if args.model_path is not None:
        config = json.loads((args.model_path / "config.json").read_text())
        return Pair(args.model_path.resolve(), args.draft_path.resolve(), int(config["vocab_size"]))
    shape = models.SHAPES[args.model_shape]
    target, draft = models.write_pair(work / "models", shape)
    models.write_tokenizer(target, shape)
    return Pair(target, draft, shape.vocab_size)


def _server_row(served: Served, startup_s: float) -> Row:
    kept = (
        "attention_backend",
        "disable_cuda_graph",
        "disable_overlap_schedule",
        "dtype",
        "max_running_requests",
        "speculative_algorithm",
        "speculative_num_steps",
        "stream_interval",
    )
    return {
        "startup_s": round(startup_s, 1),
        "arguments": {name: served.state.get(name) for name in kept},
        "memory_gb": served.state.get("memory_usage"),
        "plugin": served.plugin,
    }

"""What the measurements through the HTTP server share: the model pair, the servers and their turns, their options."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import requests
from aiohttp import ClientError

from bench import cores, host, models, order, sharing
from bench.budget import Budget
from bench.child import log_tail
from bench.modes import BenchMode, Served, complaints_about_server
from bench.order import affordable, plan, starts, turns
from bench.results import RESULTS, Results, Row, append_row, now
from bench.server import Server, ServerError, free_port

_CLOSING_S = 15.0
"""Kept for ending the servers, and for the table and the plot."""

_WATCH_S = 0.5
"""Between two looks at servers that start."""

_PREFILL_GRAPH_SIZES = (128, 256, 384, 512, 640, 768, 1024, 1280, 1536, 2048)
"""Prompts of 128 and 256 tokens, some at once. Without graphs a prefill keeps the host longer than the GPU."""

_NOT_STARTED = "not started: out of time"

Labels = dict[str, Any]
"""What all rows of a server have, or all of one pass of it: backend, mode, round, pass."""

WarmUp = Callable[[Server], None]
Measure = Callable[[BenchMode, Server, Labels], None]


class NotProvenError(Exception):
    """A run did not do what it was to be measured for."""


_FAILURES = (ServerError, NotProvenError, requests.RequestException, ClientError, asyncio.TimeoutError, ValueError)
"""Of one server, not of the tool."""


@dataclass(frozen=True)
class Pair:
    """A target, its draft, and how many token ids the target knows."""

    target: Path
    draft: Path
    vocab_size: int


@dataclass
class _Member:
    """One server of a group.

    Attributes:
        startup_s: None until it is up.
        gone: Whether it failed, or what was left of it was left out: it was ended.
    """

    mode: BenchMode
    labels: Labels
    server: Server
    startup_s: float | None = None
    gone: bool = False

    @property
    def is_starting(self) -> bool:
        """Whether it is neither up nor gone."""
        return self.startup_s is None and not self.gone


class Measurement:
    """One invocation of a tool: its servers, one group after another, and its result file.

    Args:
        args: The command line, with the options of :func:`add_options`.
        warm_up_s: Expected for the warm-up of a server.
        pass_s: Expected for a pass of a server.
        work: A folder for models and logs.
    """

    def __init__(
        self, args: argparse.Namespace, modes: Sequence[BenchMode], warm_up_s: float, pass_s: float, work: Path
    ) -> None:
        self.args = args
        self.work = work
        self.modes = {mode.name: mode for mode in modes}
        self.pair = _pair(args, work)
        measure_s = warm_up_s + args.passes * pass_s
        self.budget = Budget(args.budget_seconds - _CLOSING_S, args.startup_seconds, measure_s)
        self.failures = 0
        self._pass_s: dict[str, float] = {}

    def run(self, warm_up: WarmUp, measure: Measure) -> None:
        """Start each group of servers in turn and measure them.

        How a server fails is written down, and it is ended; the others are measured.

        Args:
            warm_up: Comes before the first pass of a server.
            measure: Measures one pass; gets the mode, its server and the labels of its rows.
        """
        args = self.args
        planned = plan([args.attention_backend], list(self.modes), args.rounds, args.servers_at_once)
        for group in affordable(self.budget, planned, self._skip):
            self._measure(group, warm_up, measure)

    def _skip(self, labels: Labels, why: str) -> None:
        say(f"{labels['mode']}: {why}")
        self.fail(labels, _NOT_STARTED)

    def _measure(self, group: list[Labels], warm_up: WarmUp, measure: Measure) -> None:
        """Start a group of servers, measure them in turns, and end them."""
        began = time.monotonic()
        members: list[_Member] = []
        startups_s: list[float] = []
        try:
            with ExitStack() as running:
                for together in starts(group):
                    startups_s += self._bring_up(together, members, running)
                self._take_turns(members, warm_up, measure)
        finally:
            if self.args.logs is not None:
                self.args.logs.mkdir(parents=True, exist_ok=True)
                for member in members:
                    (self.args.logs / member.server.log.name).write_bytes(member.server.log.read_bytes())
        if startups_s:
            complete = len(members) == len(group) and not any(member.gone for member in members)
            total_s = time.monotonic() - began
            self.budget.learn(self.args.attention_backend, startups_s, total_s, complete=complete, servers=len(group))

    def _bring_up(self, together: list[Labels], members: list[_Member], running: ExitStack) -> list[float]:
        """Start servers at once, and wait for them; returns the seconds that the slowest took, if one is up.

        Args:
            members: Those that were started before, to which these are added.
            running: Ends them.
        """
        if self.budget.left_s <= 0:
            for labels in together:
                self.fail(labels, _NOT_STARTED)
            return []
        began = time.monotonic()
        started = [self._start(labels, len(members) + number) for number, labels in enumerate(together)]
        members += started
        for member in started:
            running.enter_context(member.server)
            say(f"{member.mode.name}: started, {self.budget.left_s:.0f} s left")

        import sglang.bench_serving  # noqa: F401  (takes seconds: while the servers start)

        while starting := [member for member in started if member.is_starting]:
            for member in starting:
                with self._written_down(member, member.labels):
                    self._look_at(member, time.monotonic() - began)
            time.sleep(_WATCH_S)
        up_s = [member.startup_s for member in started if member.startup_s is not None]
        return [max(up_s)] if up_s else []

    def _start(self, labels: Labels, number: int) -> _Member:
        mode = self.modes[labels["mode"]]
        log = self.work / f"{labels['round']}-{mode.name}.log"
        port = free_port(sharing.ports(number))
        return _Member(mode, labels, Server(mode.name, self._arguments(mode), self._environment(mode), log, port))

    def _look_at(self, member: _Member, after_s: float) -> None:
        """See whether a server is up, and is what it was to be."""
        if member.server.is_healthy():
            member.startup_s = after_s
            say(f"{member.mode.name}: up after {after_s:.0f} s")
            state = state_of(member.server)
            self.write(member.labels, "server", _server_row(state, after_s, shares_gpu=self.shares_gpu))
            _prove(member.mode, state)
        elif self.budget.left_s <= 0:
            raise ServerError(f"The {member.mode.name} server was not ready after {after_s:.0f} s.")

    def _take_turns(self, members: list[_Member], warm_up: WarmUp, measure: Measure) -> None:
        """Measure each server in each pass while the others idle."""
        passes = self.args.passes
        for pass_number, _, member in turns(passes, [None], members):
            mode, server = member.mode, member.server
            if member.gone:
                continue
            # As long as its last one, or, before its first, as the longest of another.
            expected_s = self._pass_s.get(mode.name, max(self._pass_s.values(), default=0.0))
            if expected_s > self.budget.left_s:
                self._give_up(member, member.labels, f"out of time before pass {pass_number + 1} of {passes}")
                continue
            if passes > 1:
                say(f"{mode.name}: pass {pass_number + 1} of {passes}, {self.budget.left_s:.0f} s left")
            labels = {**member.labels, "pass": pass_number}
            with self._written_down(member, labels):
                if pass_number == 0:
                    warm_up(server)
                    freeze_garbage(server)
                if self.args.pin_schedulers:
                    self._pin(server, labels)
                began = time.monotonic()
                measure(mode, server, labels)
                self._pass_s[mode.name] = time.monotonic() - began
                _prove(mode, state_of(server))

    def _pin(self, server: Server, labels: Labels) -> None:
        """Move a server's scheduler to the quickest cores.

        Raises:
            NotProvenError: there is none to move.
        """
        row = cores.pin(self.args.pin_schedulers, [server.pid])
        self.write(labels, "cores", row)
        if not row["schedulers"]:
            raise NotProvenError("no scheduler was found to pin")

    @contextmanager
    def _written_down(self, member: _Member, labels: Labels) -> Iterator[None]:
        """Write down how a server failed, and end it: what it still does would disturb the others."""
        try:
            yield
        except _FAILURES as error:
            self._give_up(member, labels, f"{type(error).__name__}: {error}", log_tail(member.server.log))

    def _give_up(self, member: _Member, labels: Labels, error: str, tail: Sequence[str] = ()) -> None:
        member.gone = True
        member.server.stop()
        self.fail(labels, error, tail)

    @property
    def shares_gpu(self) -> bool:
        """Whether a server may have others beside it."""
        return bool(self.args.servers_at_once > 1)

    def write(self, labels: Mapping[str, Any], kind: str, values: Row) -> None:
        """Add a row to the result file."""
        append_row(self.args.out, {"kind": kind, **labels, **values})

    def fail(self, labels: Mapping[str, Any], error: str, tail: Sequence[str] = ()) -> None:
        """Write down what went wrong."""
        self.failures += 1
        self.write(labels, "error", {"error": error, "log_tail": list(tail)})
        say(f"{labels['mode']}: {error}", *(f"    {line}" for line in tail))

    def _environment(self, mode: BenchMode) -> dict[str, str]:
        env = mode.environment(os.environ, self.args.simulate_accept_length, self.args.attention_backend)
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
        if self.shares_gpu:
            arguments |= sharing.arguments(args.max_running_requests, args.input_tokens + args.output_tokens)
        elif args.device == "cuda":
            arguments["mem_fraction_static"] = args.mem_fraction
        if args.device == "cpu":
            arguments |= {"device": "cpu", "dtype": "float32", "disable_cuda_graph": True}
        else:
            arguments |= {
                "attention_backend": args.attention_backend,
                "cuda_graph_backend_prefill": "breakable" if args.prefill_graph_sizes else "disabled",
                "cuda_graph_bs_prefill": args.prefill_graph_sizes or None,
                "cuda_graph_max_bs_decode": args.max_running_requests,
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
    order.add_options(parser)
    add("--device", choices=("cuda", "cpu"), default="cuda")
    add("--attention-backend", metavar="A", help="default: fa3; on a CPU its own")
    add("--model-shape", choices=sorted(models.SHAPES), help="dummy weights; default: llama-8b, on a CPU tiny")
    add("--model-path", type=Path, metavar="DIR", help="real weights instead")
    add("--draft-path", type=Path, metavar="DIR", help="their EAGLE3 draft")
    add("--simulate-accept-length", type=float, metavar="X", help="default: 2.5 for dummy weights; 0: not simulated")
    add("--threshold", type=int, default=32, metavar="N", help="of the mode ours-threshold (default: %(default)s)")
    add("--max-running-requests", type=int, default=256, metavar="N")
    add("--stream-interval", type=int, default=1, metavar="N", help="SGLang's; above 1 it holds speculation back")
    add(
        "--prefill-graph-sizes",
        type=comma(int),
        default=list(_PREFILL_GRAPH_SIZES),
        metavar="N,M",
        help="tokens of SGLang's CUDA graphs for prefills, in every mode; '' for none (default: %(default)s)",
    )
    add("--mem-fraction", type=float, default=0.8, help="SGLang's mem_fraction_static, one server at once")
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
    order.check_options(parser, args)
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


def freeze_garbage(server: Server) -> None:
    """Keep a server's processes from looking through what they hold by now: Python stops for that, amid the load."""
    requests.post(f"{server.url}/freeze_gc", timeout=30).raise_for_status()


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


def _prove(mode: BenchMode, served: Served) -> None:
    if found := complaints_about_server(mode, served):
        raise NotProvenError("; ".join(found))


def _server_row(served: Served, startup_s: float, *, shares_gpu: bool) -> Row:
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
        "memory_gb": sharing.memory_gb(served, shares_gpu=shares_gpu),
        "plugin": served.plugin,
    }

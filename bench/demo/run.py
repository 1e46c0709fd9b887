"""The demo from start to end."""

from __future__ import annotations

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import NoReturn

import httpx
from rich.console import Console

from bench.server import Server, ServerError, server_arguments, server_environment

from . import live, report
from .load import Load, LoadError, Prompt, TokenIds, answer_all, different, make_prompts, phases, together
from .options import Options, parse
from .watch import Watcher, WatchError, accept_length

_POLL_SECONDS = 0.5
_SEED = 20


def prompts_for(options: Options) -> tuple[Prompt, ...]:
    """Held-out prompts of the tiny pair's kind."""
    from tests.models.prompts import heldout_prompts

    return make_prompts(heldout_prompts(options.requests, _SEED), options.tokens, _SEED)


def client_for(server: Server) -> httpx.AsyncClient:
    # A burst must not queue here, or the server would never see it.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=0)
    return httpx.AsyncClient(base_url=server.url, timeout=httpx.Timeout(120.0), limits=limits)


async def ask_reference(server: Server, prompts: Sequence[Prompt], at_once: int) -> list[TokenIds]:
    async with client_for(server) as client:
        return await answer_all(client, prompts, at_once)


async def run_load(
    server: Server,
    prompts: Sequence[Prompt],
    expected: Sequence[TokenIds],
    options: Options,
    console: Console,
) -> report.Outcome:
    """Drive the load and show it."""
    trace = phases(options.low, options.high, options.seconds, options.bursts)
    async with client_for(server) as client:
        watcher = Watcher(client)
        load = Load(client, prompts, expected, trace, at_boundary=watcher.poll)
        await watcher.poll()
        title = f"plain above {options.threshold} running requests, speculative again at {options.resume}"
        with live.Display(console, title) as display:
            await together([load.run(), _watch(load, watcher, display)])
        await watcher.poll()
    return report.Outcome(
        trace=trace,
        boundaries=tuple(load.boundaries),
        samples=tuple(watcher.samples),
        switches=tuple(watcher.switches),
        answers=tuple(load.answers),
        meter=load.meter,
        threshold=options.threshold,
        resume=options.resume,
        on_gpu=options.on_gpu,
    )


async def _watch(load: Load, watcher: Watcher, display: live.Display) -> None:
    start = time.time()
    first = before = watcher.samples[0]
    while not load.finished:
        await asyncio.sleep(_POLL_SECONDS)
        now = await watcher.poll()
        display.show(
            live.Moment(
                seconds=now.at - start,
                phase=load.trace[load.phase].name,
                mode=now.mode,
                running=now.running,
                tokens_per_second=load.meter.rate(before.at, now.at),
                accept_length=accept_length(before, now),
                answers=len(load.answers),
                wrong=len(load.wrong),
                switches=now.switches - first.switches,
            )
        )
        before = now


def run(options: Options, logs: Path, console: Console) -> int:
    """The whole demo; returns the exit status."""
    begin = time.monotonic()
    prompts = prompts_for(options)
    device = "GPU" if options.on_gpu else "CPU"

    def server(name: str, draft: Path | None) -> Server:
        arguments = server_arguments(options.model_path, draft, options.threshold, options.on_gpu, options.server_args)
        environment = server_environment(os.environ, draft is not None, options.on_gpu)
        return Server(name, arguments, environment, logs / f"{name}.log")

    reference, adaptive = server("reference", None), server("adaptive", options.draft_path)
    current = reference
    try:
        say(console, f"1/3 Reference answers: a server without speculation, on the {device} ...")
        with reference:
            reference.wait_until_healthy(options.start_timeout)
            expected = asyncio.run(ask_reference(reference, prompts, at_once=options.high))
        say(console, f"    {len(expected)} answers, {sum(map(len, expected))} tokens")
        current = adaptive
        say(console, "2/3 The server with speculation and the plugin ...")
        with adaptive:
            adaptive.wait_until_healthy(options.start_timeout)
            say(console, f"3/3 The load: {options.low} requests at once, bursts of {options.high}")
            outcome = asyncio.run(run_load(adaptive, prompts, expected, options, console))
    except (ServerError, LoadError, WatchError) as error:
        say(console, f"\nFAILED: {error}")
        if current.ended_by_itself is not None:
            say(console, f"The {current.name} server ended with exit code {current.ended_by_itself}.")
        say(console, f"The end of the {current.name} server's log:\n{current.log_tail()}")
        return 1

    console.print()
    console.print(report.table(outcome))
    report.plot(outcome, options.out, f"One SGLang server, two ways to decode ({device})")
    found = report.complaints(outcome)
    wrong = different(outcome.answers)
    tokens = sum(answer.tokens for answer in outcome.answers)
    if not found:
        equal = len(outcome.answers) - len(wrong)
        share = f"{equal} of {len(outcome.answers)}" if wrong else f"All {equal}"
        say(console, f"{share} answers ({tokens} tokens) equal those of the server without speculation.")
        if wrong:
            say(console, "In bf16 the others may: a verify step's kernels round another way than a plain step's.")
    say(console, f"Plot: {_relative(options.out)}    Time: {time.monotonic() - begin:.0f} s")
    if found:
        complaint = "\nFAILED: ".join(found)
        say(console, f"FAILED: {complaint}\nThe end of the server's log:\n{adaptive.log_tail()}")
        return 1
    say(console, f"OK: the server switched both ways{'' if wrong else ', and every answer was right'}.")
    return 0


def say(console: Console, text: str) -> None:
    """Print as it is: a log's brackets are no markup, and its lines are not to be folded."""
    console.print(text, markup=False, highlight=False, soft_wrap=True)


def _relative(path: Path) -> Path:
    return path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path


def _end(number: int, _frame: object) -> NoReturn:
    raise SystemExit(128 + number)


def main() -> int:
    options = parse()
    # Ends like Ctrl-C: through the `with` blocks, which end the servers.
    signal.signal(signal.SIGTERM, _end)
    signal.signal(signal.SIGHUP, _end)
    console = Console()
    logs = Path(tempfile.mkdtemp(prefix="adaptive-spec-demo-"))
    try:
        return run(options, logs, console)
    except KeyboardInterrupt:
        say(console, "\nInterrupted: the servers have been ended.")
        return 130
    finally:
        if options.keep_log:
            say(console, f"Logs: {logs}")
        else:
            for log in logs.glob("*.log"):
                log.unlink()
            logs.rmdir()

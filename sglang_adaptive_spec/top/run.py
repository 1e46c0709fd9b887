"""The command: options, and the loop from one sample to the next."""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator, Sequence

from rich.console import Console
from rich.live import Live

from sglang_adaptive_spec.top.errors import ServerGone
from sglang_adaptive_spec.top.history import History
from sglang_adaptive_spec.top.sampler import Sampler
from sglang_adaptive_spec.top.screen import Screen

KEY_VARIABLE = "SGLANG_ADAPTIVE_SPEC_API_KEY"
"""The server's key, where the command line is no place for a secret."""

GIVE_UP_SECONDS = 15.0
"""A server that was there and does not answer for this long is gone."""


def parser() -> argparse.ArgumentParser:
    """The options."""
    options = argparse.ArgumentParser(
        prog="python -m sglang_adaptive_spec.top",
        description="A live view of one SGLang server that runs with this plugin. Ctrl-C ends it.",
    )
    options.add_argument("url", metavar="URL", help="The server, such as http://localhost:30000.")
    options.add_argument("--api-key", metavar="K", help=f"The server's --api-key. Default: {KEY_VARIABLE}.")
    options.add_argument(
        "--interval", type=_positive, default=1.0, metavar="S", help="Seconds between two looks. Default: 1."
    )
    options.add_argument(
        "--minutes", type=_positive, default=5.0, metavar="M", help="How far back the strips reach. Default: 5."
    )
    options.add_argument("--once", action="store_true", help="Look twice, one interval apart, print, and end.")
    options.add_argument("--json", action="store_true", help="Print JSON, a line a look.")
    return options


def _positive(text: str) -> float:
    value = float(text)
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not above zero")
    return value


def run(arguments: Sequence[str]) -> None:
    """Show one server until it is gone or the user has seen enough.

    Raises:
        TopError: there is nothing to show.
        SystemExit: wrong options.
    """
    command = parser()
    options = command.parse_args(arguments)
    console = Console()
    if not (options.once or options.json or console.is_terminal):
        command.error("standard output is no terminal: use --once or --json")
    sampler = Sampler(options.url, options.api_key or os.environ.get(KEY_VARIABLE))
    span_seconds = 60 * options.minutes
    history = History(span_seconds)

    def screen(silent_seconds: float = 0.0) -> Screen:
        return Screen(history, sampler.url, span_seconds, options.interval, silent_seconds)

    looks = look(sampler, history, options.interval)
    if options.once:
        next(looks)
        next(looks)
        _print_json(history) if options.json else console.print(screen())
    elif options.json:
        for silent_seconds in looks:
            if not silent_seconds:
                _print_json(history)
    else:
        next(looks)  # what can't be shown at all is said on the screen as it is
        with Live(screen(), console=console, screen=True, auto_refresh=False) as live:
            for silent_seconds in looks:
                live.update(screen(silent_seconds), refresh=True)


def look(sampler: Sampler, history: History, interval_seconds: float) -> Iterator[float]:
    """Sample at a steady pace; each time, how long the server has been silent (0: it has answered).

    Raises:
        TopError: the first look failed, or the server was silent for too long, or is another one now.
    """
    history.add(sampler.sample())
    answered = started = time.monotonic()
    yield 0.0
    while True:
        # In step with the start; what took too long is left out, not made up for.
        time.sleep(interval_seconds - (time.monotonic() - started) % interval_seconds)
        try:
            history.add(sampler.sample())
        except ServerGone:
            silent_seconds = time.monotonic() - answered
            if silent_seconds > GIVE_UP_SECONDS:
                raise
            yield silent_seconds
        else:
            answered = time.monotonic()
            yield 0.0


def _print_json(history: History) -> None:
    sys.stdout.write(json.dumps(history.as_json()) + "\n")
    sys.stdout.flush()

"""The load of a command line: its options, its trace, and a recording of how a server answered all of it."""

from __future__ import annotations

import argparse
import asyncio
from dataclasses import dataclass

from bench.ramp.client import Recording, send
from bench.ramp.outcome import complaints
from bench.ramp.trace import Phase, Request, make_trace, parse_phases
from bench.serving import NotProvenError


def add_load_options(parser: argparse.ArgumentParser, phases: str) -> None:
    """What is sent, and when.

    Args:
        phases: Sent unless others are asked for.
    """
    add = parser.add_argument
    add("--phases", default=phases, metavar="P,Q", help="SECONDSs@RATE/s or SECONDSs@RATE-RATE/s; default: %(default)s")
    add("--time-scale", type=float, default=1.0, metavar="X", help="make every phase X times as long")
    add("--rate-scale", type=float, default=1.0, metavar="X", help="make every rate X times as high")
    add("--input-tokens", type=int, default=128, metavar="N", help="a prompt's length (default: %(default)s)")
    add("--output-tokens", type=int, default=256, metavar="N", help="of the longest answer; the shortest has half")
    add("--drain-seconds", type=float, default=60.0, metavar="S", help="longest wait after the last arrival")


def settle_load(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse phases that are none, or in which nobody comes."""
    try:
        phases = phases_of(args)
    except ValueError as error:
        parser.error(str(error))
    if sum(phase.expected_requests for phase in phases) < 1:
        parser.error("less than one request is to be expected")


def phases_of(args: argparse.Namespace) -> tuple[Phase, ...]:
    """The phases of a command line.

    Raises:
        ValueError: they are none.
    """
    return parse_phases(args.phases, args.time_scale, args.rate_scale)


@dataclass(frozen=True)
class Load:
    """The same requests at the same times for every server.

    Attributes:
        drain_s: The longest wait for answers after the last arrival.
    """

    phases: tuple[Phase, ...]
    trace: list[Request]
    drain_s: float

    @classmethod
    def of(cls, args: argparse.Namespace, vocab: int) -> Load:
        """What a command line asks for; ``vocab`` is the target's."""
        phases, sizes = phases_of(args), {"input_tokens": args.input_tokens, "output_tokens": args.output_tokens}
        return cls(phases, make_trace(phases, seed=args.seed, vocab=vocab, **sizes), args.drain_seconds)

    def send(self, url: str) -> Recording:
        """Send all of it, and wait for the last answer.

        Raises:
            NotProvenError: a request was not answered as asked, or not in time.
        """
        try:
            recording = send(url, self.trace, self.drain_s)
        except asyncio.TimeoutError:
            raise NotProvenError(f"answers were missing {self.drain_s:.0f} s after the last arrival") from None
        if found := complaints(recording.answers):
            raise NotProvenError("; ".join(found))
        return recording

"""The load: phases of a rate, and the arrivals that a seed makes of them."""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

_PHASE = re.compile(r"(?P<seconds>[\d.]+)s@(?P<first>[\d.]+)(?:-(?P<last>[\d.]+))?/s")


@dataclass(frozen=True)
class Phase:
    """A stretch of time in which requests arrive at a rate that is constant, or changes evenly.

    Attributes:
        first_rate: Requests a second at its beginning.
        last_rate: Requests a second at its end.
    """

    seconds: float
    first_rate: float
    last_rate: float

    @property
    def expected_requests(self) -> float:
        """Arrivals to expect in all of it."""
        return self.seconds * (self.first_rate + self.last_rate) / 2

    def time_of(self, expected: float) -> float:
        """Seconds after which so many arrivals are expected, of at most :attr:`expected_requests`."""
        slope = (self.last_rate - self.first_rate) / self.seconds
        if slope == 0:
            return expected / self.first_rate
        # The integral of the rate, first * t + slope * t^2 / 2, solved for t.
        return (math.sqrt(max(0.0, self.first_rate**2 + 2 * slope * expected)) - self.first_rate) / slope


def parse_phases(text: str, time_scale: float = 1.0, rate_scale: float = 1.0) -> tuple[Phase, ...]:
    """Read phases such as ``8s@2/s,8s@2-50/s``: eight seconds of two requests a second, then eight rising to fifty.

    Raises:
        ValueError: that is no list of phases.
    """
    phases = []
    for part in text.split(","):
        match = _PHASE.fullmatch(part.strip())
        if match is None:
            raise ValueError(f"{part!r} is no phase: write 8s@2/s or 8s@2-50/s")
        first = float(match["first"]) * rate_scale
        last = first if match["last"] is None else float(match["last"]) * rate_scale
        phases.append(Phase(float(match["seconds"]) * time_scale, first, last))
    if not all(phase.seconds > 0 for phase in phases):
        raise ValueError("a phase lasts longer than nothing")
    return tuple(phases)


def boundaries(phases: Sequence[Phase]) -> list[float]:
    """Where each phase begins, and where the last one ends, in seconds."""
    return list(accumulate((phase.seconds for phase in phases), initial=0.0))


def rises_and_falls(phases: Sequence[Phase]) -> tuple[list[float], list[float]]:
    """When the rate begins to rise, and when to fall, in seconds: each phase that sets in or ends higher, or lower."""
    rises, falls = [], []
    before = 0.0
    for begin, phase in zip(boundaries(phases), phases, strict=False):
        if phase.first_rate > before or phase.last_rate > phase.first_rate:
            rises.append(begin)
        if phase.first_rate < before or phase.last_rate < phase.first_rate:
            falls.append(begin)
        before = phase.last_rate
    return rises, falls


def arrivals(phases: Sequence[Phase], rng: random.Random) -> Iterator[float]:
    """Times of a Poisson process of the phases' rate, in seconds.

    By inversion: arrivals of rate one on the axis of expected arrivals.
    """
    begin, spent, drawn = 0.0, 0.0, rng.expovariate(1.0)
    for phase in phases:
        while drawn < spent + phase.expected_requests:
            yield begin + phase.time_of(drawn - spent)
            drawn += rng.expovariate(1.0)
        begin, spent = begin + phase.seconds, spent + phase.expected_requests


@dataclass(frozen=True)
class Request:
    """One request of a trace.

    Attributes:
        at_s: When it arrives.
        prompt: Token ids.
        output_tokens: Generated, whatever they are.
    """

    at_s: float
    prompt: list[int]
    output_tokens: int


def make_trace(
    phases: Sequence[Phase], *, seed: int, input_tokens: int, output_tokens: int, vocab: int
) -> list[Request]:
    """The same requests at the same times for whoever asks with the same seed.

    Args:
        input_tokens: Every prompt's length.
        output_tokens: The longest answer; the shortest is half of it, so that requests leave one by one.
        vocab: Ids are drawn from 2 up to this.
    """
    rng = random.Random(seed)

    def prompt() -> list[int]:
        return [rng.randrange(2, vocab) for _ in range(input_tokens)]

    times: Any = list(arrivals(phases, rng))
    return [Request(at_s, prompt(), rng.randint((output_tokens + 1) // 2, output_tokens)) for at_s in times]

"""From which batch size plain decode wins, read off a table of step times."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_adaptive_spec.modes import Mode

ACCEPT_LENGTHS = (1.2, 1.6, 2.0, 2.5, 3.0, 3.5, 4.0)

_LEAST_BREAK_EVEN = 0.95
"""A verify step computes what a plain step does, and more; the rest is for what any two measurements differ by."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Both modes at one batch size.

    Attributes:
        requests: Requests in the batch.
        context_tokens: Length of each, at least; the longest measured in both modes at that size.
        spec_seconds: One speculative step.
        plain_seconds: One plain step.
    """

    requests: int
    context_tokens: int
    spec_seconds: float
    plain_seconds: float

    @property
    def break_even_accept_length(self) -> float:
        """Tokens that a verify step must give a request to be worth its time."""
        return self.spec_seconds / self.plain_seconds


def pairs(table: Iterable[Mapping[str, Any]]) -> list[Pair]:
    """Batch sizes that were measured in both modes, ascending, from ``StepCosts.table``."""
    seconds = {(Mode(row["mode"]), row["context_tokens"], row["requests"]): float(row["seconds"]) for row in table}
    # Ascending contexts: the longest one stays.
    found = {
        requests: Pair(requests, context, spec, seconds[Mode.PLAIN, context, requests])
        for (mode, context, requests), spec in sorted(seconds.items(), key=lambda item: item[0][1:])
        if mode is Mode.SPEC and (Mode.PLAIN, context, requests) in seconds
    }
    return [found[requests] for requests in sorted(found)]


def spec_wins_up_to(measured: Sequence[Pair], accept_length: float) -> int:
    """The largest batch size measured before the first one where plain decode wins; 0 if it wins at the smallest.

    From there on one more fast speculative step, which may be noise, is not counted on.
    """
    most = 0
    for pair in measured:
        if pair.break_even_accept_length >= accept_length:
            break
        most = pair.requests
    return most


def contradict(measured: Sequence[Pair]) -> bool:
    """Whether noise shows: a verify step faster than a plain step, or one that pays again at a much larger batch."""
    highest = 0.0
    for pair in measured:
        if pair.break_even_accept_length < max(_LEAST_BREAK_EVEN, highest / 2):
            return True
        highest = max(highest, pair.break_even_accept_length)
    return False


def most_spec_requests(measured: Sequence[Pair], most_accepted_tokens: int) -> int | None:
    """The batch size above which speculation loses even with every draft accepted; None if it may win at all sizes.

    The largest one measured where it wins counts, and the next size is added, so that nothing is lost between them.
    """
    sizes = [pair.requests for pair in measured]
    wins = [pair.requests for pair in measured if pair.break_even_accept_length < most_accepted_tokens]
    if not sizes or (wins and wins[-1] == sizes[-1]):
        return None
    return sizes[sizes.index(wins[-1]) + 1] if wins else sizes[0]


def as_text(measured: Sequence[Pair]) -> str:
    """Both tables, for a terminal."""
    lines = ["requests   context   spec ms  plain ms   breaks even at accept length"]
    lines += [
        f"{pair.requests:8d}{pair.context_tokens:10d}{1e3 * pair.spec_seconds:10.2f}{1e3 * pair.plain_seconds:10.2f}"
        f"{pair.break_even_accept_length:31.2f}"
        for pair in measured
    ]
    lines += ["", "accept length   speculation wins up to"]
    for accept_length in ACCEPT_LENGTHS:
        most = spec_wins_up_to(measured, accept_length)
        if most == 0:
            verdict = "no batch size"
        elif most == measured[-1].requests:
            verdict = f"{most} requests, the largest batch measured"
        else:
            verdict = f"{most} requests"
        lines.append(f"{accept_length:13.1f}   {verdict}")
    if contradict(measured):
        lines += [
            "",
            "These times contradict each other, as on a busy machine. Measure again when it is idle, or for longer.",
        ]
    return "\n".join(lines)

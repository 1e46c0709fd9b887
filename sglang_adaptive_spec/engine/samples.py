"""Step times on their way to the policy, the same ones on every tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_adaptive_spec.clock import StepTime

SHARE_EVERY_STEPS = 64
"""Decode steps between two broadcasts: rare enough to cost nothing, often enough for a cost table that moves slowly."""


class SampleRelay:
    """Hands on step times at once on a single rank; rank 0's, gathered and seldom, on several.

    Args:
        ranks: Tensor-parallel ranks.
        from_rank_0: Rank 0's value, on every rank; called at the same step on each.
        deliver: Takes a step time.
    """

    def __init__(self, ranks: int, from_rank_0: Callable[[Any], Any], deliver: Callable[[StepTime], None]) -> None:
        self._ranks = ranks
        self._from_rank_0 = from_rank_0
        self._deliver = deliver
        self._gathered: list[StepTime] = []

    def take(self, timed: StepTime) -> None:
        """A step was timed on this rank."""
        if self._ranks == 1:
            self._deliver(timed)
        else:
            self._gathered.append(timed)

    def at_step(self, number: int) -> None:
        """A step is about to be decided; its number counts decode steps from the start, so all ranks agree on it."""
        if self._ranks == 1 or number == 0 or number % SHARE_EVERY_STEPS:
            return
        gathered, self._gathered = self._gathered, []
        agreed: Sequence[StepTime] = self._from_rank_0(gathered)
        for timed in agreed:
            self._deliver(timed)

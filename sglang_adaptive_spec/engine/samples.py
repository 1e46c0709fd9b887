"""What steps show, on its way to the policy: the same on every tensor-parallel rank."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from sglang_adaptive_spec.clock import StepTime, StepTimes

Verifies = tuple[int, list[int]]
"""Requests of a verify step, and the tokens that all of them got, for each of several such steps."""

HAND_ON_EVERY_STEPS = 16
"""Decode steps between two deliveries: many samples together cost the host little more than one does."""
SHARE_EVERY_STEPS = 64
"""Decode steps between two broadcasts: rare enough to cost nothing, often enough for a cost table that moves slowly."""


class SampleRelay:
    """Gathers step times and verify results, and hands them on every few steps; step times of several ranks seldom.

    Those of steps that are alike go together.

    Verify results are equal on all ranks. Step times are not: rank 0's count.

    Args:
        ranks: Tensor-parallel ranks.
        from_rank_0: Rank 0's value, on every rank; called at the same step on each.
        deliver: Takes step times and verify results.
    """

    def __init__(
        self,
        ranks: int,
        from_rank_0: Callable[[Any], Any],
        deliver: Callable[[Sequence[StepTimes], Sequence[Verifies]], None],
    ) -> None:
        self._ranks = ranks
        self._from_rank_0 = from_rank_0
        self._deliver = deliver
        self._times: list[StepTimes] = []
        self._verifies: list[Verifies] = []

    def timed(self, time: StepTime) -> None:
        """A step was timed on this rank."""
        last = self._times[-1] if self._times else None
        if (
            last is not None
            and last.requests == time.requests
            and last.mode is time.mode
            and last.after is time.after
            and last.context_tokens == time.context_tokens
        ):
            last.seconds.append(time.seconds)
        else:
            self._times.append(StepTimes(time.mode, time.after, time.requests, time.context_tokens, [time.seconds]))

    def verified(self, requests: int, tokens: int) -> None:
        """A verify step gave so many requests so many tokens."""
        if self._verifies and self._verifies[-1][0] == requests:
            self._verifies[-1][1].append(tokens)
        else:
            self._verifies.append((requests, [tokens]))

    def clear(self) -> None:
        """Forget what waits; on all ranks at the same step."""
        self._times, self._verifies = [], []

    def at_step(self, number: int, *, at_once: bool) -> None:
        """A step is about to be decided, on all ranks.

        Args:
            number: Of the step, counted from the start.
            at_once: Whether the policy waits for what the last steps show.
        """
        if number % HAND_ON_EVERY_STEPS and not at_once:
            return
        times: Sequence[StepTimes] = ()
        if self._ranks == 1:
            times, self._times = self._times, []
        elif number and number % SHARE_EVERY_STEPS == 0:
            times = self._from_rank_0(self._times)
            self._times = []
        verifies, self._verifies = self._verifies, []
        self._deliver(times, verifies)

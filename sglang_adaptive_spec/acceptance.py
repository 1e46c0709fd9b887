"""The accept length of late: tokens that a verify step gives a request."""

from __future__ import annotations

import math
from collections.abc import Sequence

_MEMORY_REQUESTS, _MEMORY_STEPS = 256, 8
"""The average forgets with whichever is longer: one request's verifies vary more than a batch's."""
_ALERT_REQUESTS, _ALERT_STEPS = 32, 4
_ALERT_DEVIANCE = 4.0**2
"""Standard deviations, squared."""
_ALERT_LEAST_REQUESTS = 12
_PRIOR_DISPERSION, _LEAST_DISPERSION, _DISPERSION_GROWTH = 0.7, 0.05, 2.0
_LEAST_BOUND = 0.1
"""Of the variance: a mean at its limit is one of few verifies, and knows less than it would say."""
_GUESS_REQUESTS = 32
_AGING_STEPS = 64
"""Steps without a verify after which half of what was known counts as forgotten."""
_LEAST_REQUESTS = 1
"""That stay known, however long ago: doubt without bounds would keep speculation from being tried again."""


class _Average:
    """Tokens a verified request, recent ones counting more.

    Attributes:
        requests: Verified requests, weighted.
        tokens: Their tokens, weighted alike.
        squares: The sum of the squared weights: the variance of ``tokens``, in those of one request's verify.
    """

    __slots__ = ("_request_rate", "_step_rate", "requests", "squares", "tokens")

    def __init__(self, memory_requests: int, memory_steps: int) -> None:
        self._request_rate, self._step_rate = 1 / memory_requests, 1 / memory_steps
        self.requests = self.tokens = self.squares = 0.0

    def share(self, requests: float) -> float:
        """Of what is known, what so many verified requests replace."""
        share = requests * self._request_rate
        return share if share < self._step_rate else self._step_rate  # no min(): it takes 0.1 us

    def note(self, requests: int, tokens: Sequence[int], share: float) -> None:
        """Take steps one after the other, each of which replaces a share; what is the same in all of them at once."""
        keep, given = 1 - share, self.tokens
        for each in tokens:
            given = given * keep + each
        self.tokens = given
        kept = keep ** len(tokens)
        self.requests = self.requests * kept + requests * (1 - kept) / share
        self.squares = self.squares * kept * kept + requests * (1 - kept * kept) / (1 - keep * keep)

    def fade(self, keep: float) -> None:
        self.requests *= keep
        self.tokens *= keep
        # As if so many had been verified, all of them lately.
        self.squares *= keep

    def take_over(self, other: _Average) -> None:
        self.requests, self.tokens, self.squares = other.requests, other.tokens, other.squares


class AcceptLength:
    """A moving average, each verified request counting alike, that a change of workload resets.

    A second, faster average runs beside it. Where the two differ by more than chance explains, the workload has
    changed, and the fast one takes over: a collapse shows within some 30 verified requests instead of 256.

    A batch's requests may have their luck in common, as where SGLang simulates acceptance: one draw for all of them.
    What they then say together is as much less as their means vary more than those of so many single ones could,
    and the average remembers as much longer.

    Args:
        most: Tokens that one verify step can give a request at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._average = _Average(_MEMORY_REQUESTS, _MEMORY_STEPS)
        self._alert = _Average(_ALERT_REQUESTS, _ALERT_STEPS)
        # The variance of one request's verify, as a share of the most that it can be (see _bound): the mean may
        # change with the workload, this less so. What a batch's requests have in common counts as theirs.
        self._dispersion = _PRIOR_DISPERSION
        self.mean: float | None = None
        """Tokens a request and verify step, at least 1; None before the first verify."""
        self.verified_requests = 0.0
        """Requests verified in all; those of one batch count as fewer the more they have in common."""

    @property
    def deviation(self) -> float:
        """The standard error of the mean; infinite before the first verify."""
        average = self._average
        if self.mean is None:
            return math.inf
        return math.sqrt(self._dispersion * self._bound(self.mean) * average.squares) / average.requests

    @property
    def relative_deviation(self) -> float:
        """The standard error as a share of the mean; 0 before the first verify."""
        return self.deviation / self.mean if self.mean else 0.0

    def _bound(self, mean: float) -> float:
        """No variance exceeds this, with values from 1 to the most (Bhatia and Davis, 2000)."""
        bound = (mean - 1) * (self._most - mean)
        return bound if bound > _LEAST_BOUND else _LEAST_BOUND

    def note(self, requests: int, *tokens: int) -> None:
        """Take processed verify steps; those that can't be (fewer tokens than requests) are left out.

        Args:
            requests: Of each step.
            tokens: That all of them got, for each step.
        """
        if requests < 1 or not tokens:
            return
        if min(tokens) < requests:
            self.note(requests, *(each for each in tokens if each >= requests))
            return
        if self._dispersion > requests:
            self._spread_at_most(requests)
        average, alert, dispersion = self._average, self._alert, self._dispersion
        alone = requests / dispersion if dispersion > 1.0 else float(requests)
        share = average.share(alone)
        self.verified_requests += alone * len(tokens)
        if self.mean is not None:
            expected = requests * self.mean
            squares = sum([(each - expected) ** 2 for each in tokens])
            # Bounded, or it would grow with the very change that it is there to tell from chance.
            shown = squares / (len(tokens) * requests * self._bound(self.mean))
            if shown > _DISPERSION_GROWTH * dispersion:
                shown = _DISPERSION_GROWTH * dispersion
            dispersion += (shown - dispersion) * (1 - (1 - share) ** len(tokens))
            self._dispersion = dispersion if dispersion > _LEAST_DISPERSION else _LEAST_DISPERSION
        average.note(requests, tokens, share)
        alert.note(requests, tokens, alert.share(requests))
        mean = average.tokens / average.requests
        if alert.requests >= _ALERT_LEAST_REQUESTS:
            off = alert.tokens - alert.requests * mean
            if off * off > _ALERT_DEVIANCE * self._dispersion * self._bound(mean) * alert.squares:
                average.take_over(alert)
                mean = average.tokens / average.requests
        self.mean = mean

    def _spread_at_most(self, requests: int) -> None:
        """Take what larger batches had in common for what so few can have, and what they said for as much less."""
        share = requests / self._dispersion
        self._average.fade(share)
        self._alert.fade(share)
        self._dispersion = float(requests)

    def age(self, steps: int) -> None:
        """Doubt what is known, after steps that verified nothing: what comes next counts the more."""
        least = _LEAST_REQUESTS * max(self._dispersion, 1.0)
        self._keep(max(self._average.requests / (1 + steps / _AGING_STEPS), least))

    def doubt(self) -> None:
        """Keep little more than a first guess: what comes next is to decide."""
        self._keep(_GUESS_REQUESTS * max(self._dispersion, 1.0))

    def _keep(self, requests: float) -> None:
        """Count what is known as so many verified requests at most."""
        if self._average.requests > requests:
            self._average.fade(requests / self._average.requests)
        self._alert.fade(0.0)

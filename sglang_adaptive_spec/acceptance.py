"""The accept length of late: tokens that a verify step gives a request."""

from __future__ import annotations

import math

_MEMORY_REQUESTS, _MEMORY_STEPS = 256, 8
"""The average forgets with whichever is longer: one request's verifies vary more than a batch's."""
_ALERT_REQUESTS, _ALERT_STEPS = 32, 4
_ALERT_DEVIANCE = 4.0**2
"""Standard deviations, squared."""
_ALERT_LEAST_REQUESTS = 12
_PRIOR_VARIANCE, _LEAST_VARIANCE, _VARIANCE_GROWTH = 1.5, 0.1, 2.0
_GUESS_REQUESTS = 8
_AGING_STEPS = 64
"""Steps without a verify after which half of what was known counts as forgotten."""


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

    def rate(self, requests: int) -> float:
        """The share of what is known that so many verified requests replace."""
        share = requests * self._request_rate
        return share if share < self._step_rate else self._step_rate  # no min(): 0.1 us, thrice a step

    def note(self, requests: int, tokens: int) -> None:
        keep = 1 - self.rate(requests)
        self.requests = self.requests * keep + requests
        self.tokens = self.tokens * keep + tokens
        self.squares = self.squares * keep * keep + requests

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

    Args:
        most: Tokens that one verify step can give a request at most.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._average = _Average(_MEMORY_REQUESTS, _MEMORY_STEPS)
        self._alert = _Average(_ALERT_REQUESTS, _ALERT_STEPS)
        self._variance = _PRIOR_VARIANCE
        self.mean: float | None = None
        """Tokens a request and verify step, at least 1; None before the first verify."""
        self.verified_requests = 0
        """Requests verified in all."""

    @property
    def deviation(self) -> float:
        """The standard error of the mean; infinite before the first verify."""
        average = self._average
        if self.mean is None:
            return math.inf
        # No variance exceeds this (Bhatia and Davis, 2000); the one observed is still that of an earlier workload.
        bound = max((self.mean - 1) * (self._most - self.mean), _LEAST_VARIANCE)
        return math.sqrt(min(self._variance, bound) * average.squares) / average.requests

    @property
    def relative_deviation(self) -> float:
        """The standard error as a share of the mean; 0 before the first verify."""
        return self.deviation / self.mean if self.mean else 0.0

    def note(self, requests: int, tokens: int) -> None:
        """Take one processed verify step; one that can't be (fewer tokens than requests) is left out."""
        if requests < 1 or tokens < requests:
            return
        self.verified_requests += requests
        average, alert = self._average, self._alert
        if self.mean is not None:
            off = tokens - requests * self.mean
            # Of one request's verify: what a batch's requests have in common counts as theirs. Bounded, or the
            # variance would grow with the very change that it is there to tell from chance.
            variance, shown = self._variance, off * off / requests
            if shown > _VARIANCE_GROWTH * variance:
                shown = _VARIANCE_GROWTH * variance
            variance += (shown - variance) * average.rate(requests)
            self._variance = variance if variance > _LEAST_VARIANCE else _LEAST_VARIANCE
        average.note(requests, tokens)
        alert.note(requests, tokens)
        mean = average.tokens / average.requests
        off = alert.tokens - alert.requests * mean
        if alert.requests >= _ALERT_LEAST_REQUESTS and off * off > _ALERT_DEVIANCE * self._variance * alert.squares:
            average.take_over(alert)
            mean = average.tokens / average.requests
        self.mean = mean

    def age(self, steps: int) -> None:
        """Doubt what is known, after steps that verified nothing: what comes next counts the more."""
        self._average.fade(1 / (1 + steps / _AGING_STEPS))
        self._alert.fade(0.0)

    def doubt(self) -> None:
        """Keep little more than a first guess: what comes next is to decide."""
        if self._average.requests > _GUESS_REQUESTS:
            self._average.fade(_GUESS_REQUESTS / self._average.requests)
        self._alert.fade(0.0)

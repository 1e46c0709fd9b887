"""Samples of the last minutes, and the rates between them."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from dataclasses import dataclass
from typing import Any

from sglang_adaptive_spec.top.sampler import Histogram, Sample, Switch

_RATE_SECONDS = 5.0  # long enough that a reading doesn't flicker


@dataclass(frozen=True, slots=True)
class Rates:
    """What happened between two samples.

    Attributes:
        plain_share: Share of the decode steps that ran plain, in a dry run that would have; None without a step.
        accept_length: Tokens that a request gained in a speculative step; None without one.
        running_requests: As of the later sample; None where the server does not say.
        time_to_first_token_seconds: Mean over the requests that got theirs; None without one.
        inter_token_latency_seconds: Mean over the tokens; None without one.
    """

    seconds: float
    tokens_per_second: float
    steps_per_second: float
    plain_share: float | None
    accept_length: float | None
    running_requests: int | None
    time_to_first_token_seconds: float | None
    inter_token_latency_seconds: float | None


def rates_between(before: Sample, after: Sample) -> Rates:
    """Rates of one server from two of its samples, the later of which is later."""
    seconds = after.at_seconds - before.at_seconds
    plain_steps = after.plain_steps - before.plain_steps
    steps = after.all_steps - before.all_steps
    verified = after.verified_requests - before.verified_requests
    return Rates(
        seconds=seconds,
        tokens_per_second=(after.all_tokens - before.all_tokens) / seconds,
        steps_per_second=steps / seconds,
        plain_share=plain_steps / steps if steps else None,
        accept_length=(after.accepted_tokens - before.accepted_tokens) / verified if verified else None,
        running_requests=after.running_requests,
        time_to_first_token_seconds=_mean(before.time_to_first_token, after.time_to_first_token),
        inter_token_latency_seconds=_mean(before.inter_token_latency, after.inter_token_latency),
    )


def _mean(before: Histogram | None, after: Histogram | None) -> float | None:
    if before is None or after is None or after.count <= before.count:
        return None
    return (after.total_seconds - before.total_seconds) / (after.count - before.count)


def _nearest(times: list[float], moment: float) -> int:
    right = min(bisect_left(times, moment), len(times) - 1)
    left = max(right - 1, 0)
    return left if moment - times[left] <= abs(times[right] - moment) else right


class History:
    """The samples of the last while, oldest first; at least one once anything is read."""

    def __init__(self, keep_seconds: float) -> None:
        self._keep_seconds = keep_seconds
        self._samples: deque[Sample] = deque()

    def add(self, sample: Sample) -> None:
        """Keep a sample; what a server said before it was restarted, or its clock set back, is forgotten."""
        if self._samples:
            last = self._samples[-1]
            counters = (sample.all_steps - last.all_steps, sample.all_tokens - last.all_tokens)
            if min(*counters, sample.at_seconds - last.at_seconds) < 0:
                self._samples.clear()
            elif sample.at_seconds == last.at_seconds:
                return
        self._samples.append(sample)
        # One older than the span stays, for the rate at its left edge.
        while len(self._samples) > 2 and self._samples[1].at_seconds < sample.at_seconds - self._keep_seconds:
            self._samples.popleft()

    @property
    def latest(self) -> Sample:
        return self._samples[-1]

    @property
    def last_switch(self) -> Switch | None:
        return self.latest.switches[-1] if self.latest.switches else None

    def rates(self) -> Rates | None:
        """Rates over the last seconds; None before the second sample."""
        if len(self._samples) < 2:
            return None
        start = self.latest.at_seconds - _RATE_SECONDS
        earlier = list(self._samples)[:-1]
        before = next((s for s in reversed(earlier) if s.at_seconds <= start), earlier[0])
        return rates_between(before, self.latest)

    def slots(self, count: int, slot_seconds: float) -> list[Rates | None]:
        """The last ``count`` slots of time, oldest first; None where there are no samples yet.

        A slot keeps its place in time from call to call, so the last one is still filling.
        """
        times = [sample.at_seconds for sample in self._samples]
        last = math.floor(times[-1] / slot_seconds)
        return [self._slot(times, k * slot_seconds, (k + 1) * slot_seconds) for k in range(last - count + 1, last + 1)]

    def _slot(self, times: list[float], begin: float, end: float) -> Rates | None:
        if len(times) < 2 or end <= times[0]:
            return None
        first, last = _nearest(times, begin), _nearest(times, end)
        if first == last:
            # Polled more seldom than that: the stretch around it says what is known.
            last = min(bisect_left(times, end), len(times) - 1)
            first = last - 1 if last else 0
        return rates_between(self._samples[first], self._samples[last]) if first < last else None

    def as_json(self) -> dict[str, Any]:
        """The latest sample with its rates, as plain JSON types."""
        latest, rates = self.latest, self.rates()
        switches = [
            {
                "at_seconds": s.at_seconds,
                "step": s.step,
                "from": s.before,
                "to": s.after,
                "reason": s.reason,
                "running_requests": s.running_requests,
                "first_step_seconds": s.first_step_seconds,
            }
            for s in latest.switches
        ]
        return {
            "at_seconds": latest.at_seconds,
            "sglang_version": latest.sglang_version,
            "settings": dict(latest.settings),
            "mode": latest.mode,
            "dry_run": latest.dry_run,
            "decided_mode": latest.decided_mode,
            "running_requests": latest.running_requests,
            "waiting_requests": latest.waiting_requests,
            "tokens_per_second": rates.tokens_per_second if rates else None,
            "steps_per_second": rates.steps_per_second if rates else None,
            "plain_share": rates.plain_share if rates else None,
            "accept_length": rates.accept_length if rates else None,
            "time_to_first_token_seconds": rates.time_to_first_token_seconds if rates else None,
            "inter_token_latency_seconds": rates.inter_token_latency_seconds if rates else None,
            "steps": dict(latest.steps),
            "tokens": dict(latest.tokens),
            "switches": latest.switch_count,
            "last_switches": switches,
            "catch_ups": latest.catch_ups,
            "catch_up_tokens": latest.catch_up_tokens,
            "faults": latest.faults,
            "disabled_by_faults": latest.disabled_by_faults,
            "plain_memory_gib": latest.plain_memory_gib,
        }

"""The mode with the higher expected goodput: accepted tokens a second, from measured step times and acceptance."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from sglang_adaptive_spec.acceptance import AcceptLength
from sglang_adaptive_spec.costs import Estimate, StepCosts
from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies.base import Observation, Switching

_HYSTERESIS = 0.02
"""Goodput that the other mode must gain, relative; the standard error of the accept length comes on top."""
_UNKNOWN_MAX_ACCEPT_LENGTH = 8

_FIRST_PROBE_STEPS, _LONGEST_PROBE_WAIT_STEPS = 256, 8192
_CHANGED_PROBE_STEPS = 64
"""Steps to the next probe once the load or the workload changed."""
_IMPLAUSIBLE_WAIT_STEPS = 32
_PROBE_STEPS = 32
"""A probe that has shown nothing by then is over."""
_PROBE_REQUESTS = 64
"""Verified requests that are enough to end a probe, however close it is."""
_PROBE_SIGMAS = 2.0
_PROBE_DOUBT = 0.04
"""An estimate that is surer than this needs no probe."""

_BUDGET_SHARE = 0.003
"""Of all steps, what probes may cost."""
_BUDGET_START_STEPS, _BUDGET_MOST_STEPS = 16.0, 32.0

_SWITCH_PRIOR_STEPS = (1.0, 1.0)
_SWITCH_MOST_STEPS = 16.0
_SWITCHES_KEPT = 5

_STEADY = {mode: Decision(mode, Reason.STEADY) for mode in Mode}
_DWELL = {mode: Decision(mode, Reason.DWELL) for mode in Mode}
_FASTER = {
    Mode.SPEC: Decision(Mode.SPEC, Reason.SPEC_FASTER),
    Mode.PLAIN: Decision(Mode.PLAIN, Reason.PLAIN_FASTER),
}


@dataclass(slots=True)
class _Probe:
    """A short stay in a mode, to see how fast it is now.

    Attributes:
        mode: The mode tried.
        verified_requests: How many had been verified when it began.
        costs_version: What the step times were when it began.
    """

    mode: Mode
    verified_requests: int
    costs_version: int


@dataclass(slots=True)
class _Backoff:
    """When to try a mode that is not in use.

    Attributes:
        at_step: No earlier than this.
        wait_steps: Between two tries; doubled by each that was of no use.
        requests: The load that the waiting is about.
        context: Likewise, the context class.
    """

    at_step: int
    wait_steps: int = _FIRST_PROBE_STEPS
    requests: int = 0
    context: int = 0

    def start(self, step: int, requests: int, context: int) -> None:
        self.at_step = step + self.wait_steps
        self.requests, self.context = requests, context

    def lengthen(self) -> None:
        self.wait_steps = min(2 * self.wait_steps, _LONGEST_PROBE_WAIT_STEPS)

    def notice(self, step: int, requests: int, context: int) -> None:
        """Start over where the load has doubled or halved since, or contexts have."""
        if requests >= 2 * self.requests or 2 * requests <= self.requests or context != self.context:
            self.wait_steps = _FIRST_PROBE_STEPS
            self.at_step = min(self.at_step, step + _CHANGED_PROBE_STEPS)
            self.requests, self.context = requests, context


@dataclass(slots=True)
class _View:
    """What step times say about the batch at hand; it holds until the batch or they change.

    Attributes:
        requests: In the batch.
        context: Its context class.
        version: Of the step times.
        estimates: Step times by mode; None where nothing was measured.
        spec_steps: How many plain steps one speculative step takes as long as; None where a time is missing.
    """

    requests: int = -1
    context: int = 0
    version: int = -1
    estimates: dict[Mode, Estimate | None] = field(default_factory=lambda: dict.fromkeys(Mode))
    spec_steps: float | None = None


class AutoPolicy(Switching):
    """Compares ``accept_length / seconds(spec)`` with ``1 / seconds(plain)``, both a request.

    - A switch is made once the loss from staying, summed over the steps since it began, is as large as the switch
      and the way back would cost: at most twice the least possible loss, whatever the load does next.
    - A mode not in use is tried for a few steps where it might be the faster one by now: plain mode as long as its
      step times are guessed more than measured, spec mode because nobody knows what would be accepted. Each try
      of no use doubles the wait for the next, and all of them together cost no more than a fixed share of the time.
    - Time is counted in steps. No clock is read and nothing is drawn, so that ranks which hear the same decide alike.

    Args:
        costs: Step times; kept up to date by :meth:`note_step`.
        min_dwell_steps: Decode steps a mode lasts before the next switch.
        max_spec_requests: Requests that speculative graphs hold; None where they hold as many as may run.
        max_accept_length: Tokens that a verify step can give a request at most; None where that is not known.
    """

    def __init__(
        self,
        costs: StepCosts,
        min_dwell_steps: int,
        max_spec_requests: int | None = None,
        max_accept_length: int | None = None,
    ) -> None:
        self.costs = costs
        self.min_dwell_steps = min_dwell_steps
        self.max_spec_requests = max_spec_requests
        self.max_accept_length = max_accept_length or _UNKNOWN_MAX_ACCEPT_LENGTH
        self._accept = AcceptLength()
        self._view = _View()
        self._step = 0
        self._last_spec_step = 0
        self._loss_steps = 0.0
        self._probe: _Probe | None = None
        self._budget_steps = _BUDGET_START_STEPS
        self._backoff = {mode: _Backoff(_CHANGED_PROBE_STEPS) for mode in Mode}
        self._switch_steps = {mode: deque(_SWITCH_PRIOR_STEPS, _SWITCHES_KEPT) for mode in Mode}

    # --- what is measured --------------------------------------------------------------------------------

    def note_verify(self, requests: int, tokens: int) -> None:
        self._accept.note(requests, tokens)

    def note_step(self, mode: Mode, requests: int, context_tokens: int, seconds: float) -> None:
        self.costs.observe(mode, requests, context_tokens, seconds)

    def note_switch(self, before: Mode, after: Mode, seconds: float) -> None:  # noqa: ARG002  (the protocol's shape)
        usual = self._view.estimates[after]
        if usual is not None and seconds > 0.0:  # false for NaN
            extra_steps = min(max(seconds / usual.seconds - 1, 0.0), _SWITCH_MOST_STEPS)
            self._switch_steps[after].append(extra_steps)

    # --- the decision ------------------------------------------------------------------------------------

    def decide(self, seen: Observation) -> Decision:
        self._step += 1
        mode, view = seen.mode, self._view
        context = self.costs.context_class(seen.context_tokens)
        if (seen.running_requests, context, self.costs.version) != (view.requests, view.context, view.version):
            self._look(seen, context)
        if mode is Mode.SPEC:
            self._last_spec_step = self._step
        if self._budget_steps < _BUDGET_MOST_STEPS:
            self._budget_steps += _BUDGET_SHARE
        if self.max_spec_requests is not None and seen.running_requests > self.max_spec_requests:
            # No dwell either: a step without a graph is slower than any switch.
            return _STEADY[mode] if mode is Mode.PLAIN else self._leave(seen, Reason.NO_SPEC_GRAPH)
        gain = self._gain_of_leaving(mode)
        if self._probe is None and gain is not None:
            self._loss_steps = max(0.0, self._loss_steps + gain - 1)
        if seen.steps_in_mode < self.min_dwell_steps:
            return _DWELL[mode]
        if self._probe is not None:
            return self._judge(self._probe, seen, gain)
        if gain is not None and gain > self._bar() and self._loss_steps > self._round_trip_steps(mode):
            return self._leave(seen, _FASTER[mode.other].reason)
        if self._step >= self._backoff[mode.other].at_step:
            return self._try_other(seen, gain)
        return _STEADY[mode]

    def _look(self, seen: Observation, context: int) -> None:
        requests = seen.running_requests
        if (requests, context) != (self._view.requests, self._view.context):
            for backoff in self._backoff.values():
                backoff.notice(self._step, requests, context)
        estimates = {mode: self.costs.estimate(mode, requests, seen.context_tokens) for mode in Mode}
        spec, plain = estimates[Mode.SPEC], estimates[Mode.PLAIN]
        spec_steps = spec.seconds / plain.seconds if spec and plain else None
        self._view = _View(requests, context, self.costs.version, estimates, spec_steps)

    def _gain_of_leaving(self, mode: Mode) -> float | None:
        """Goodput of the other mode, as a multiple of this one's; None while something is not known."""
        accept_length, spec_steps = self._accept.mean, self._view.spec_steps
        if accept_length is None or spec_steps is None:
            return None
        return spec_steps / accept_length if mode is Mode.SPEC else accept_length / spec_steps

    def _bar(self) -> float:
        return 1 + _HYSTERESIS + self._accept.relative_deviation

    def _round_trip_steps(self, mode: Mode) -> float:
        """What leaving a mode and coming back costs, in steps of this mode."""
        there, back = median(self._switch_steps[mode.other]), median(self._switch_steps[mode])
        return there * self._length_of_other(mode) + back

    def _length_of_other(self, mode: Mode) -> float:
        """How many steps of this mode one step of the other takes as long as."""
        spec_steps = self._view.spec_steps or 1.0
        return spec_steps if mode is Mode.PLAIN else 1 / spec_steps

    def _leave(self, seen: Observation, reason: Reason) -> Decision:
        mode, other = seen.mode, seen.mode.other
        probed = self._probe is not None
        self._loss_steps = 0.0
        self._probe = None
        if other is Mode.SPEC:
            self._accept.age(self._step - self._last_spec_step)
        backoff = self._backoff[mode]
        if probed or seen.steps_in_mode < backoff.wait_steps:
            backoff.lengthen()
        else:
            backoff.wait_steps = _FIRST_PROBE_STEPS
        backoff.start(self._step, self._view.requests, self._view.context)
        return Decision(other, reason)

    # --- probes ------------------------------------------------------------------------------------------

    def _try_other(self, seen: Observation, gain: float | None) -> Decision:
        mode, other = seen.mode, seen.mode.other
        backoff = self._backoff[other]
        if mode is Mode.SPEC and (self._accept.mean is None or self._view.estimates[Mode.SPEC] is None):
            return Decision(mode, Reason.NO_DATA)
        if not self._may_win(other, gain) or self._probe_steps(mode, self.min_dwell_steps, gain) > self._budget_steps:
            backoff.at_step = self._step + _IMPLAUSIBLE_WAIT_STEPS
            return _STEADY[mode]
        known = self._view.estimates[other] is not None
        wait_steps = self._backoff[mode].wait_steps
        decision = self._leave(seen, Reason.PROBE if known else Reason.NO_DATA)
        # Leaving for a try says nothing about the mode left.
        self._backoff[mode].wait_steps = wait_steps
        self._probe = _Probe(other, self._accept.verified_requests, self.costs.version)
        return decision

    def _may_win(self, mode: Mode, gain: float | None) -> bool:
        estimate, spec_steps = self._view.estimates[mode], self._view.spec_steps
        if estimate is None or spec_steps is None:
            return True
        if mode is Mode.SPEC:
            return self.max_accept_length / spec_steps * (1 + estimate.doubt) > self._bar()
        return estimate.doubt > _PROBE_DOUBT and gain is not None and gain * (1 + estimate.doubt) > self._bar()

    def _probe_steps(self, mode: Mode, steps: int, gain: float | None) -> float:
        """What a try of the other mode costs, in steps of this one; half of it is lost where that is not known."""
        lost = 0.5 if gain is None else max(0.0, 1 - gain)
        return steps * self._length_of_other(mode) * lost + self._round_trip_steps(mode)

    def _judge(self, probe: _Probe, seen: Observation, gain: float | None) -> Decision:
        mode, home = probe.mode, probe.mode.other
        if seen.mode is not mode:
            # Somebody else decided in between.
            self._probe = None
            return _STEADY[seen.mode]
        verdict = self._verdict(probe, gain)
        if verdict is None and seen.steps_in_mode < max(_PROBE_STEPS, self.min_dwell_steps):
            return Decision(mode, Reason.PROBE)
        if verdict:
            self._probe = None
            self._loss_steps = 0.0
            return _FASTER[mode]
        self._budget_steps -= self._probe_steps(home, seen.steps_in_mode, gain and 1 / gain)
        return self._leave(seen, Reason.PROBE_OVER)

    def _verdict(self, probe: _Probe, gain: float | None) -> bool | None:
        """Whether the mode on trial is the faster one; None while that is open."""
        if gain is None:
            return None
        if probe.mode is Mode.PLAIN:
            plain = self._view.estimates[Mode.PLAIN]
            served = plain is not None and plain.source == "served"
            return gain < 1 if served and self.costs.version != probe.costs_version else None
        verified = self._accept.verified_requests - probe.verified_requests
        if verified >= _PROBE_REQUESTS or abs(gain - 1) > _PROBE_SIGMAS * self._accept.relative_deviation:
            return gain < 1
        return None

    # --- for people --------------------------------------------------------------------------------------

    def explain(self) -> dict[str, Any]:
        view, accept_length = self._view, self._accept.mean
        tokens = {Mode.SPEC: accept_length, Mode.PLAIN: 1.0}
        modes = {}
        for mode, estimate in view.estimates.items():
            gives = tokens[mode]
            modes[mode.value] = {
                "step_seconds": estimate and estimate.seconds,
                "step_seconds_from": estimate and estimate.source,
                "tokens_per_second_per_request": gives / estimate.seconds if estimate and gives else None,
                "switch_to_costs_steps": median(self._switch_steps[mode]),
                "probe_wait_steps": self._backoff[mode].wait_steps,
            }
        return {
            "requests": view.requests,
            "accept_length": accept_length,
            "accept_length_deviation": self._accept.deviation if accept_length else None,
            "probing": self._probe is not None,
            "modes": modes,
        }

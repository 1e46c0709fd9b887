"""The mode with the higher expected goodput: accepted tokens a second, from measured step times and acceptance."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from statistics import median
from typing import Any, NamedTuple

from sglang_adaptive_spec.acceptance import AcceptLength
from sglang_adaptive_spec.costs import Estimate, StepCosts
from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies.base import DWELL, STEADY, Observation, Switching

_HYSTERESIS = 0.02
"""Goodput that the other mode must gain, relative; the standard error of the accept length comes on top."""
_FEW_REQUESTS_STEPS = 32.0
"""Loss that a lone request's poor acceptance may cause before it counts as the workload's. The mean over more
requests says more: a square fewer steps."""
_MOST_PATIENCE = 64
_UNKNOWN_MAX_ACCEPT_LENGTH = 8

# A switch: steps that the first one in the new mode takes longer, until and while measured.
_SWITCH_PRIOR_STEPS = (1.0, 1.0)
_SWITCH_MOST_STEPS = 16.0
_SWITCHES_KEPT = 5

# Probes: steps, and verified requests that are enough however close it is. Results come a step late.
_LEAST_PROBE_STEPS, _MOST_PROBE_STEPS, _ENOUGH_PROBE_REQUESTS = 4, 32, 128
_PROBE_SIGMAS = 2.0
_SURE_DOUBT = 0.04
"""Doubt about a step time that needs no probe."""

# Steps between probes.
_FIRST_WAIT_STEPS, _LONGEST_WAIT_STEPS = 64, 1024
_CHANGED_WAIT_STEPS = 4
"""Once the load or the workload changed, and at the start."""
_IMPLAUSIBLE_WAIT_STEPS = 32

_BUDGET_SHARE = 0.0035
"""Of all steps, what probes of no use may cost."""
_BUDGET_START_STEPS, _BUDGET_MOST_STEPS = 24.0, 32.0
_RESERVE_STEPS = 8.0
"""Of the budget, kept for when the load or the workload changes."""

_PROBE = {mode: Decision(mode, Reason.PROBE) for mode in Mode}
_FASTER = {
    Mode.SPEC: Decision(Mode.SPEC, Reason.SPEC_FASTER),
    Mode.PLAIN: Decision(Mode.PLAIN, Reason.PLAIN_FASTER),
}


class _View(NamedTuple):
    """What step times say about the batch at hand; it holds until the batch or they change.

    Attributes:
        requests: In the batch.
        context: Its context class.
        spec: A speculative step's time; None where nothing was measured.
        plain: A plain step's.
    """

    requests: int
    context: int
    spec: Estimate | None
    plain: Estimate | None

    def of(self, mode: Mode) -> Estimate | None:
        return self.spec if mode is Mode.SPEC else self.plain


@dataclass(frozen=True, slots=True)
class _Probe:
    """A short stay in a mode, to see how fast it is by now.

    Attributes:
        mode: The mode tried.
        verified_requests: How many had been verified when it began.
        blocks: Of step times of the mode that had come in when it began.
        unlikely: Whether the mode was thought to be the slower one.
    """

    mode: Mode
    verified_requests: float
    blocks: int
    unlikely: bool


@dataclass(slots=True)
class _Return:
    """When to go back to a mode that was left, and how readily to leave it.

    Attributes:
        at_step: No probe of it before this one.
        wait_steps: Until the next; doubled by each stay that did not earn its switches.
        patience: Times the usual loss before it is left, because leaving it turned out wrong.
        requests: The load that all this was found at.
        context: Likewise, the context class.
        changed: Whether the load or the contexts have changed since, and nothing was found yet.
    """

    at_step: int = _CHANGED_WAIT_STEPS
    wait_steps: int = _FIRST_WAIT_STEPS
    patience: int = 1
    requests: int = 0
    context: int = 0
    changed: bool = True

    def left(self, step: int, view: _View, *, earned: bool) -> None:
        """The mode was left, after a stay that earned its switches or did not."""
        self.wait_steps = _FIRST_WAIT_STEPS if earned else min(2 * self.wait_steps, _LONGEST_WAIT_STEPS)
        self.at_step = step + self.wait_steps
        self.requests, self.context, self.changed = view.requests, view.context, False

    def probed(self, *, faster: bool) -> None:
        """A probe against the odds found the mode to be the faster one, or a probe found it still slower."""
        self.patience = min(4 * self.patience, _MOST_PATIENCE) if faster else max(self.patience // 4, 1)

    def look(self, step: int, requests: int, context: int, *, soon: bool) -> None:
        """Start over where the load has doubled or halved since, or contexts have.

        Args:
            soon: Whether the mode is to be tried soon then.
        """
        if requests >= 2 * self.requests or 2 * requests <= self.requests or context != self.context:
            self.patience = 1
            self.requests, self.context = requests, context
            if soon:
                self.wait_steps, self.changed = _FIRST_WAIT_STEPS, True
                self.at_step = min(self.at_step, step + _CHANGED_WAIT_STEPS)


class AutoPolicy(Switching):
    """Compares ``accept_length / seconds(spec)`` with ``1 / seconds(plain)``, both a request.

    - A switch is made once the loss from staying, summed up step by step, is as large as the switch would cost. So
      whatever the load does next, the loss is no more than a small multiple of the least possible.
    - A mode not in use is tried for a few steps where it might be the faster one by now: plain mode while its step
      time is guessed more than measured, spec mode because nobody knows what would be accepted. Each probe of no
      use doubles the wait for the next, and all of them together may cost a fixed share of the time only.
    - Time is counted in steps. No clock is read and nothing is drawn, so that ranks which hear the same decide alike.

    "Loss", "cost" and "budget" are in steps of the mode in use: what the same time would have given.

    Args:
        costs: Step times; kept up to date by :meth:`note_step`.
        min_dwell_steps: Decode steps a mode lasts before the next switch, unless the load has doubled or halved since
            it was entered. Probes end sooner.
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
        self._accept = AcceptLength(self.max_accept_length)
        self._view = _View(0, 0, None, None)
        # Requests, context and version of the step times that the view holds for.
        self._looked_at = (0, 0, -1)
        # How many plain steps one speculative step takes as long as; None where a time is missing.
        self._spec_steps: float | None = None
        self._step = 0
        self._last_spec_step = 0
        # Of this stay in a mode: what it lost of late, and what it gained in all.
        self._lost_steps = self._earned_steps = 0.0
        self._found_by_probe = False
        # The load that the mode was entered at; 0 for the first one.
        self._entered_at_requests = 0
        self._probe: _Probe | None = None
        self._budget_steps = _BUDGET_START_STEPS
        self._returns = {mode: _Return() for mode in Mode}
        self._switch_steps = {mode: deque(_SWITCH_PRIOR_STEPS, _SWITCHES_KEPT) for mode in Mode}

    # --- what is measured --------------------------------------------------------------------------------

    def note_verify(self, requests: int, *tokens: int) -> None:
        self._accept.note(requests, *tokens)

    def note_step(self, mode: Mode, requests: int, context_tokens: int, *seconds: float) -> None:
        self.costs.observe(mode, requests, context_tokens, *seconds)

    def note_switch(self, mode: Mode, requests: int, context_tokens: int, seconds: float) -> None:
        usual_seconds = self.costs.seconds(mode, requests, context_tokens)
        if usual_seconds is not None and seconds > 0.0:  # false for NaN
            self._switch_steps[mode].append(min(max(seconds / usual_seconds - 1, 0.0), _SWITCH_MOST_STEPS))

    @property
    def attentive(self) -> bool:
        """While a mode is on trial or has lost something of late, and at the start."""
        return self._lost_steps > 0.0 or self._probe is not None or self._accept.mean is None

    # --- the decision ------------------------------------------------------------------------------------

    def decide(self, seen: Observation) -> Decision:
        requests, mode, steps_in_mode, context_tokens = seen
        self._step += 1
        if self._looked_at != (requests, context_tokens, self.costs.version):
            self._look(requests, context_tokens)
        if self._budget_steps < _BUDGET_MOST_STEPS:
            self._budget_steps += _BUDGET_SHARE
        if self.max_spec_requests is not None and requests > self.max_spec_requests:
            # No dwell either: a step without a graph is slower than any switch.
            if mode is Mode.SPEC:
                return self._leave(mode, Reason.NO_SPEC_GRAPH)
            self._lost_steps = 0.0  # there is no other mode to have lost to
            return STEADY[mode]
        gain = self._gain_of_leaving(mode)
        if gain is not None:
            lost_steps = self._lost_steps + gain - 1
            self._lost_steps = lost_steps if lost_steps > 0.0 else 0.0
            self._earned_steps += 1 - gain
        if self._probe is not None:
            return self._judge(self._probe, seen, gain)
        if steps_in_mode < self.min_dwell_steps and not self._is_another_load(requests):
            return DWELL[mode]
        if self._lost_steps and gain is not None and gain > self._bar() and self._lost_steps > self._bar_steps(mode):
            return self._leave(mode, _FASTER[mode.other].reason)
        if self._step >= self._returns[mode.other].at_step:
            return self._try_other(mode, gain)
        return STEADY[mode]

    def _look(self, requests: int, context_tokens: int) -> None:
        view, costs = self._view, self.costs
        self._looked_at = requests, context_tokens, costs.version
        context = costs.context_class(context_tokens)
        if requests != view.requests or context != view.context:
            for mode, back in self._returns.items():
                # A plain step takes another time now. What is accepted has to do with the texts, not with their number.
                back.look(self._step, requests, context, soon=mode is Mode.PLAIN)
        spec = costs.estimate(Mode.SPEC, requests, context_tokens)
        plain = costs.estimate(Mode.PLAIN, requests, context_tokens)
        self._view = _View(requests, context, spec, plain)
        self._spec_steps = spec.seconds / plain.seconds if spec and plain else None

    def _is_another_load(self, requests: int) -> bool:
        """Whether the load has doubled or halved since the mode was entered: what spoke for it then does no more.

        The first prompt of a rush can be decoded alone for a step, and all others would dwell for it.
        """
        then = self._entered_at_requests
        return then > 0 and (requests >= 2 * then or 2 * requests <= then)

    def _gain_of_leaving(self, mode: Mode) -> float | None:
        """Goodput of the other mode, as a multiple of this one's; None while something is not known."""
        accept_length, spec_steps = self._accept.mean, self._spec_steps
        if accept_length is None or spec_steps is None:
            return None
        return spec_steps / accept_length if mode is Mode.SPEC else accept_length / spec_steps

    def _bar(self) -> float:
        return 1 + _HYSTERESIS + self._accept.relative_deviation

    def _bar_steps(self, mode: Mode) -> float:
        """The loss that is worth a switch."""
        switch_steps = self._round_trip_steps(mode) / 2
        if mode is Mode.PLAIN:
            return switch_steps
        return max(switch_steps, _FEW_REQUESTS_STEPS / max(1, self._view.requests) ** 2) * self._returns[mode].patience

    def _round_trip_steps(self, mode: Mode) -> float:
        """What leaving a mode and coming back costs."""
        there, back = median(self._switch_steps[mode.other]), median(self._switch_steps[mode])
        return there * self._length_of_other(mode) + back

    def _length_of_other(self, mode: Mode) -> float:
        """How many steps of this mode one step of the other takes as long as."""
        spec_steps = self._spec_steps or 1.0
        return spec_steps if mode is Mode.PLAIN else 1 / spec_steps

    def _leave(self, mode: Mode, reason: Reason) -> Decision:
        earned = self._earned_steps > self._round_trip_steps(mode)
        if earned and self._found_by_probe:
            # The probe has paid for itself, and for others to come.
            self._budget_steps = max(self._budget_steps, _BUDGET_START_STEPS)
        self._returns[mode].left(self._step, self._view, earned=earned)
        return self._enter(mode.other, reason)

    def _enter(self, mode: Mode, reason: Reason) -> Decision:
        self._lost_steps = self._earned_steps = 0.0
        self._found_by_probe = False
        self._entered_at_requests = self._view.requests
        self._probe = None
        if mode is Mode.SPEC:
            self._accept.age(self._step - self._last_spec_step)
        else:
            self._last_spec_step = self._step
        return Decision(mode, reason)

    # --- probes ------------------------------------------------------------------------------------------

    def _try_other(self, mode: Mode, gain: float | None) -> Decision:
        other, known = mode.other, self._view.of(mode.other) is not None
        if mode is Mode.SPEC and (self._accept.mean is None or self._view.spec is None):
            return Decision(mode, Reason.NO_DATA)
        budget_steps = self._budget_steps - (0.0 if self._returns[other].changed else _RESERVE_STEPS)
        if not self._may_win(other, gain) or self._probe_steps(mode, _LEAST_PROBE_STEPS, gain) > budget_steps:
            self._returns[other].at_step = self._step + _IMPLAUSIBLE_WAIT_STEPS
            return STEADY[mode]
        decision = self._enter(other, Reason.PROBE if known else Reason.NO_DATA)
        if other is Mode.SPEC:
            self._accept.doubt()
        unlikely = gain is not None and gain < 1
        self._probe = _Probe(other, self._accept.verified_requests, self.costs.blocks[other], unlikely)
        return decision

    def _may_win(self, mode: Mode, gain: float | None) -> bool:
        """Whether a mode not in use would be the faster one if everything unknown about it were for the best."""
        estimate, spec_steps = self._view.of(mode), self._spec_steps
        if estimate is None or spec_steps is None:
            return True
        if mode is Mode.SPEC:
            return self.max_accept_length / spec_steps * (1 + estimate.doubt) > self._bar()
        return estimate.doubt > _SURE_DOUBT and gain is not None and gain * (1 + estimate.doubt) > self._bar()

    def _probe_steps(self, mode: Mode, steps: int, gain: float | None) -> float:
        """What so many steps in the other mode cost; half of them are lost where that is not known."""
        lost = 0.5 if gain is None else max(0.0, 1 - gain)
        return steps * self._length_of_other(mode) * lost + self._round_trip_steps(mode)

    def _judge(self, probe: _Probe, seen: Observation, gain: float | None) -> Decision:
        mode = probe.mode
        if seen.mode is not mode:
            # Somebody else decided in between.
            self._probe = None
            return STEADY[seen.mode]
        faster = self._verdict(probe, gain) if seen.steps_in_mode >= _LEAST_PROBE_STEPS else None
        if faster is None and seen.steps_in_mode < _MOST_PROBE_STEPS:
            return _PROBE[mode]
        if faster:
            self._probe = None
            self._lost_steps = 0.0
            self._found_by_probe = probe.unlikely
            # What it was left for has just been in use: it is not what to try next.
            self._returns[mode.other].left(self._step, self._view, earned=True)
            if probe.unlikely:
                self._returns[mode].probed(faster=True)
            return _FASTER[mode]
        self._returns[mode].probed(faster=False)
        self._budget_steps -= self._probe_steps(mode.other, seen.steps_in_mode, gain and 1 / gain)
        return self._leave(mode, Reason.PROBE_OVER)

    def _verdict(self, probe: _Probe, gain: float | None) -> bool | None:
        """Whether the mode on trial is the faster one; None while that is open."""
        estimate = self._view.of(probe.mode)
        if gain is None or estimate is None:
            return None
        timed = estimate.source == "served" and self.costs.blocks[probe.mode] != probe.blocks
        if probe.mode is Mode.PLAIN:
            return gain < 1 if timed else None
        if not timed and 1 < max(gain, 1 / gain) < 1 + estimate.doubt:
            return None
        verified = self._accept.verified_requests - probe.verified_requests
        if verified < _ENOUGH_PROBE_REQUESTS and abs(gain - 1) < _PROBE_SIGMAS * self._accept.relative_deviation:
            return None
        return gain < 1

    # --- for people --------------------------------------------------------------------------------------

    def explain(self) -> dict[str, Any]:
        """What the last decision was based on.

        Returns:
            ``requests`` of the batch; ``accept_length`` and its standard error; ``probing``; ``lost_steps`` of late
            by staying; and by mode the step time, where it comes from, the goodput of a request, what a switch to
            the mode costs in its steps, and the wait between two probes of it.
        """
        view, accept_length = self._view, self._accept.mean
        modes = {}
        for mode, tokens in ((Mode.SPEC, accept_length), (Mode.PLAIN, 1.0)):
            estimate = view.of(mode)
            modes[mode.value] = {
                "step_seconds": estimate and estimate.seconds,
                "step_seconds_from": estimate and estimate.source,
                "tokens_per_second_per_request": tokens / estimate.seconds if estimate and tokens else None,
                "switch_steps": median(self._switch_steps[mode]),
                "probe_wait_steps": self._returns[mode].wait_steps,
            }
        return {
            "requests": view.requests,
            "accept_length": accept_length,
            "accept_length_error": self._accept.deviation if accept_length is not None else None,
            "lost_steps": self._lost_steps,
            "probing": self._probe is not None,
            "modes": modes,
        }

"""The mode of each decode step: one controller a scheduler process."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sglang_adaptive_spec.clock import StepTime, StepTimes
from sglang_adaptive_spec.faults import Fault, Faults
from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies import Observation, Policy

logger = logging.getLogger(__name__)

_SWITCHES_KEPT = 10
_FIT_STEPS = 32
"""Decode steps between two looks at the pool of KV slots, however much room there is."""
_PRESSURE_STEPS = 16
"""Steps that stay plain once KV slots ran short: each return costs the draft a catch-up."""


@dataclass(slots=True)
class Switch:
    """One change of mode.

    Attributes:
        step: Decode step that was the first in the new mode, counted from the start of the server.
        running_requests: Requests in that step's batch.
        at_seconds: Unix time.
        first_step_seconds: What that step took, with all that the switch entailed, such as the draft catching up;
            None until its result was processed, and where a prefill came between.
    """

    step: int
    before: Mode
    after: Mode
    reason: Reason
    running_requests: int
    at_seconds: float
    first_step_seconds: float | None = None


class Controller:
    """Owns the policy, the current mode and the counters.

    Every input is equal on all tensor-parallel ranks, so every rank decides alike without a message.

    Args:
        policy: Chooses the mode.
        dry_run: Every step speculates, whatever is chosen; counters and switches tell what would have been.
    """

    def __init__(self, policy: Policy, *, dry_run: bool = False) -> None:
        self.policy = policy
        self.dry_run = dry_run
        self.mode = policy.initial_mode
        # Decided when a step is prepared; everything else is counted when its result is processed.
        self.decided_steps = 0
        self.steps: Counter[Mode] = Counter()
        self.dry_run_steps: Counter[Mode] = Counter()
        self.tokens: Counter[Mode] = Counter()
        self.accepted_tokens = 0
        self.verified_requests = 0
        self.faults = Faults()
        self.switches: deque[Switch] = deque(maxlen=_SWITCHES_KEPT)
        self.switch_counts: Counter[tuple[Mode, Reason]] = Counter()
        self._mode_seconds = dict.fromkeys(Mode, 0.0)
        self._mode_since = time.monotonic()
        # What the policy wants, which a shortage of KV slots overrides without changing it.
        self._wanted = policy.initial_mode
        self._steps_wanted = 0
        # Until when the last look at the pool holds, by what it said.
        self._fits_until_step = self._short_until_step = 0

    def decide(
        self, running_requests: int, spec_steps_that_fit: Callable[[], int], context_tokens: int = 0
    ) -> Decision:
        """Choose the mode of the step being prepared.

        Args:
            running_requests: Requests in the batch.
            spec_steps_that_fit: How many steps there are KV slots for, if all of them speculate; asked only when it
                matters.
            context_tokens: Mean context length of the batch; 0 where it is not known.
        """
        decision = self._ask_policy(Observation(running_requests, self._wanted, self._steps_wanted, context_tokens))
        self._steps_wanted = self._steps_wanted + 1 if decision.mode is self._wanted else 1
        self._wanted = decision.mode
        may_be_short = self.decided_steps >= self._fits_until_step
        if may_be_short and decision.mode is Mode.SPEC and self._is_short(spec_steps_that_fit):
            # A plain step needs one slot a request: better slower than a request thrown out.
            decision = Decision(Mode.PLAIN, Reason.KV_PRESSURE)
        if decision.mode is not self.mode:
            self._switch(decision, running_requests)
        self.decided_steps += 1
        if self.dry_run:
            self.dry_run_steps[decision.mode] += 1
            return Decision(Mode.SPEC, decision.reason)
        return decision

    def _ask_policy(self, seen: Observation) -> Decision:
        if self.faults.spec_only:
            return Decision(Mode.SPEC, Reason.FAULT)
        try:
            return self.policy.decide(seen)
        except Exception as error:
            self.fault(Fault.POLICY, "the policy failed", error)
            return Decision(Mode.SPEC, Reason.FAULT)

    def _is_short(self, spec_steps_that_fit: Callable[[], int]) -> bool:
        """Whether the batch has to drop to plain for want of KV slots; the pool is looked at now and then."""
        if not self.can_drop_to_plain:
            return False
        step = self.decided_steps
        if step < self._short_until_step:
            return True
        steps = spec_steps_that_fit()
        if steps:
            self._fits_until_step = step + min(steps, _FIT_STEPS)
        else:
            self._short_until_step = step + _PRESSURE_STEPS
        return not steps

    def note_prefill(self) -> None:
        """Count on no KV slots that were free before."""
        self._fits_until_step = 0

    def _switch(self, decision: Decision, running_requests: int) -> None:
        step = self.decided_steps
        switch = Switch(step, self.mode, decision.mode, decision.reason, running_requests, time.time())
        self.switches.append(switch)
        self.switch_counts[decision.mode, decision.reason] += 1
        logger.info(
            "adaptive-spec%s: %s -> %s (%s), #running-req: %d, step %d",
            " (dry run)" if self.dry_run else "",
            switch.before.value,
            switch.after.value,
            switch.reason.value,
            running_requests,
            step,
        )
        self._stop_clock()
        self.mode = decision.mode

    def fault(self, kind: Fault, what: str, error: BaseException | None = None) -> None:
        """Count a fault of ours; repeated ones end switching."""
        self.faults.note(kind, what, self.decided_steps, error)

    @property
    def spec_only(self) -> bool:
        """Whether repeated faults ended switching, so that the server speculates as SGLang alone would."""
        return self.faults.spec_only

    @property
    def running_mode(self) -> Mode:
        """The mode of the last step, which in a dry run is not the one that was chosen."""
        return Mode.SPEC if self.dry_run else self.mode

    def set_dry_run(self, on: bool) -> None:
        """Begin or end a dry run with the next step."""
        self._stop_clock()
        self.dry_run = on

    def mode_seconds(self) -> dict[Mode, float]:
        """How long each mode was the running one, idle time included."""
        seconds = dict(self._mode_seconds)
        seconds[self.running_mode] += time.monotonic() - self._mode_since
        return seconds

    def _stop_clock(self) -> None:
        self._mode_seconds, self._mode_since = self.mode_seconds(), time.monotonic()

    def learn(self, times: Iterable[StepTimes], verifies: Iterable[tuple[int, Sequence[int]]]) -> None:
        """Let the policy hear of step times and verify results; the same ones on every rank, at the same step.

        Where it fails at one, it does not hear of those behind, which is one fault.

        Args:
            times: Of decode steps.
            verifies: The requests of a verify step, and the tokens that they got, for each of some such steps.
        """
        if self.faults.spec_only:
            return
        policy = self.policy
        try:
            for requests, tokens in verifies:
                policy.note_verify(requests, *tokens)
            for alike in times:
                if alike.after is alike.mode:
                    policy.note_step(alike.mode, alike.requests, alike.context_tokens, *alike.seconds)
                else:
                    for seconds in alike.seconds:
                        policy.note_switch(alike.mode, alike.requests, alike.context_tokens, seconds)
        except Exception as error:
            self.fault(Fault.POLICY, "the policy failed", error)

    def note_time(self, timed: StepTime) -> None:
        """Keep what the first step of a switch took; ``timed`` is one that came after a step of the other mode."""
        for switch in self.switches:
            if switch.step == timed.number:
                switch.first_step_seconds = timed.seconds

    @property
    def can_drop_to_plain(self) -> bool:
        """Whether a batch that can't speculate for want of KV slots may run plain instead."""
        return self.policy.needs_plain and not self.faults.spec_only and not self.dry_run

    def note_step(self, mode: Mode) -> None:
        """Count one decode step whose result is about to be processed."""
        self.steps[mode] += 1

    def note_result(self, mode: Mode, requests: int, tokens: int, emitted_tokens: int) -> None:
        """Count what one processed decode result gave.

        Args:
            requests: Requests in the step, those included that had ended when its result came.
            tokens: What it gave them all; in a speculative step what was accepted.
            emitted_tokens: Tokens of these that clients get.
        """
        self.tokens[mode] += emitted_tokens
        if mode is Mode.SPEC:
            self.accepted_tokens += tokens
            self.verified_requests += requests

    def snapshot(self) -> dict[str, Any]:
        """The state as plain JSON types."""
        by_reason: Counter[str] = Counter()
        for (_, reason), count in sorted(self.switch_counts.items()):
            by_reason[reason.value] += count
        return {
            "mode": self.running_mode.value,
            "dry_run": self.dry_run,
            "decided_mode": self.mode.value,
            "steps": {mode.value: self.steps[mode] for mode in Mode},
            "dry_run_steps": {mode.value: self.dry_run_steps[mode] for mode in Mode},
            "tokens": {mode.value: self.tokens[mode] for mode in Mode},
            "mode_seconds": {mode.value: seconds for mode, seconds in self.mode_seconds().items()},
            "accepted_tokens": self.accepted_tokens,
            "verified_requests": self.verified_requests,
            "accept_length": self.accepted_tokens / self.verified_requests if self.verified_requests else None,
            "switches": self.switch_counts.total(),
            "switches_by_reason": dict(by_reason),
            "switch_counts": [
                {"to": mode.value, "reason": reason.value, "count": count}
                for (mode, reason), count in sorted(self.switch_counts.items())
            ],
            "last_switches": [
                {
                    "step": s.step,
                    "from": s.before.value,
                    "to": s.after.value,
                    "reason": s.reason.value,
                    "running_requests": s.running_requests,
                    "at_seconds": s.at_seconds,
                    "first_step_seconds": s.first_step_seconds,
                }
                for s in self.switches
            ],
            "faults": self.faults.counts.total(),
            "faults_by_kind": {kind.value: count for kind, count in sorted(self.faults.counts.items())},
            "spec_only": self.spec_only,
            "explain": self._explain(),
        }

    def _explain(self) -> dict[str, Any]:
        try:
            return self.policy.explain()
        except Exception as error:
            return {"error": repr(error)}

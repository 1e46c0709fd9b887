"""The mode of each decode step: one controller a scheduler process."""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from sglang_adaptive_spec.clock import StepTime
from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies import Observation, Policy

logger = logging.getLogger(__name__)

_SWITCHES_KEPT = 10
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
        self.steps: Counter[Mode] = Counter()
        self.dry_run_steps: Counter[Mode] = Counter()
        self.tokens: Counter[Mode] = Counter()
        self.verified_requests = 0
        self.faults = 0
        self.switches: deque[Switch] = deque(maxlen=_SWITCHES_KEPT)
        self.switch_counts: Counter[Reason] = Counter()
        # What the policy wants, which a shortage of KV slots overrides without changing it.
        self._wanted = policy.initial_mode
        self._steps_wanted = 0
        self._short_until_step = 0
        self.spec_only = False

    def decide(self, running_requests: int, spec_fits: Callable[[], bool], context_tokens: int = 0) -> Decision:
        """Choose the mode of the step being prepared.

        Args:
            running_requests: Requests in the batch.
            spec_fits: Whether there are KV slots enough to speculate; asked only when it matters.
            context_tokens: Mean context length of the batch; 0 where it is not known.
        """
        decision = self._ask_policy(Observation(running_requests, self._wanted, self._steps_wanted, context_tokens))
        self._steps_wanted = self._steps_wanted + 1 if decision.mode is self._wanted else 1
        self._wanted = decision.mode
        if decision.mode is Mode.SPEC and self.can_drop_to_plain and self._is_short(spec_fits):
            # A plain step needs one slot a request: better slower than a request thrown out.
            decision = Decision(Mode.PLAIN, Reason.KV_PRESSURE)
        self._enter(decision, running_requests)
        return Decision(Mode.SPEC, decision.reason) if self.dry_run else decision

    def _ask_policy(self, seen: Observation) -> Decision:
        if self.spec_only:
            return Decision(Mode.SPEC, Reason.FAULT)
        try:
            return self.policy.decide(seen)
        except Exception as error:
            self.fault("the policy failed", error)
            return Decision(Mode.SPEC, Reason.FAULT)

    def _is_short(self, spec_fits: Callable[[], bool]) -> bool:
        step = self.steps.total()
        if step < self._short_until_step:
            return True
        if spec_fits():
            return False
        self._short_until_step = step + _PRESSURE_STEPS
        return True

    def _enter(self, decision: Decision, running_requests: int) -> None:
        if decision.mode is not self.mode:
            step = self.steps.total()
            switch = Switch(step, self.mode, decision.mode, decision.reason, running_requests, time.time())
            self.switches.append(switch)
            self.switch_counts[decision.reason] += 1
            logger.info(
                "adaptive-spec%s: %s -> %s (%s), #running-req: %d, step %d",
                " (dry run)" if self.dry_run else "",
                switch.before.value,
                switch.after.value,
                switch.reason.value,
                running_requests,
                step,
            )
            self.mode = decision.mode
        if self.dry_run:
            self.dry_run_steps[decision.mode] += 1
            self.steps[Mode.SPEC] += 1
        else:
            self.steps[decision.mode] += 1

    def fault(self, what: str, error: BaseException | None = None) -> None:
        """Count a fault of ours; from the first one on the server speculates as SGLang alone would."""
        self.faults += 1
        if not self.spec_only:
            self.spec_only = True
            logger.error(
                "adaptive-spec: %s; from here on SGLang speculates as it would alone. Please report this.",
                what,
                exc_info=error,
            )

    def complain(self, what: str, error: BaseException | None = None) -> None:
        """Count a fault of ours that leaves both modes as they are."""
        self.faults += 1
        logger.error("adaptive-spec: %s. Please report this.", what, exc_info=error)

    def learn(self, timed: StepTime) -> None:
        """Let the policy hear of a step's time; the same one on every rank, at the same step."""
        if timed.after is timed.mode:
            self._tell(self.policy.note_step, timed.mode, timed.requests, timed.context_tokens, timed.seconds)
        else:
            self._tell(self.policy.note_switch, timed.after, timed.mode, timed.seconds)

    def _tell(self, note: Callable[..., None], *heard: Any) -> None:
        if self.spec_only:
            return
        try:
            note(*heard)
        except Exception as error:
            self.fault("the policy failed", error)

    def note_time(self, timed: StepTime) -> None:
        """Keep what the first step of a switch took."""
        if timed.after is timed.mode:
            return
        for switch in self.switches:
            if switch.step == timed.number:
                switch.first_step_seconds = timed.seconds

    @property
    def can_drop_to_plain(self) -> bool:
        """Whether a batch that can't speculate for want of KV slots may run plain instead."""
        return self.policy.needs_plain and not self.spec_only and not self.dry_run

    def note_result(self, mode: Mode, requests: int, tokens: int) -> None:
        """Count one processed decode result."""
        self.tokens[mode] += tokens
        if mode is Mode.SPEC:
            self.verified_requests += requests
            self._tell(self.policy.note_verify, requests, tokens)

    def snapshot(self) -> dict[str, Any]:
        """The state as plain JSON types."""
        accept_length = self.tokens[Mode.SPEC] / self.verified_requests if self.verified_requests else None
        return {
            "mode": (Mode.SPEC if self.dry_run else self.mode).value,
            "dry_run": self.dry_run,
            "decided_mode": self.mode.value,
            "steps": {mode.value: self.steps[mode] for mode in Mode},
            "dry_run_steps": {mode.value: self.dry_run_steps[mode] for mode in Mode},
            "tokens": {mode.value: self.tokens[mode] for mode in Mode},
            "verified_requests": self.verified_requests,
            "accept_length": accept_length,
            "switches": sum(self.switch_counts.values()),
            "switches_by_reason": {r.value: n for r, n in sorted(self.switch_counts.items())},
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
            "faults": self.faults,
            "explain": self._explain(),
        }

    def _explain(self) -> dict[str, Any]:
        try:
            return self.policy.explain()
        except Exception as error:
            return {"error": repr(error)}

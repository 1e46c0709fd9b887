"""A flip every k steps: no use for serving, the sharpest tool for testing."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies.base import STEADY, Observation, Switching, Uninformed


@dataclass(frozen=True)
class AlternatePolicy(Switching, Uninformed):
    """Each mode lasts ``period_steps`` decode steps, whatever the load."""

    period_steps: int

    def decide(self, seen: Observation) -> Decision:
        if seen.steps_in_mode < self.period_steps:
            return STEADY[seen.mode]
        other = Mode.PLAIN if seen.mode is Mode.SPEC else Mode.SPEC
        return Decision(other, Reason.FORCED)

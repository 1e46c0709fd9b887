"""Plain above a batch size, speculative again below a smaller one."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies.base import DWELL, STEADY, Observation, Switching, Uninformed

_LOAD_ROSE = Decision(Mode.PLAIN, Reason.LOAD_ROSE)
_LOAD_FELL = Decision(Mode.SPEC, Reason.LOAD_FELL)


@dataclass(frozen=True)
class ThresholdPolicy(Switching, Uninformed):
    """Hysteresis over the number of running requests.

    Attributes:
        disable_above_requests: Plain when more requests than this run.
        resume_at_requests: Speculative again when this many or fewer run.
        min_dwell_steps: Decode steps a mode lasts before the next switch.
    """

    disable_above_requests: int
    resume_at_requests: int
    min_dwell_steps: int

    def decide(self, seen: Observation) -> Decision:
        wanted = STEADY[seen.mode]
        if seen.running_requests > self.disable_above_requests:
            wanted = _LOAD_ROSE
        elif seen.running_requests <= self.resume_at_requests:
            wanted = _LOAD_FELL
        if wanted.mode is not seen.mode and seen.steps_in_mode < self.min_dwell_steps:
            return DWELL[seen.mode]
        return wanted

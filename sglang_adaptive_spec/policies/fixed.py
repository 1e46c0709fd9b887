"""Always one mode."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies.base import Observation, Uninformed


@dataclass(frozen=True)
class FixedPolicy(Uninformed):
    """The same mode at every step."""

    mode: Mode

    @property
    def returns_to_spec(self) -> bool:
        return False

    @property
    def needs_plain(self) -> bool:
        return self.mode is Mode.PLAIN

    @property
    def initial_mode(self) -> Mode:
        return self.mode

    def decide(self, seen: Observation) -> Decision:  # noqa: ARG002  (the protocol's shape)
        return Decision(self.mode, Reason.FIXED)

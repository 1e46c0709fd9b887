"""Policies: pure Python that maps an observation to a decision."""

from __future__ import annotations

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.policies.alternate import AlternatePolicy
from sglang_adaptive_spec.policies.base import Observation, Policy
from sglang_adaptive_spec.policies.fixed import FixedPolicy
from sglang_adaptive_spec.policies.threshold import ThresholdPolicy

__all__ = ["AlternatePolicy", "FixedPolicy", "Observation", "Policy", "ThresholdPolicy", "make_policy"]


def make_policy(settings: Settings) -> Policy:
    """Build the policy that the settings name."""
    if settings.policy in ("spec", "plain"):
        return FixedPolicy(Mode(settings.policy))
    if settings.policy == "alternate":
        return AlternatePolicy(settings.alternate_period_steps)
    return ThresholdPolicy(
        settings.threshold_requests,
        settings.resume_threshold_requests,
        settings.min_dwell_steps,
    )

"""Policies: pure Python that maps an observation to a decision."""

from __future__ import annotations

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.costs import StepCosts
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.policies.alternate import AlternatePolicy
from sglang_adaptive_spec.policies.auto import AutoPolicy
from sglang_adaptive_spec.policies.base import Observation, Policy
from sglang_adaptive_spec.policies.fixed import FixedPolicy
from sglang_adaptive_spec.policies.threshold import ThresholdPolicy

__all__ = ["AlternatePolicy", "AutoPolicy", "FixedPolicy", "Observation", "Policy", "ThresholdPolicy", "make_policy"]


def make_policy(
    settings: Settings,
    costs: StepCosts | None = None,
    max_spec_requests: int | None = None,
    max_accept_length: int | None = None,
) -> Policy:
    """Build the policy that the settings name.

    Args:
        settings: What the user asked for.
        costs: Step times for the policy ``auto``, which keeps them up to date; empty ones unless given.
        max_spec_requests: Requests that speculative graphs hold, where that is fewer than may run.
        max_accept_length: Tokens that a verify step can give a request at most, where that is known.
    """
    if settings.policy == "auto":
        costs = StepCosts() if costs is None else costs
        return AutoPolicy(costs, settings.min_dwell_steps, max_spec_requests, max_accept_length)
    if settings.policy in ("spec", "plain"):
        return FixedPolicy(Mode(settings.policy))
    if settings.policy == "alternate":
        return AlternatePolicy(settings.alternate_period_steps)
    return ThresholdPolicy(
        settings.threshold_requests,
        settings.resume_threshold_requests,
        settings.min_dwell_steps,
    )

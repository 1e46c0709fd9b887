"""The mode with the higher expected goodput: accepted tokens a second, from measured step times and acceptance."""

from __future__ import annotations

from typing import Any

from sglang_adaptive_spec.costs import StepCosts
from sglang_adaptive_spec.modes import Decision, Mode
from sglang_adaptive_spec.policies.base import Observation, Switching


class AutoPolicy(Switching):
    """Compares ``accept_length / seconds(spec)`` with ``1 / seconds(plain)``.

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
        raise NotImplementedError

    def decide(self, seen: Observation) -> Decision:
        raise NotImplementedError

    def note_verify(self, requests: int, tokens: int) -> None:
        raise NotImplementedError

    def note_step(self, mode: Mode, requests: int, context_tokens: int, seconds: float) -> None:
        raise NotImplementedError

    def note_switch(self, before: Mode, after: Mode, seconds: float) -> None:
        raise NotImplementedError

    def explain(self) -> dict[str, Any]:
        raise NotImplementedError

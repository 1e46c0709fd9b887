"""Seconds that a decode step takes, by mode, batch-size bucket and context-length class."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from sglang_adaptive_spec.modes import Mode


class StepCosts:
    """Step times by mode: measured at start-up, then corrected by what serving shows.

    Args:
        buckets: Padded batch sizes of each mode's CUDA graphs. Where a mode has none for a size, powers of two.
    """

    def __init__(self, buckets: Mapping[Mode, Sequence[int]] | None = None) -> None:
        raise NotImplementedError

    def seed(self, mode: Mode, requests: int, context_tokens: int, seconds: float) -> None:
        """Take a start-up measurement; it holds until serving shows otherwise."""
        raise NotImplementedError

    def observe(self, mode: Mode, requests: int, context_tokens: int, seconds: float) -> None:
        """Take one step of a serving server. No single sample matters, whatever its value."""
        raise NotImplementedError

    def seconds(self, mode: Mode, requests: int, context_tokens: int) -> float | None:
        """The expected step time; None while the mode was never measured."""
        raise NotImplementedError

    def table(self) -> list[dict[str, Any]]:
        """One row a mode, bucket and context class, as plain JSON types."""
        raise NotImplementedError

    def to_json(self) -> dict[str, Any]:
        """What the next start can take as its start-up measurement, as plain JSON types."""
        raise NotImplementedError

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], buckets: Mapping[Mode, Sequence[int]] | None = None) -> StepCosts:
        """Costs seeded with what :meth:`to_json` gave.

        Raises:
            ValueError: ``saved`` is nothing of the kind.
        """
        raise NotImplementedError

"""How many plain steps each running request has taken."""

from __future__ import annotations

from typing import Any

import numpy as np


class PlainSteps:
    """Told apart by what was launched before a request's prefill: a decode step is one of every running request.

    With overlap one step is under way while the result of the one before is processed, and a request that ends with
    that result gets nothing of the other.

    Args:
        rows: Rows of ``req_to_token``.
    """

    def __init__(self, rows: int) -> None:
        self._launched = 0
        self._under_way = 0
        self._launched_before = np.zeros(rows, dtype=np.int64)

    def prefilled(self, rows: Any) -> None:
        """New requests, or ones that come back after a retraction; ``rows`` is ``[batch]`` int64 on the CPU."""
        self._launched_before[rows.numpy()] = self._launched

    def launched(self) -> None:
        """A plain step was launched."""
        self._launched += 1
        self._under_way += 1

    def processed(self) -> None:
        """The result of the oldest plain step under way is about to be processed."""
        if self._under_way:
            self._under_way -= 1

    def taken(self, row: int) -> int:
        """Plain steps since its prefill whose tokens a request that leaves now has got."""
        return max(0, self._launched - self._under_way - int(self._launched_before[row]))

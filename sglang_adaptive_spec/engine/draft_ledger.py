"""Which positions of each running request the draft has yet to see.

Plain steps extend the target's KV cache only. What the draft needs to follow (hidden states and tokens) waits in
a ring, and this is the account of what waits there. It lives on the host, so that nobody asks the GPU.
"""

from __future__ import annotations

import numpy as np
import torch

_NONE = -(2**62)
"""Below every position."""
_NEVER = torch.iinfo(torch.int64).max


class DraftLedger:
    """For each row of ``req_to_token``, the first position that waits for the draft, if any does.

    Args:
        rows: Rows of ``req_to_token``.
        chunk_tokens: Positions that may wait in one row; with that many it is time to catch up.
        context_tokens: The model's longest sequence.
    """

    def __init__(self, rows: int, chunk_tokens: int, context_tokens: int) -> None:
        self.chunk_tokens = chunk_tokens
        # A catch-up spans a whole chunk, so from here on there is no room for one. The draft then misses the last
        # few tokens before a request ends at the context limit.
        self._last_start = context_tokens - chunk_tokens
        self._starts = torch.full((rows,), _NONE, dtype=torch.int64)
        # From where on the draft's KV is untrue for good, because a catch-up failed.
        self._lost_from = torch.full((rows,), _NEVER, dtype=torch.int64)
        # Where the first position that waits is known to the draft, which only has to draft from it.
        self._known_start = torch.zeros(rows, dtype=torch.bool)
        # The same memory: on the host a small operation costs numpy a third of what it costs torch.
        self._starts_array = self._starts.numpy()
        self._lost_from_array = self._lost_from.numpy()
        self._known_start_array = self._known_start.numpy()
        self.may_wait = False
        """Whether anything can wait at all: a server that has long been speculating need not look."""
        # Plain steps in a row that can neither fill a row nor bring a new one: those need no look either.
        self._quiet_steps = 0

    def prefilled(self, rows: torch.Tensor) -> None:
        """The draft has seen all of these rows, whatever was in them before."""
        index = rows.numpy()
        self._starts_array[index] = _NONE
        self._lost_from_array[index] = _NEVER
        self._known_start_array[index] = False
        self._quiet_steps = 0
        if self.may_wait:
            self._look_again()

    def prefilled_plainly(self, rows: torch.Tensor, last_positions: torch.Tensor) -> None:
        """These rows' prompts will be known to the draft before anybody needs it, but nothing was drafted from them.

        Args:
            rows: ``[batch]`` int64.
            last_positions: ``[batch]`` int64, from which a request will be drafted; below 0 where more of its prompt is
                to come.
        """
        index, last = rows.numpy(), last_positions.numpy()
        ends = last >= 0
        self._starts_array[index] = np.where(ends, last, _NONE)
        self._lost_from_array[index] = _NEVER
        self._known_start_array[index] = ends
        self._look_again()

    def saw(self, rows: torch.Tensor, due: tuple[torch.Tensor, torch.Tensor], seen: torch.Tensor) -> None:
        """The draft has caught up with the first ``seen`` positions of what was due, ``[batch]`` int64."""
        starts, counts = due
        waited = counts > 0
        self._starts[rows[waited]] = torch.where(seen < counts, starts + seen, _NONE)[waited]
        self._known_start[rows[waited & (seen > 0)]] = False
        self._look_again()

    def give_up(self, rows: torch.Tensor) -> None:
        """What waits in these rows will never be seen: the draft goes on behind a gap."""
        starts = self._starts[rows]
        gaps = torch.where(starts == _NONE, _NEVER, starts + self._known_start[rows])
        self._known_start[rows] = False
        self._lost_from[rows] = torch.minimum(self._lost_from[rows], gaps)
        self._starts[rows] = _NONE
        self._look_again()

    def forget_from(self, rows: torch.Tensor, positions: torch.Tensor) -> None:
        """Take back a plain step that failed: nothing waits from its position on.

        Args:
            rows: ``[batch]`` int64.
            positions: ``[batch]`` int64, where the step wrote or would have written.
        """
        starts = self._starts[rows]
        self._starts[rows] = torch.where(starts >= positions, _NONE, starts)
        self._look_again()

    def reaches(self, position: int) -> bool:
        """Whether a catch-up has room from this position on."""
        return position <= self._last_start

    def _look_again(self) -> None:
        self._quiet_steps = 0
        self.may_wait = bool(self._starts_array.max() > _NONE)

    def note(self, rows: torch.Tensor, positions: torch.Tensor) -> bool:
        """Account for a plain step.

        Between two of them a row takes no other step than those that this account hears of, and none joins but by a
        prefill.

        Args:
            rows: ``[batch]`` int64, the requests' rows.
            positions: ``[batch]`` int64, where each wrote its token.

        Returns:
            Whether a row holds as much as it can, so that the draft has to catch up now.
        """
        if self._quiet_steps:
            self._quiet_steps -= 1
            return False
        index, at = rows.numpy(), positions.numpy()
        starts = self._starts_array[index]
        starts = np.where(starts == _NONE, at, starts)
        self._starts_array[index] = starts
        self.may_wait = True
        steps_to_full = starts - at + (self.chunk_tokens - 1)
        fewest = int(steps_to_full.min())
        if fewest > 0:
            self._quiet_steps = fewest - 1
            return False
        return bool(np.count_nonzero((steps_to_full <= 0) & (starts <= self._last_start)))

    def waits(self, rows: torch.Tensor) -> bool:
        """Whether anything waits in these rows that a catch-up has room for."""
        if not self.may_wait:
            return False
        self._quiet_steps = 0
        starts = self._starts_array[rows.numpy()]
        return bool(np.count_nonzero((starts != _NONE) & (starts <= self._last_start)))

    def due(self, rows: torch.Tensor, lengths: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """What a catch-up has to cover.

        Args:
            rows: ``[batch]`` int64.
            lengths: ``[batch]`` int64, positions that the target has seen. None where a verify result is still open:
                then no plain step came since, and what waits is a prompt's last position in each row.

        Returns:
            The first position and the count of each row, ``[batch]`` int64 each. A row where nothing waits, or
            where there is no room, has count 0; its first position leaves room for a whole chunk all the same.
        """
        starts = self._starts[rows]
        if lengths is None:
            lengths = (starts + 1).clamp(min=0)
        counts = torch.where((starts == _NONE) | (starts > self._last_start), 0, lengths - starts)
        starts = torch.where(counts > 0, starts, lengths).clamp(max=max(0, self._last_start))
        return starts, counts

    def true_length(self, row: int, length: int) -> int:
        """How many of a request's first ``length`` positions the draft has seen."""
        start = int(self._starts_array[row]) + int(self._known_start_array[row])
        return min(length, int(self._lost_from_array[row]), length if start < 0 else start)

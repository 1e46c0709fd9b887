"""Where the target's hidden states wait for the draft during a plain phase."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch


class HiddenRing:
    """The last ``chunk_tokens`` positions of each running request, on the device.

    The column of a position is the position modulo the chunk, so no step has to be told where to write.

    Args:
        rows: Rows of ``req_to_token``.
        chunk_tokens: Positions kept a row.
        hidden_size: Width of what the draft reads; for EAGLE-3 the concatenated auxiliary states.
    """

    def __init__(
        self, rows: int, chunk_tokens: int, hidden_size: int, dtype: torch.dtype, device: torch.device | str
    ) -> None:
        self.chunk_tokens = chunk_tokens
        # Zeros, not garbage: a catch-up also computes columns that nothing waits in, and a NaN there would pass
        # through the attention's masked sum into the others.
        self._hidden = torch.zeros((rows, chunk_tokens, hidden_size), dtype=dtype, device=device)
        self._tokens = torch.zeros((rows, chunk_tokens), dtype=torch.int64, device=device)
        # The same memory, all rows' columns one after another: one index finds a place in it.
        self._hidden_places = self._hidden.flatten(0, 1)
        self._token_places = self._tokens.flatten()
        self._span = torch.arange(chunk_tokens, device=device)

    @property
    def memory_gib(self) -> float:
        """Device memory held."""
        return float(sum(t.numel() * t.element_size() for t in (self._hidden, self._tokens))) / 2**30

    def store(
        self, rows: torch.Tensor, positions: torch.Tensor, hidden: torch.Tensor, next_tokens: torch.Tensor
    ) -> None:
        """Keep what a plain step gave.

        Args:
            rows: ``[batch]`` int64.
            positions: ``[batch]`` int64, of the tokens that the step read.
            hidden: ``[batch, hidden_size]``, the target's states there.
            next_tokens: ``[batch]``, the tokens sampled from them.
        """
        columns = positions % self.chunk_tokens
        self._hidden[rows, columns] = self._kept(hidden)
        self._tokens[rows, columns] = next_tokens.to(torch.int64)

    def _kept(self, hidden: torch.Tensor) -> torch.Tensor:
        """States as the draft reads them, should the target compute in another type."""
        return hidden.to(self._hidden.dtype)

    def store_prompt_ends(
        self,
        rows: Sequence[int],
        positions: Sequence[int],
        ends: Sequence[int],
        hidden: torch.Tensor,
        next_tokens: torch.Tensor,
    ) -> None:
        """Keep what a prefill gave at the last position of each request.

        All places are known on the host, so one transfer does where each operation on the device would be a launch.

        Args:
            rows: Of the requests.
            positions: The last of each request.
            ends: Which of the states are theirs.
            hidden: ``[tokens, hidden_size]``, the target's states at all positions of the prefill.
            next_tokens: ``[batch]``, the tokens sampled from the last ones.
        """
        chunk = self.chunk_tokens
        into = [row * chunk + position % chunk for row, position in zip(rows, positions, strict=True)]
        told = torch.from_numpy(np.array((ends, into), dtype=np.int64))
        states, places = told.to(hidden.device, non_blocking=True).unbind()
        self._hidden_places.index_copy_(0, places, self._kept(hidden.index_select(0, states)))
        self._token_places.index_copy_(0, places, next_tokens.to(torch.int64))

    def span(self, starts: torch.Tensor, width: int) -> torch.Tensor:
        """``width`` positions from each start on: ``[batch]`` to ``[batch, width]``, both int64."""
        return starts.unsqueeze(1) + self._span[:width]

    def inside(self, counts: torch.Tensor, width: int) -> torch.Tensor:
        """Which of ``width`` positions are among the first ``counts``: ``[batch]`` to ``[batch, width]``, bool."""
        return self._span[:width] < counts.unsqueeze(1)

    def read(self, rows: torch.Tensor, span: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The states and tokens kept for some positions.

        Args:
            rows: ``[batch]`` int64.
            span: ``[batch, width]`` int64, positions; what was never stored reads as stale but finite.

        Returns:
            ``[batch * width, hidden_size]`` and ``[batch * width]``.
        """
        columns = span % self.chunk_tokens
        rows = rows.unsqueeze(1)
        return self._hidden[rows, columns].flatten(0, 1), self._tokens[rows, columns].flatten()

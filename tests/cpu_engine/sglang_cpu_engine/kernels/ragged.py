"""Index arithmetic for batches whose rows have different lengths."""

import torch


def expand_ranges(start: torch.Tensor, end: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """List every position of the ranges `[start[i], end[i])`, one range after the other.

    Args:
        start, end: [bs], integers, `start <= end`.

    Returns:
        row: [total], int64, the range that each position belongs to.
        position: [total], int64.
    """
    lengths = (end - start).to(torch.int64)
    row = torch.repeat_interleave(lengths)
    first = torch.cumsum(lengths, 0) - lengths
    position = torch.arange(row.numel()) - first[row] + start.to(torch.int64)[row]
    return row, position

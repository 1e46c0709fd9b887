"""Which KV slot each token of a request has: reads and writes of the request-to-token table.

`req_to_token` is [num_requests, max_context], int32: the KV slot of each position of each request.
`req_pool_indices` is [bs], int64: the row of each request of the batch.
"""

import torch

from sglang_cpu_engine.kernels.ragged import expand_ranges


def assign_req_to_token_pool(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *unused: int,
) -> None:
    """Stand-in for the Triton kernel of this name: write slots into the table.

    Args:
        start_offset, end_offset: [bs], positions `[start, end)` of each request are written.
        out_cache_loc: [sum(end - start)], the slots, request after request.
    """
    row, position = expand_ranges(start_offset, end_offset)
    req_to_token[req_pool_indices[row], position] = out_cache_loc[: row.numel()].to(req_to_token.dtype)


def assign_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    out_cache_loc: torch.Tensor,
    *unused: int,
) -> None:
    """Stand-in for the Triton kernel of this name: read slots from the table.

    Args:
        start_offset, end_offset: [bs], positions `[start, end)` of each request are read.
        out_cache_loc: [>= sum(end - start)], int64, filled request after request; a longer
            buffer keeps its tail.
    """
    row, position = expand_ranges(start_offset, end_offset)
    out_cache_loc[: row.numel()] = req_to_token[req_pool_indices[row], position]


def make_extend_cache_locs(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    start_offset: torch.Tensor,
    end_offset: torch.Tensor,
    batch_size: int,
    draft_token_num: int,
    device: torch.device | str,
) -> torch.Tensor:
    """Stand-in for `assign_extend_cache_locs_func`, which has no branch for a CPU.

    Returns:
        [batch_size * draft_token_num], int64, the slots of positions `[start, end)`.
    """
    out_cache_loc = torch.zeros(batch_size * draft_token_num, dtype=torch.int64, device=device)
    assign_extend_cache_locs(req_pool_indices, req_to_token, start_offset, end_offset, out_cache_loc)
    return out_cache_loc


def assign_draft_cache_locs_contiguous(
    req_pool_indices: torch.Tensor,
    req_to_token: torch.Tensor,
    seq_lens: torch.Tensor,
    out_cache_loc: torch.Tensor,
    pool_len: int,
    topk: int,
    speculative_num_steps: int,
) -> None:
    """Stand-in for the Triton kernel of this name: the slots that the draft steps write to.

    Args:
        seq_lens: [bs], committed length; the draft writes right behind it.
        out_cache_loc: [bs * topk * steps], int64, filled.
    """
    position = seq_lens.to(torch.int64)[:, None] + torch.arange(topk * speculative_num_steps)
    out_cache_loc.copy_(req_to_token[req_pool_indices[:, None], position].flatten())


def get_last_loc(req_to_token: torch.Tensor, req_pool_indices: torch.Tensor, prefix_lens: torch.Tensor) -> torch.Tensor:
    """Stand-in for `get_last_loc_triton`: the slot of the last token of each prefix.

    Args:
        prefix_lens: [bs].

    Returns:
        [bs], dtype of `prefix_lens`, -1 where the prefix is empty.
    """
    last = req_to_token[req_pool_indices, (prefix_lens - 1).clamp(min=0).to(torch.int64)]
    return torch.where(prefix_lens > 0, last, -1).to(prefix_lens.dtype)

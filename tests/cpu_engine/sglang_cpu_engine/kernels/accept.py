"""What happens to tokens after verification: bonus token, KV slots, the relay to the next step."""

import torch


def fill_bonus_tokens(
    accept_tokens: torch.Tensor, accept_lens: torch.Tensor, bonus_tokens: torch.Tensor, accept_stride: int
) -> None:
    """Stand-in for the Triton kernel of this name: the last accepted token of each request.

    Args:
        accept_tokens: [bs, accept_stride] or flat, accepted tokens at the front of each row.
        accept_lens: [bs], at least 1.
        bonus_tokens: [bs], filled.
    """
    rows = accept_tokens.reshape(-1, accept_stride)
    bonus_tokens.copy_(rows.gather(1, (accept_lens.to(torch.int64) - 1)[:, None]).squeeze(1))


def fill_accept_out_cache_loc(
    accept_index: torch.Tensor, out_cache_loc: torch.Tensor, accept_out_cache_loc: torch.Tensor, *unused: int
) -> None:
    """Stand-in for the Triton kernel of this name: the KV slots of the accepted tree nodes.

    Args:
        accept_index: [bs, depth + 1] or flat, indices into `out_cache_loc`, -1 for none.
        out_cache_loc: [bs * num_draft_tokens].
        accept_out_cache_loc: [accept_index.numel()], filled from the front; the rest is kept.
    """
    accepted = accept_index.flatten()
    accepted = accepted[accepted >= 0].to(torch.int64)
    accept_out_cache_loc[: accepted.numel()] = out_cache_loc[accepted]


def gather_spec_extras(
    indices: torch.Tensor,
    topk_p_buf: torch.Tensor,
    topk_index_buf: torch.Tensor,
    output_tokens_buf: torch.Tensor,
    hidden_states_buf: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Stand-in for the function of this name: rows `indices` of each relay buffer.

    Args:
        indices: [bs].
        topk_p_buf, topk_index_buf: [pool, topk].
        output_tokens_buf: [pool].
        hidden_states_buf: [pool, hidden] or None.

    Returns:
        topk_p, topk_index: [bs, topk]; bonus_tokens: [bs]; hidden_states: [bs, hidden] or None.
    """
    hidden_states = None if hidden_states_buf is None else hidden_states_buf[indices]
    return topk_p_buf[indices], topk_index_buf[indices], output_tokens_buf[indices], hidden_states

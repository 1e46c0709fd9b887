"""What each query of a forward pass attends to: KV slots and a mask, the same for every layer.

Shapes: bs requests, Q queries and L keys a sequence.
"""

from dataclasses import dataclass

import torch

from sglang_cpu_engine.kernels.tree import full_mask_tail


@dataclass(frozen=True)
class Sequences:
    """Sequences with the same number of queries each, padded to the same number of keys.

    Attributes:
        kv_slots: [num_seqs, L], int64; padding points at slot 0.
        mask: [num_seqs, Q, L], bool, True where a query may look. Never True for padding.
    """

    kv_slots: torch.Tensor
    mask: torch.Tensor

    @property
    def num_queries(self) -> int:
        return int(self.mask.shape[0] * self.mask.shape[1])


# Queries lie in memory in the order of the groups.
Plan = list[Sequences]


def plan_decode(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor) -> Plan:
    """One new token a request, which sees all tokens up to itself.

    Args:
        req_to_token: [pool, max_context].
        rows: [bs], rows of `req_to_token`.
        seq_lens: [bs], with the new token.
    """
    return [_causal(req_to_token, rows, seq_lens, num_queries=1)]


def plan_draft_extend(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, num_queries: int) -> Plan:
    """`num_queries` new tokens for every request; `seq_lens`, [bs], counts them already."""
    return [_causal(req_to_token, rows, seq_lens, num_queries)]


def plan_extend(
    req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, extend_lens: torch.Tensor
) -> Plan:
    """A different number of new tokens for each request, behind its cached prefix.

    One group a request: prompts differ too much in length for padding to pay.

    Args:
        seq_lens: [bs], prefix and new tokens.
        extend_lens: [bs], new tokens.
    """
    return [
        _causal(req_to_token, rows[i : i + 1], seq_lens[i : i + 1], num_queries)
        for i, num_queries in enumerate(extend_lens.tolist())
    ]


def plan_new_tokens(extend_lens: torch.Tensor) -> Plan:
    """The new tokens of each request among themselves, where they lie one after another in memory.

    Args:
        extend_lens: [bs], new tokens.
    """
    plan, start = [], 0
    for num_queries in extend_lens.tolist():
        places = torch.arange(start, start + num_queries)
        plan.append(Sequences(places[None], (places <= places[:, None])[None]))
        start += num_queries
    return plan


def plan_verify(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    num_draft_tokens: int,
    tree_mask: torch.Tensor,
) -> Plan:
    """A tree of draft tokens behind each request: a node sees the prefix and its ancestors.

    Args:
        seq_lens: [bs], committed length, without the tree.
        tree_mask: flat, [num_draft_tokens, seq_len + num_draft_tokens] a request, or the last num_draft_tokens
            columns of that alone, as SGLang builds it on a CPU from 0.5.16 on.
    """
    lengths = seq_lens.to(torch.int64)
    kv_slots, position = _slots(req_to_token, rows, lengths + num_draft_tokens)
    in_prefix = position < lengths[:, None]  # [bs, L]
    mask = in_prefix[:, None, :].repeat(1, num_draft_tokens, 1)
    # the tree lies right behind the prefix
    node = lengths[:, None, None] + torch.arange(num_draft_tokens)
    trees = lengths.numel() * num_draft_tokens**2
    tail = torch.arange(trees).view(-1, num_draft_tokens, num_draft_tokens)
    tree = tree_mask[tail if tree_mask.numel() == trees else full_mask_tail(lengths, num_draft_tokens)]
    mask.scatter_(2, node.expand_as(tree), tree)
    return [Sequences(kv_slots, mask)]


def plan_draft_step(
    req_to_token: torch.Tensor,
    rows: torch.Tensor,
    seq_lens: torch.Tensor,
    step: int,
    *,
    topk: int,
    num_steps: int,
    page_size: int,
) -> Plan:
    """Draft step `step`: each of a request's `topk` branches sees the prefix and its own tokens.

    The branches have slots of their own behind the prefix: `num_steps` each, one branch after the
    other; with pages and several branches, each branch begins on a page of its own, at the offset
    at which the prefix ends.

    Args:
        seq_lens: [bs], committed length.
    """
    lengths = seq_lens.to(torch.int64).repeat_interleave(topk)
    branch = torch.arange(topk).repeat(seq_lens.numel())
    if page_size == 1 or topk == 1:
        start = lengths + branch * num_steps
    else:
        on_last_page = lengths % page_size
        pages = (on_last_page + num_steps + page_size - 1) // page_size
        start = lengths + branch * pages * page_size

    width = int(lengths.max()) + step + 1
    position = torch.arange(width).expand(lengths.numel(), width)
    own = position - lengths[:, None]  # [bs * topk, L], number of the branch's token
    mask = own <= step
    position = torch.where(own < 0, position, start[:, None] + own)
    kv_slots = req_to_token[rows.repeat_interleave(topk)[:, None], torch.where(mask, position, 0)]
    return [Sequences(torch.where(mask, kv_slots, 0).to(torch.int64), mask[:, None, :])]


def _causal(req_to_token: torch.Tensor, rows: torch.Tensor, seq_lens: torch.Tensor, num_queries: int) -> Sequences:
    """The last `num_queries` tokens of each sequence; each sees what lies before it, and itself."""
    lengths = seq_lens.to(torch.int64)
    kv_slots, position = _slots(req_to_token, rows, lengths)
    query = lengths[:, None] - num_queries + torch.arange(num_queries)  # [bs, Q], positions
    return Sequences(kv_slots, position <= query[:, :, None])


def _slots(req_to_token: torch.Tensor, rows: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Slots of positions `[0, length)` of each request, padded with slot 0.

    Returns:
        kv_slots: [bs, L], int64, where L is the longest length.
        position: [L].
    """
    position = torch.arange(int(lengths.max()))
    slots = req_to_token[rows, : position.numel()].to(torch.int64)
    return torch.where(position < lengths[:, None], slots, 0), position

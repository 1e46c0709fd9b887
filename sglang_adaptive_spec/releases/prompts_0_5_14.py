"""Prompts that the target has read and the draft has not: kept for a while, then read by the draft all at once.

SGLang's draft-extend after a prefill takes about as long to launch for one short prompt as for many. In plain mode
nobody waits for what it gives, so it can wait until there are many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

_DEVICE_FIELDS = ("input_ids", "req_pool_indices", "seq_lens", "seq_lens_cpu", "orig_seq_lens", "out_cache_loc")
"""One value a request or a token, whole batches one after another."""
_HOST_FIELDS = ("reqs", "extend_lens", "prefix_lens", "extend_logprob_start_lens", "multimodal_inputs")


@dataclass(frozen=True)
class Prompts:
    """One prefilled batch.

    Attributes:
        batch: A copy of SGLang's batch as it was prefilled.
        hidden: The target's states that the draft reads, ``[tokens, hidden_size]``.
        tails: The token after each request's last position, ``[batch]``.
    """

    batch: Any
    hidden: Any
    tails: Any


def keep(batch: Any, copied: Any) -> Any:
    """Make a copy of a batch independent of what becomes of the original.

    Args:
        batch: SGLang's batch, about to be prefilled.
        copied: A shallow copy of it.
    """
    # Counted up in place by the decode steps to come.
    for name in ("seq_lens", "seq_lens_cpu", "orig_seq_lens"):
        setattr(copied, name, getattr(batch, name).clone())
    copied.reqs = list(batch.reqs)
    return copied


def merged(
    prompts: Sequence[Prompts], req_to_token: torch.Tensor, released_rows: Sequence[int]
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """All prompts as one batch, with their states and tails.

    A slot that is no longer its request's, given back because the radix cache already held the prefix, is replaced by
    slot 0, SGLang's own place for padding: somebody else may have written to it by now.

    Args:
        released_rows: Their requests left since the last forward. ``req_to_token`` may already tell of others there,
            but nobody has written to their slots yet.
    """
    batches = [each.batch for each in prompts]
    batch = batches[-1]
    for name in _DEVICE_FIELDS:
        setattr(batch, name, torch.cat([getattr(each, name) for each in batches]))
    for name in _HOST_FIELDS:
        lists = [getattr(each, name) for each in batches]
        setattr(batch, name, None if None in lists else list(chain(*lists)))
    batch.extend_num_tokens = sum(batch.extend_lens)
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    # Nobody samples from this forward, and nobody is told of logprobs.
    batch.sampling_info = batch.chunked_req_next_prompt_token = None
    batch.return_logprob = False
    device = batch.input_ids.device
    # Non-blocking throughout: nobody waits for the device here.
    lengths = torch.tensor(batch.extend_lens).to(device, non_blocking=True)
    starts = batch.seq_lens - lengths
    offsets = torch.arange(batch.extend_num_tokens, device=device)
    first_tokens = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=batch.extend_num_tokens)
    positions = torch.repeat_interleave(starts, lengths, output_size=batch.extend_num_tokens) + offsets - first_tokens
    rows = torch.repeat_interleave(batch.req_pool_indices, lengths, output_size=batch.extend_num_tokens)
    still_theirs = req_to_token[rows, positions] == batch.out_cache_loc
    if released_rows:
        still_theirs |= torch.isin(rows, torch.tensor(released_rows).to(device, non_blocking=True))
    batch.out_cache_loc = torch.where(still_theirs, batch.out_cache_loc, 0)
    return batch, torch.cat([each.hidden for each in prompts]), torch.cat([each.tails for each in prompts])

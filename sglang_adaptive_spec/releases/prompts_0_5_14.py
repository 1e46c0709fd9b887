"""Prompts that the target has read and the draft has not: kept for a while, then read by the draft all at once.

SGLang launches a draft-extend after each prefill, however short the prompts are. In plain mode nobody waits for what it
gives, so it can wait until there are many.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

_OF_THE_SCHEDULER = ("input_ids", "orig_seq_lens")
"""Made on its stream. Only without speculation does SGLang count lengths up in place; a draft-extend writes to its
batch's tokens, which by then are another tensor (:func:`merged` always makes one)."""
_COPIED = ("seq_lens_cpu", "out_cache_loc")
_TENSORS = (*_OF_THE_SCHEDULER, *_COPIED, "req_pool_indices_cpu")
"""One value a request or a token, whole batches one after another."""
_TOLD_BY_THE_HOST = ("seq_lens", "req_pool_indices")
"""What the host knows as well, as ``..._cpu``: sent once for all prompts that are read, not kept for each."""
_LISTS = ("reqs", "extend_lens", "prefix_lens", "extend_logprob_start_lens", "multimodal_inputs")


@dataclass(frozen=True)
class Prompts:
    """One prefilled batch.

    Attributes:
        batch: A copy of SGLang's batch as it was prefilled.
        hidden: The target's states that the draft reads, ``[tokens, hidden_size]``.
        tails: The token after each request's last position, ``[batch]``.
        rows: The requests' rows of ``req_to_token``.
    """

    batch: Any
    hidden: Any
    tails: Any
    rows: list[int]


def keep(batch: Any, copied: Any) -> Any:
    """Make a copy of a batch independent of what becomes of the original.

    Args:
        batch: SGLang's batch, about to be prefilled.
        copied: A shallow copy of it.
    """
    # Slots are a view of all that were free, and lists are extended in place by what joins the batch. Lengths are
    # copied where it costs next to nothing, on the host.
    for name in _COPIED:
        setattr(copied, name, getattr(batch, name).clone())
    for name in _LISTS:
        values = getattr(batch, name)
        setattr(copied, name, None if values is None else list(values))
    copied.sampling_info = None
    return copied


def slots_of_row(req_to_token: torch.Tensor, row: int, length: int) -> torch.Tensor:
    """A copy of a row's first KV slots, ``[length]``."""
    return req_to_token[row, :length].clone()


def merged(
    prompts: Sequence[Prompts], req_to_token: torch.Tensor, left: Mapping[int, torch.Tensor]
) -> tuple[Any, torch.Tensor, torch.Tensor]:
    """All prompts as one batch, with their states and tails.

    A slot that is no longer its request's, given back because the radix cache already held the prefix, is replaced by
    slot 0, SGLang's own place for padding: somebody else may have written to it by now.

    Args:
        left: By row, the slots of requests that left since the last forward. ``req_to_token`` may already tell of
            others there.
    """
    batches = [each.batch for each in prompts]
    batch = batches[-1]
    _outlast_the_scheduler(batches)
    for name in _TENSORS:
        setattr(batch, name, torch.cat([getattr(each, name) for each in batches]))
    for name in _TOLD_BY_THE_HOST:
        setattr(batch, name, getattr(batch, f"{name}_cpu").to(batch.input_ids.device, non_blocking=True))
    for name in _LISTS:
        lists = [getattr(each, name) for each in batches]
        setattr(batch, name, None if None in lists else list(chain(*lists)))
    batch.extend_num_tokens = sum(batch.extend_lens)
    batch.seq_lens_sum = int(batch.seq_lens_cpu.sum())
    # Nobody samples from this forward, and nobody is told of logprobs.
    batch.chunked_req_next_prompt_token = None
    batch.return_logprob = False
    batch.is_prefill_only = False
    theirs = _slots_by_now(batch, req_to_token, list(chain(*(each.rows for each in prompts))), left)
    batch.out_cache_loc = torch.where(theirs == batch.out_cache_loc, batch.out_cache_loc, 0)
    return batch, torch.cat([each.hidden for each in prompts]), torch.cat([each.tails for each in prompts])


def _outlast_the_scheduler(batches: Sequence[Any]) -> None:
    """Let its stream use the memory of what it made anew only after what this one is about to read."""
    tensors = [getattr(batch, name) for batch in batches for name in _OF_THE_SCHEDULER]
    if tensors[0].is_cuda:
        stream = torch.cuda.current_stream()
        for tensor in tensors:
            tensor.record_stream(stream)


def _slots_by_now(
    batch: Any, req_to_token: torch.Tensor, rows: Sequence[int], left: Mapping[int, torch.Tensor]
) -> torch.Tensor:
    """The KV slots of a merged batch's positions, ``[tokens]``; -1 behind the end of a request that left."""
    device, tokens = batch.input_ids.device, batch.extend_num_tokens
    # Non-blocking: nobody waits for the device here.
    lengths = torch.tensor(batch.extend_lens).to(device, non_blocking=True)
    first_tokens = torch.repeat_interleave(lengths.cumsum(0) - lengths, lengths, output_size=tokens)
    starts = torch.repeat_interleave(batch.seq_lens - lengths, lengths, output_size=tokens)
    positions = starts + torch.arange(tokens, device=device) - first_tokens
    slots = req_to_token[torch.repeat_interleave(batch.req_pool_indices, lengths, output_size=tokens), positions]
    at = 0
    for row, start, length in zip(rows, batch.prefix_lens, batch.extend_lens, strict=True):
        if row in left:
            if slots.is_cuda:  # made on the scheduler's stream
                left[row].record_stream(torch.cuda.current_stream())
            kept = left[row][start : start + length]
            slots[at : at + len(kept)] = kept
            slots[at + len(kept) : at + length] = -1
        at += length
    return slots

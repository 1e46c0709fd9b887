"""Grammar masks on logits: SGLang has kernels for them on every device but a CPU."""

from typing import Any

import torch


def apply_vocab_mask(logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """Forbid tokens: set their logits to minus infinity, in place.

    Args:
        logits: [rows, vocab].
        vocab_mask: [rows, ceil(vocab / 32)], int32, bit `t % 32` of word `t // 32` allows token t.
    """
    token = torch.arange(min(logits.shape[1], vocab_mask.shape[1] * 32))
    allowed = (vocab_mask[:, token // 32] >> (token % 32)) & 1
    logits[:, : token.numel()].masked_fill_(allowed == 0, float("-inf"))


def apply_vocab_mask_of(grammar: Any, logits: torch.Tensor, vocab_mask: torch.Tensor) -> None:
    """`apply_vocab_mask` as a method of a grammar."""
    apply_vocab_mask(logits, vocab_mask)

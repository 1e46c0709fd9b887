"""Sampling in speculative verification, temperature above zero. `n` is num_draft_tokens."""

from typing import Any

import torch


def top_k_renorm_prob(probs: torch.Tensor, top_ks: torch.Tensor | int) -> torch.Tensor:
    """Stand-in for `sgl_kernel.top_k_renorm_prob`: keep the k likeliest tokens of each row.

    Args:
        probs: [rows, vocab].
        top_ks: [rows] or one number; a k of vocab or more keeps all.

    Returns:
        [rows, vocab], each row sums to 1. Tokens as likely as the k-th are kept too.
    """
    rows, vocab = probs.shape
    k = torch.as_tensor(top_ks).expand(rows).clamp(1, vocab).to(torch.int64)
    pivot = probs.sort(dim=-1, descending=True).values.gather(1, (k - 1)[:, None])
    return _renormalize(torch.where(probs >= pivot, probs, 0.0))


def top_p_renorm_prob(probs: torch.Tensor, top_ps: torch.Tensor | float) -> torch.Tensor:
    """Stand-in for `sgl_kernel.top_p_renorm_prob`: the smallest set that holds a mass of p.

    Args:
        probs: [rows, vocab], each row sums to 1.
        top_ps: [rows] or one number.

    Returns:
        [rows, vocab], each row sums to 1.
    """
    p = torch.as_tensor(top_ps, dtype=probs.dtype).expand(probs.shape[0])[:, None]
    ordered, order = probs.sort(dim=-1, descending=True)
    mass_before = ordered.cumsum(-1) - ordered
    kept = torch.where(mass_before < p, ordered, 0.0)
    return _renormalize(torch.zeros_like(probs).scatter_(1, order, kept))


def _renormalize(probs: torch.Tensor) -> torch.Tensor:
    return probs / probs.sum(-1, keepdim=True)


def tree_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    threshold_single: float = 1.0,
    threshold_acc: float = 1.0,
    deterministic: bool = True,
) -> None:
    """Stand-in for `sgl_kernel.tree_speculative_sampling_target_only`.

    One coin a level decides between the children of a node: their target probabilities are added up
    in order, and the first child whose sum reaches the coin is accepted. If none is, the next token
    is drawn from what the children leave of the target distribution.

    Args:
        predicts, accept_index, accept_token_num: filled, see `tree.verify_tree_greedy`.
        candidates, retrive_index, retrive_next_token, retrive_next_sibling: [bs, n].
        uniform_samples: [bs, n], the coin of each node's children.
        uniform_samples_for_final_sampling: [bs].
        target_probs: [bs, n, vocab], after each node.
        draft_probs: [bs, n, vocab], zeros; refused children are noted here, as the kernel does.
        threshold_single, threshold_acc: accept a child this likely at once; scale of the sum.
    """
    bs, width = accept_index.shape
    for b in range(bs):
        node, refused_sum, path = 0, 0.0, [0]
        coin = float(uniform_samples[b, 0])
        while len(path) < width:
            child = int(retrive_next_token[b, node])
            while child != -1:
                token = int(candidates[b, child])
                prob = float(target_probs[b, node, token])
                refused_sum += prob
                if coin <= refused_sum / max(threshold_acc, 1e-9) or prob >= threshold_single:
                    break
                draft_probs[b, node, token] = target_probs[b, node, token]
                child = int(retrive_next_sibling[b, child])
            if child == -1:
                break
            predicts[retrive_index[b, node]] = int(candidates[b, child])
            node, refused_sum = child, 0.0
            coin = float(uniform_samples[b, node])
            path.append(node)

        accept_token_num[b] = len(path) - 1
        accept_index[b, : len(path)] = retrive_index[b, path].to(accept_index.dtype)
        remaining = target_probs[b, node]
        if len(path) < width:
            remaining = (remaining - draft_probs[b, node]).clamp(min=0)
        final = _inverse_cdf(remaining, float(uniform_samples_for_final_sampling[b]))
        predicts[retrive_index[b, node]] = final


def chain_speculative_sampling(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    uniform_samples: torch.Tensor,
    uniform_samples_for_final_sampling: torch.Tensor,
    target_probs: torch.Tensor,
    draft_probs: torch.Tensor,
    *unused: Any,
    **also_unused: Any,
) -> None:
    """Stand-in for `chain_speculative_sampling_triton`: classic rejection sampling, topk 1.

    Args:
        as `tree_speculative_sampling`, except
        draft_probs: [bs, n - 1, vocab], the distribution that each draft token was drawn from.
    """
    bs, n = candidates.shape
    for b in range(bs):
        accepted = 0
        while accepted < n - 1:
            token = int(candidates[b, accepted + 1])
            coin = float(uniform_samples[b, accepted])
            if coin * float(draft_probs[b, accepted, token]) >= float(target_probs[b, accepted, token]):
                break
            predicts[retrive_index[b, accepted]] = token
            accepted += 1

        accept_token_num[b] = accepted
        accept_index[b, : accepted + 1] = retrive_index[b, : accepted + 1].to(accept_index.dtype)
        remaining = target_probs[b, accepted]
        if accepted < n - 1:
            remaining = (remaining - draft_probs[b, accepted]).clamp(min=0)
        final = _inverse_cdf(remaining, float(uniform_samples_for_final_sampling[b]))
        predicts[retrive_index[b, accepted]] = final


def _inverse_cdf(weights: torch.Tensor, coin: float) -> int:
    """The token at fraction `coin` of the weights, [vocab], which needn't sum to 1."""
    cumulative = weights.cumsum(0)
    above = cumulative > coin * cumulative[-1]
    return int(above.int().argmax()) if bool(above.any()) else weights.numel() - 1

"""The tree of draft tokens: its shape, its attention mask, and greedy verification.

A request's tree has `n = num_draft_tokens` nodes. Node 0 is the bonus token, nodes 1 to n-1 are the
chosen draft tokens in the order of their candidate number. Candidate `c` was proposed by beam
`c // topk`: beam 0 is the root, beam `b > 0` continues candidate `parent_list[b]`.
"""

import torch

FULL_MASK = 0
QLEN_ONLY = 1


def build_tree(
    parent_list: torch.Tensor,
    selected_index: torch.Tensor,
    seq_lens: torch.Tensor,
    tree_mask: torch.Tensor,
    positions: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    topk: int,
    depth: int,
    num_draft_tokens: int,
    tree_mask_mode: int = FULL_MASK,
) -> None:
    """Stand-in for `sgl_kernel.build_tree_kernel_efficient`. Fills the last six tensors.

    Args:
        parent_list: [bs, topk * (depth - 1) + 1], or [bs, 0] for one step.
        selected_index: [bs, n - 1], the candidates in the tree, ascending.
        seq_lens: [bs], committed length, without the bonus token.
        tree_mask: flat bool. FULL_MASK: a [n, seq_len + n] block a request, the prefix columns are
            already True; QLEN_ONLY: an [n, n] block a request.
        positions: [bs * n], position of each node in the sequence.
        retrieve_index: [bs, n], the node's index in the flat batch.
        retrieve_next_token: [bs, n], the first child, -1 if none.
        retrieve_next_sibling: [bs, n], the next child of the same parent, -1 if none.
    """
    bs, n = retrieve_index.shape
    parent = _parents(parent_list, selected_index, topk)
    ancestors = _ancestors(parent, depth)

    positions.copy_((seq_lens.to(torch.int64)[:, None] + ancestors.sum(2) - 1).flatten())
    retrieve_index.copy_(torch.arange(bs * n).view(bs, n))
    _link_children(parent, retrieve_next_token, retrieve_next_sibling)
    _write_mask(ancestors, seq_lens, tree_mask, tree_mask_mode)


def _parents(parent_list: torch.Tensor, selected_index: torch.Tensor, topk: int) -> torch.Tensor:
    """The parent node of each node; the root is its own. -> [bs, n], int64."""
    bs = selected_index.shape[0]
    beam = selected_index // topk
    if parent_list.shape[1] == 0:
        parent = torch.zeros_like(beam)
    else:
        candidate = parent_list.gather(1, beam)
        # [bs, child, node]: which chosen candidate the child continues
        is_parent = candidate[:, :, None] == selected_index[:, None, :]
        parent = torch.where(beam > 0, is_parent.int().argmax(2) + 1, 0)
    return torch.cat([parent.new_zeros(bs, 1), parent], dim=1)


def _ancestors(parent: torch.Tensor, depth: int) -> torch.Tensor:
    """Which nodes lie on the way from the root to each node, both included. -> [bs, n, n], bool."""
    bs, n = parent.shape
    ancestors = torch.zeros(bs, n, n, dtype=torch.bool)
    node = torch.arange(n).expand(bs, n)
    for _ in range(depth + 1):
        ancestors.scatter_(2, node[:, :, None], True)
        node = parent.gather(1, node)
    return ancestors


def _link_children(parent: torch.Tensor, next_token: torch.Tensor, next_sibling: torch.Tensor) -> None:
    """Link the children of a node in ascending order. parent: [bs, n]; the others are filled."""
    next_token.fill_(-1)
    next_sibling.fill_(-1)
    for node in range(parent.shape[1] - 1, 0, -1):
        of_node = parent[:, node : node + 1]
        next_sibling[:, node : node + 1] = next_token.gather(1, of_node)
        next_token.scatter_(1, of_node, node)


def _write_mask(ancestors: torch.Tensor, seq_lens: torch.Tensor, tree_mask: torch.Tensor, mode: int) -> None:
    """Write the ancestors into the flat mask of `build_tree`."""
    n = ancestors.shape[1]
    if mode == QLEN_ONLY:
        tree_mask[: ancestors.numel()] = ancestors.flatten()
    elif mode == FULL_MASK:
        tree_mask[full_mask_tail(seq_lens, n).flatten()] = ancestors.flatten()
    else:
        raise NotImplementedError(f"tree mask mode {mode}")


def full_mask_tail(seq_lens: torch.Tensor, n: int) -> torch.Tensor:
    """Where a FULL_MASK says which draft token sees which. [bs] -> [bs, n, n], indices into the mask."""
    lengths = seq_lens.to(torch.int64)
    width = lengths + n
    block = torch.cumsum(width * n, 0) - width * n
    query = torch.arange(n)
    row = block[:, None] + query * width[:, None] + lengths[:, None]
    return row[:, :, None] + query


def verify_tree_greedy(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    retrieve_index: torch.Tensor,
    retrieve_next_token: torch.Tensor,
    retrieve_next_sibling: torch.Tensor,
    target_predict: torch.Tensor,
    topk: int = -1,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Stand-in for `verify_tree_greedy_func`: follow the target model's choice down the tree.

    Args:
        predicts: [bs * n], int32, filled: at each accepted node, the token that comes after it.
        accept_index: [bs, depth + 1], int32, filled: flat indices of accepted nodes; -1 stays.
        accept_token_num: [bs], int32, filled: accepted draft tokens, without the bonus token.
        candidates: [bs, n], the token of each node.
        retrieve_index, retrieve_next_token, retrieve_next_sibling: [bs, n], from `build_tree`.
        target_predict: [bs, n], the target model's choice after each node.
    """
    bs, width = accept_index.shape
    token, choice = candidates.tolist(), target_predict.tolist()
    index, child, sibling = (t.tolist() for t in (retrieve_index, retrieve_next_token, retrieve_next_sibling))
    for b in range(bs):
        path = [0]
        while len(path) < width:
            node = child[b][path[-1]]
            while node != -1 and token[b][node] != choice[b][path[-1]]:
                node = sibling[b][node]
            if node == -1:
                break
            path.append(node)
        flat = torch.tensor([index[b][node] for node in path])
        predicts[flat] = torch.tensor([choice[b][node] for node in path], dtype=predicts.dtype)
        accept_index[b, : len(path)] = flat.to(accept_index.dtype)
        accept_token_num[b] = len(path) - 1
    return predicts, accept_index, accept_token_num

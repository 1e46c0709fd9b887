"""The page allocator's kernels: hand out KV slots so that a request fills whole pages in order."""

import torch

from sglang_cpu_engine.kernels.ragged import expand_ranges


def alloc_extend(
    prefix_lens: torch.Tensor,
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Stand-in for `alloc_extend_kernel`: slots for positions `[prefix_len, seq_len)`.

    Positions on the page that the prefix has begun follow `last_loc`; the others take new pages
    from the front of `free_pages`, request after request.

    Args:
        prefix_lens, seq_lens: [bs].
        last_loc: [bs], the slot of the prefix's last token.
        free_pages: [num_free], page numbers. If they don't suffice, the slots are meaningless: the
            caller finds out and discards them.
        out_indices: [sum(seq_lens - prefix_lens)], int64, filled.
    """
    row, position = expand_ranges(prefix_lens, seq_lens)
    prefix_pages = _num_pages(prefix_lens, page_size)
    new_pages = _num_pages(seq_lens, page_size) - prefix_pages
    first_new_page = torch.cumsum(new_pages, 0) - new_pages

    on_begun_page = position < prefix_pages[row] * page_size
    following = last_loc.to(torch.int64)[row] + 1 + position - prefix_lens.to(torch.int64)[row]
    page = first_new_page[row] + position // page_size - prefix_pages[row]
    out_indices.copy_(torch.where(on_begun_page, following, _slot(free_pages, page, position, page_size)))


def alloc_decode(
    seq_lens: torch.Tensor,
    last_loc: torch.Tensor,
    free_pages: torch.Tensor,
    out_indices: torch.Tensor,
    bs_upper: int,
    page_size: int,
) -> None:
    """Stand-in for `alloc_decode_kernel`: `alloc_extend` by one token a request.

    Args:
        seq_lens: [bs], the length with the new token.
        last_loc: [bs], the slot of the token before it.
        free_pages: [num_free], page numbers.
        out_indices: [bs], int64, filled.
    """
    alloc_extend(seq_lens - 1, seq_lens, last_loc, free_pages, out_indices, bs_upper, page_size)


def _num_pages(lengths: torch.Tensor, page_size: int) -> torch.Tensor:
    """Pages that hold `lengths` tokens. [bs] -> [bs], int64."""
    return (lengths.to(torch.int64) + page_size - 1) // page_size


def _slot(free_pages: torch.Tensor, page: torch.Tensor, position: torch.Tensor, page_size: int) -> torch.Tensor:
    """Slots of `position` on the free pages of index `page`. [total] -> [total]."""
    if free_pages.numel() == 0:
        return torch.zeros_like(position)
    return free_pages[page.clamp(0, free_pages.numel() - 1)] * page_size + position % page_size

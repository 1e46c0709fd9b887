"""The stand-in for an attention backend that ends a forward once keys and values are written."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from sglang_adaptive_spec.releases.keys_only import KeysWritten, keys_only_backend


class Pool:
    def __init__(self) -> None:
        self.written: list[object] = []

    def set_kv_buffer(self, *arguments: object) -> None:
        self.written.append(arguments)


def test_it_writes_and_ends_the_forward() -> None:
    pool, layer, batch = Pool(), SimpleNamespace(k_scale=1, v_scale=2), SimpleNamespace(out_cache_loc="slots")
    with pytest.raises(KeysWritten):
        keys_only_backend(pool, None).forward("q", "k", "v", layer, batch)
    assert pool.written == [(layer, "slots", "k", "v", 1, 2)]


def test_what_a_fused_kernel_has_written_is_not_written_again() -> None:
    pool = Pool()
    with pytest.raises(KeysWritten):
        keys_only_backend(pool, None).forward("q", "k", "v", None, None, save_kv_cache=False)
    assert pool.written == []


def test_models_find_the_pools_of_the_forward_on_it() -> None:
    """Those with norms on queries and keys (Qwen3, Bailing's MTP layer) ask for the pool before they write."""
    from sglang.srt.model_executor import forward_context as upstream

    pool, rows = Pool(), object()
    with upstream.forward_context(upstream.ForwardContext(attn_backend=keys_only_backend(pool, rows))):
        assert upstream.get_token_to_kv_pool() is pool
        assert upstream.get_req_to_token_pool() is rows

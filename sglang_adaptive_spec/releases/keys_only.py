"""Stop a draft's forward as soon as its keys and values are written.

What a draft of one attention layer keeps of a position is the key and value there. Neither attention, MLP nor
logits have a part in them, so a draft that only has to follow, and is not asked yet, needs a fraction of a forward.
"""

from __future__ import annotations

from typing import Any


class KeysWritten(Exception):  # noqa: N818  (what was wanted, no error)
    """All that was wanted of a forward is done."""


class KeysOnly:
    """What an attention backend does that writes a layer's keys and values and ends the forward there.

    Args:
        kv_pool: SGLang's KV pool of the draft.
        req_to_token_pool: Where its requests' slots are.

    Attributes:
        token_to_kv_pool, req_to_token_pool: The same, where models look for the pools of the forward under way.
    """

    def __init__(self, kv_pool: Any, req_to_token_pool: Any) -> None:
        self.token_to_kv_pool = kv_pool
        self.req_to_token_pool = req_to_token_pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to plan: nothing attends."""

    def forward(
        self,
        q: Any,  # noqa: ARG002  (the backend's interface)
        k: Any,
        v: Any,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        **kwargs: Any,  # noqa: ARG002
    ) -> Any:
        """Write and stop.

        Raises:
            KeysWritten: always.
        """
        if save_kv_cache:  # else a fused kernel already has
            self.token_to_kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v, layer.k_scale, layer.v_scale)
        raise KeysWritten


def keys_only_backend(kv_pool: Any, req_to_token_pool: Any) -> KeysOnly:
    """The same as one of SGLang's backends: what else it is asked for differs from release to release."""
    from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

    backend: KeysOnly = type("KeysOnlyBackend", (KeysOnly, AttentionBackend), {})(kv_pool, req_to_token_pool)
    return backend


def attention_layers(model: Any) -> int:
    """How many layers of a model write keys and values. With latent attention there are two, one a way to attend."""
    from sglang.srt.layers.radix_attention import RadixAttention

    return sum(isinstance(module, RadixAttention) for module in model.modules())

"""SGLang's attention backend interface on top of `plan` and `attend`."""

import os
from typing import TYPE_CHECKING, Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from sglang_cpu_engine.attention import plan as planning
from sglang_cpu_engine.attention.attend import attend

if TYPE_CHECKING:
    from sglang.srt.layers.radix_attention import RadixAttention
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch
    from sglang.srt.model_executor.model_runner import ModelRunner

# GPU backends come in two kinds: some need the sequence lengths on the host before they can plan a
# step (fa3, flashinfer), some don't (triton). Tests choose which kind this one is.
NEEDS_CPU_SEQ_LENS = os.environ.get("SGLANG_CPU_ENGINE_NEEDS_CPU_SEQ_LENS", "1") != "0"


class ReferenceBackend(AttentionBackend):  # type: ignore[misc]
    """Attention of one model: decode, extend, verify and draft-extend."""

    needs_cpu_seq_lens = NEEDS_CPU_SEQ_LENS

    def __init__(self, model_runner: "ModelRunner") -> None:
        super().__init__()
        self.max_context_len: int = model_runner.model_config.context_len
        self._req_to_token: torch.Tensor = model_runner.req_to_token_pool.req_to_token
        self._kv_pool = model_runner.token_to_kv_pool
        # By these names models find the pools of the forward under way.
        self.token_to_kv_pool = self._kv_pool
        self.req_to_token_pool = model_runner.req_to_token_pool
        self.forward_metadata: planning.Plan = []

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        self.forward_metadata = self._plan(forward_batch)

    def _plan(self, batch: "ForwardBatch") -> planning.Plan:
        mode, rows, seq_lens = batch.forward_mode, batch.req_pool_indices, batch.seq_lens
        if mode.is_idle() or rows.numel() == 0:
            return []
        if mode.is_decode():
            return planning.plan_decode(self._req_to_token, rows, seq_lens)
        if mode.is_target_verify():
            spec = batch.spec_info
            return planning.plan_verify(self._req_to_token, rows, seq_lens, spec.draft_token_num, spec.custom_mask)
        if mode.is_draft_extend_v2():
            num_queries = batch.spec_info.num_tokens_per_req
            return planning.plan_draft_extend(self._req_to_token, rows, seq_lens, num_queries)
        return planning.plan_extend(self._req_to_token, rows, seq_lens, batch.extend_seq_lens)

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: "RadixAttention",
        forward_batch: "ForwardBatch",
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """q: [tokens, heads * head_dim]; k, v: [tokens, kv_heads, head_dim] -> [tokens, heads * value_dim].

        With latent attention (MLA), a token's key is its latent state and a rotary part, all heads share it, and its
        value is the first part of it: the pool gives both. The exception is a prompt from its beginning on: its model
        writes the pool itself, and hands over keys and values of every head, worked out from what it wrote.
        """
        _refuse_what_is_not_implemented(layer, kwargs)
        query = q.reshape(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if k is not None and not save_kv_cache:
            return attend(query, k, v, _among_themselves(forward_batch), layer.scaling)
        if k is not None:
            self._kv_pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        keys = self._kv_pool.get_key_buffer(layer.layer_id)
        values = self._kv_pool.get_value_buffer(layer.layer_id)
        return attend(query, keys, values, self.forward_metadata, layer.scaling)

    # Decode differs only in the plan.
    forward_decode = forward_extend

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """There are no graphs on a CPU; callers may still prepare for them."""

    def update_verify_buffers_to_fill_after_draft(self, spec_info: Any, cuda_graph_bs: int | None) -> None:
        """The mask and the positions are read from the batch itself, so nothing is out of date."""

    def support_triton(self) -> bool:
        return False


class DraftStepBackend(ReferenceBackend):
    """Attention of the draft model in one step of the draft."""

    def __init__(self, model_runner: "ModelRunner", step: int, topk: int, num_steps: int) -> None:
        super().__init__(model_runner)
        self._step = step
        self._topk = topk
        self._num_steps = num_steps
        self._page_size: int = model_runner.page_size

    def _plan(self, batch: "ForwardBatch") -> planning.Plan:
        if batch.forward_mode.is_idle() or batch.req_pool_indices.numel() == 0:
            return []
        return planning.plan_draft_step(
            self._req_to_token,
            batch.req_pool_indices,
            batch.seq_lens,
            self._step,
            topk=self._topk,
            num_steps=self._num_steps,
            page_size=self._page_size,
        )


class MultiStepDraftBackend:
    """The backends of all draft steps but the last, which only samples. Planned together."""

    needs_cpu_seq_lens = NEEDS_CPU_SEQ_LENS

    def __init__(self, model_runner: "ModelRunner", topk: int, num_steps: int) -> None:
        self.attn_backends = [DraftStepBackend(model_runner, step, topk, num_steps) for step in range(num_steps - 1)]

    def init_forward_metadata(self, forward_batch: "ForwardBatch") -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """See `ReferenceBackend`."""


def _among_themselves(batch: "ForwardBatch") -> planning.Plan:
    if batch.forward_mode.is_decode_or_idle() or any(batch.extend_prefix_lens_cpu):
        raise NotImplementedError("the CPU engine knows no keys behind a prefix but those in the pool")
    return planning.plan_new_tokens(batch.extend_seq_lens)


def _refuse_what_is_not_implemented(layer: "RadixAttention", kwargs: dict[str, Any]) -> None:
    """A reference that quietly left something out would be worse than none."""
    window = layer.sliding_window_size
    if window is not None and window > -1:
        raise NotImplementedError("the CPU engine has no sliding window attention")
    if layer.logit_cap or layer.is_cross_attention or layer.attn_type.value != "decoder":
        raise NotImplementedError("the CPU engine has causal attention without a logit cap only")
    extra = sorted(name for name, value in kwargs.items() if value is not None)
    if extra:
        raise NotImplementedError(f"the CPU engine doesn't know these attention arguments: {extra}")

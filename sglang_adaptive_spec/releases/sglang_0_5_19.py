"""SGLang 0.5.19 to 0.5.23: arguments stay as given, what they resolve to lies beside them; KV lengths on ``req.kv``."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from sglang_adaptive_spec.releases.arguments import Arguments
from sglang_adaptive_spec.releases.reads import (
    ARGUMENT_GROUPS,
    FIXED_CAPTURE,
    READS,
    RELIES_ON,
    REQUEST_KV,
    RUNNER,
    RUNTIME_CONTEXT,
    SERVER_ARGUMENTS,
    attributes,
)
from sglang_adaptive_spec.releases.refusals_0_5_14 import NOT_PROVEN, Unserved
from sglang_adaptive_spec.releases.sglang_0_5_15 import HIDDEN_SIZES
from sglang_adaptive_spec.releases.sglang_0_5_16 import RECURRENT
from sglang_adaptive_spec.releases.sglang_0_5_17 import BAG_OVERRIDE, Sglang0517, overridden

_RESOLUTION = "sglang.srt.arg_groups.model_override_base"
_DECLARED_BY = "adaptive_spec"


class Sglang0519(Sglang0517):
    """The adapter for 0.5.19 to 0.5.23."""

    unserved = (
        *Sglang0517.unserved,
        # It takes the place of --enable-dp-attention from 0.5.22 on.
        Unserved("--attn-dp-size above 1", lambda a: getattr(a, "attn_dp_size", 1) > 1, NOT_PROVEN),
        Unserved("--enable-mixed-chunk", lambda a: a.enable_mixed_chunk, NOT_PROVEN),
    )
    reads = attributes(
        READS,
        {
            ARGUMENT_GROUPS: f"{SERVER_ARGUMENTS} enable_mixed_chunk return_hidden_states_mode",
            REQUEST_KV: "kv_committed_len req_pool_idx",
            RUNNER: "shared_read_done_event",
            RUNTIME_CONTEXT: "get_exec get_parallel get_schedule get_spec",
        },
    )
    relies_on = (
        *RELIES_ON,
        *HIDDEN_SIZES,
        RECURRENT,
        FIXED_CAPTURE,
        BAG_OVERRIDE,
        "sglang.srt.arg_groups.overrides:declare_resolution",
        f"{_RESOLUTION}:model_config_of",
        f"{_RESOLUTION}:resolving_view",
        f"{RUNTIME_CONTEXT}:max_prefill_buffer_tokens",
        f"{RUNTIME_CONTEXT}:max_speculative_num_draft_tokens",
        "sglang.srt.speculative.spec_utils:draft_tp_context",
    )

    def arguments(self, server_args: Any, **as_asked: Any) -> Any:
        from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view

        values = {"get_model_config": partial(model_config_of, server_args), **as_asked}
        return Arguments(resolving_view(server_args), values)

    @contextmanager
    def request_limit_open(self, server_args: Any) -> Iterator[None]:
        # What was declared last holds.
        from sglang.srt.arg_groups.overrides import declare_resolution

        declare_resolution(server_args, _DECLARED_BY, max_running_requests=1)
        try:
            yield
        finally:
            declare_resolution(server_args, _DECLARED_BY, max_running_requests=None)

    def _kv(self, req: Any) -> Any:
        return req.kv

    def _tp_group(self, worker: Any) -> Any:
        del worker
        from sglang.srt.runtime_context import get_parallel

        return get_parallel().tp_group

    def _needs_lengths(self, worker: Any) -> bool:
        from sglang.srt.managers.overlap_utils import decide_needs_cpu_seq_lens

        return bool(decide_needs_cpu_seq_lens(worker.spec_v2_attn_backends))

    def _committed(self, batch: Any, less: int = 0) -> list[int]:
        return [req.kv.kv_committed_len - less for req in batch.reqs]

    def _decode_graph_config(self, runner: Any) -> Any:
        del runner
        from sglang.srt.runtime_context import get_exec

        return get_exec().graph.cuda_graph_config.decode

    def _configured(self, runner: Any, values: dict[str, Any]) -> AbstractContextManager[None]:
        del runner
        return overridden(values)

    def _buffer_limits(self, runner: Any) -> tuple[int | None, int, int]:
        del runner
        from sglang.srt.runtime_context import (
            get_schedule,
            max_prefill_buffer_tokens,
            max_speculative_num_draft_tokens,
        )

        step = max_speculative_num_draft_tokens()
        return get_schedule().chunked_prefill_size, int(max_prefill_buffer_tokens()), int(step)

    def _draft_tp_context(self, draft: Any) -> AbstractContextManager[Any]:
        from sglang.srt.speculative import spec_utils

        context: AbstractContextManager[Any]
        if hasattr(draft, "parallel_layout"):
            context = spec_utils.draft_tp_context(draft.parallel_layout)
        elif not hasattr(draft, "draft_owns_attention"):
            context = draft.draft_tp_context(draft.draft_runner.tp_group)
        elif hasattr(draft, "draft_tp_context"):
            context = draft.draft_tp_context(draft.draft_runner.tp_group, owns_attention=draft.draft_owns_attention)
        else:
            context = spec_utils.draft_tp_context(draft.draft_owns_attention)
        return context

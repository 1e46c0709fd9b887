"""SGLang 0.5.16: KV bookkeeping moved to a request's ``kv``; the hidden-state mode is an argument of a forward."""

from __future__ import annotations

from functools import cached_property
from typing import Any

from sglang_adaptive_spec.releases.reads import (
    ARGUMENT_METHODS,
    ARGUMENTS,
    DRAFT_WORKER,
    GRAPH_SIZES,
    READS,
    RECAPTURES,
    RELIES_ON,
    REQUEST,
    RUNNER,
    RUNTIME_CONTEXT,
    SERVER_ARGUMENTS,
    attributes,
)
from sglang_adaptive_spec.releases.sglang_0_5_14 import STEP_FIELDS
from sglang_adaptive_spec.releases.sglang_0_5_15 import HIDDEN_SIZES, Sglang0515

RECURRENT = "sglang.srt.configs.hybrid_arch:mambaish_config"


class Sglang0516(Sglang0515):
    """The adapter for 0.5.16."""

    step_fields = tuple(name for name in STEP_FIELDS if name != "capture_hidden_mode")
    reads: tuple[str, ...] = attributes(
        READS,
        {
            ARGUMENTS: f"{SERVER_ARGUMENTS} {ARGUMENT_METHODS} _cuda_graph_config_locked",
            REQUEST: "kv_committed_len req_pool_idx",
            RUNNER: "tp_group war_fastpath_read_done_event",
            DRAFT_WORKER: "draft_tp_context",
            RUNTIME_CONTEXT: "get_parallel",
        },
    )
    relies_on: tuple[str, ...] = (*RELIES_ON, *HIDDEN_SIZES, *GRAPH_SIZES, RECURRENT, RECAPTURES)

    @cached_property
    def _spec_reserve_tokens(self) -> int:
        from sglang.srt.mem_cache.allocation_sizing import get_alloc_reserve_per_decode

        return int(get_alloc_reserve_per_decode())

    def rank(self, worker: Any) -> int:
        del worker
        from sglang.srt.runtime_context import get_parallel

        return int(get_parallel().tp_rank)

    def _is_recurrent(self, runner: Any) -> bool:
        from sglang.srt.configs.hybrid_arch import mambaish_config

        return mambaish_config(runner.model_config) is not None

    def _run_target(self, worker: Any, batch: Any, hidden_mode: Any) -> Any:
        return worker.target_worker.forward_batch_generation(batch, capture_hidden_mode=hidden_mode)

"""SGLang 0.5.15: preparation is a function of the batch, and commits nothing of the step."""

from __future__ import annotations

from typing import Any

import torch

from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.releases.reads import (
    ARGUMENT_METHODS,
    ARGUMENTS,
    BATCH,
    DRAFT_WORKER,
    EAGLE_UTILS,
    GRAPH_SIZES,
    READS,
    RECAPTURES,
    RELIES_ON,
    REQUEST,
    RUNNER,
    SERVER_ARGUMENTS,
    SET_STATE_OUTPUT,
    WORKER,
    attributes,
)
from sglang_adaptive_spec.releases.sglang_0_5_14 import Sglang0514, host_tensor

HIDDEN_SIZES = (
    f"{EAGLE_UTILS}:get_draft_input_from_target_hidden_dim",
    f"{EAGLE_UTILS}:get_draft_recurrent_hidden_state_spec",
)


class Sglang0515(Sglang0514):
    """The adapter for 0.5.15."""

    reads: tuple[str, ...] = attributes(
        READS,
        {
            ARGUMENTS: f"{SERVER_ARGUMENTS} {ARGUMENT_METHODS} _cuda_graph_config_locked",
            BATCH: "capture_hidden_mode",
            REQUEST: "kv_committed_len req_pool_idx",
            SET_STATE_OUTPUT: "server_args",
            RUNNER: "mambaish_config tp_group war_fastpath_read_done_event",
            WORKER: "req_to_token_pool tp_rank",
            DRAFT_WORKER: "draft_tp_context",
        },
    )
    relies_on: tuple[str, ...] = (
        *RELIES_ON,
        *HIDDEN_SIZES,
        RECAPTURES,
        *GRAPH_SIZES,
        f"{REQUEST}._cache_commit_len",
        f"{REQUEST}.pop_overallocated_kv_cache",
    )

    def most_accepted_tokens(self, server_args: Any) -> int:
        # One more: the step before has not committed the slot of its own first token.
        return super().most_accepted_tokens(server_args) + 1

    def prepare_decode(self, batch: Any) -> None:
        from sglang.srt.speculative import eagle_utils

        eagle_utils.eagle_prepare_for_decode(batch)

    def claim(self, batch: Any) -> None:
        for req in batch.reqs:
            self._kv(req).kv_committed_len += 1

    def host_seq_lens(self, batch: Any) -> Any:
        plan = self.plan_of(batch)
        claimed = plan is not None and plan.mode is Mode.PLAIN
        return super().host_seq_lens(batch) if claimed else host_tensor(self._committed(batch))

    def report_plain_steps(self, req: Any, plain_steps: int) -> None:
        """Nothing but plain numbers gets through SGLang's messages, and none of them is free for this one."""

    def _draft_hidden(self, draft: Any) -> tuple[int, torch.dtype]:
        from sglang.srt.speculative.eagle_utils import get_draft_recurrent_hidden_state_spec

        size, dtype = get_draft_recurrent_hidden_state_spec(draft.draft_runner)
        return size, dtype

    def _target_hidden(self, draft: Any) -> tuple[int, torch.dtype]:
        from sglang.srt.speculative.eagle_utils import get_draft_input_from_target_hidden_dim

        return get_draft_input_from_target_hidden_dim(draft.draft_runner), draft.draft_runner.model_config.dtype

"""SGLang 0.5.11: other names, and no way of its own to build a wider draft-extend."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sglang_adaptive_spec.releases.base import PlainRuntime
from sglang_adaptive_spec.releases.reads import DRAFT_INPUT, DRAFT_WORKER, WORKER, attributes
from sglang_adaptive_spec.releases.sglang_0_5_12 import RESULTS, Sglang0512
from sglang_adaptive_spec.releases.sglang_0_5_14 import swapped

_RESULT = "sglang.srt.managers.utils:GenerationBatchResult"
_LATER = {
    f"{WORKER}._override_worker_state",
    f"{RESULTS}._resolve_spec_overlap_tokens",
    *attributes(
        {
            DRAFT_INPUT: "bonus_tokens dtype_for hidden_size_for",
            _RESULT: "num_correct_drafts num_correct_drafts_per_req_cpu speculative_num_draft_tokens",
        }
    ),
}
_AUX_LAYERS = 3


class Sglang0511(Sglang0512):
    """The adapter for 0.5.11."""

    last_tokens = "verified_id"
    accepted_drafts = "num_accepted_drafts"
    reads: tuple[str, ...] = (
        *(entry for entry in Sglang0512.reads if entry not in _LATER),
        *attributes(
            {
                DRAFT_INPUT: "verified_id",
                DRAFT_WORKER: "draft_attn_backend eagle_use_aux_hidden_state speculative_algorithm",
                _RESULT: "num_accepted_drafts num_accepted_drafts_per_req_cpu",
                "sglang.srt.configs.model_config:ModelConfig": "hidden_size spec_hidden_size",
                "sglang.srt.speculative.spec_info:SpeculativeAlgorithm": "is_eagle3",
            }
        ),
    )
    relies_on: tuple[str, ...] = (
        *(entry for entry in Sglang0512.relies_on if entry not in _LATER),
        f"{RESULTS}._resolve_spec_overlap_token_ids",
    )

    def run_plain_decode(self, worker: Any, runtime: PlainRuntime, batch: Any, publish: Any) -> Any:
        result = super().run_plain_decode(worker, runtime, batch, publish)
        if not any(req.return_hidden_states for req in batch.reqs):
            # SGLang would bring them to the host, whoever asked for them.
            result.logits_output.hidden_states = None
        return result

    @contextmanager
    def _as_wide(self, worker: Any, tokens: int) -> Iterator[None]:
        draft, width = worker.draft_worker, self._of_width(tokens)
        backends = {name: getattr(draft, name) for name in ("draft_attn_backend", "draft_extend_attn_backend")}
        live = draft.draft_runner.draft_attn_backend
        with (
            swapped(worker, **width),
            swapped(worker.server_args, **width),
            swapped(draft, **width, **backends),
            swapped(draft.draft_runner, draft_attn_backend=live),
        ):
            yield

    def _draft_hidden(self, draft: Any) -> tuple[int, torch.dtype]:
        config = draft.draft_runner.model_config
        return config.spec_hidden_size, config.dtype

    def _target_hidden(self, draft: Any) -> tuple[int, torch.dtype]:
        config = draft.target_worker.model_runner.model_config
        if draft.speculative_algorithm.is_eagle3() and draft.eagle_use_aux_hidden_state:
            width = getattr(draft.draft_runner.model_config.hf_config, "target_hidden_size", config.hidden_size)
            return width * _AUX_LAYERS, config.dtype
        return config.spec_hidden_size, config.dtype

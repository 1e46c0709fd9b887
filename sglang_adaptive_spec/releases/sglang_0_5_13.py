"""SGLang 0.5.13: graphs are captured while workers are made, by another runner, from arguments of their own."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from types import SimpleNamespace
from typing import Any

from sglang_adaptive_spec.releases.arguments import Arguments
from sglang_adaptive_spec.releases.reads import (
    ARGUMENTS,
    BATCH,
    PROMPT_FIELDS,
    PROMPT_FUNCTIONS,
    RUNNER,
    WAR_BARRIER,
    attributes,
)
from sglang_adaptive_spec.releases.sglang_0_5_14 import Sglang0514

_GRAPHS = "sglang.srt.model_executor.cuda_graph_runner"
_DRAFT_INPUT = "sglang.srt.speculative.eagle_info_v2:EagleDraftInputV2Mixin"
_RUNNER_FOLDER = "sglang.srt.model_executor.runner."
_LATER_ARGUMENTS = "cuda_graph_config max_prefill_buffer_tokens speculative_use_rejection_sampling"
_LATER_ATTRIBUTES = {
    *attributes({ARGUMENTS: f"{_LATER_ARGUMENTS} _cuda_graph_config_locked"}),
    *attributes({BATCH: PROMPT_FIELDS}),
    *attributes({RUNNER: "decode_cuda_graph_runner prefill_cuda_graph_runner war_fastpath_read_done_event"}),
}
_LATER_FUNCTIONS = {
    *PROMPT_FUNCTIONS,
    WAR_BARRIER,
    f"{ARGUMENTS}._generate_decode_cuda_graph_batch_sizes",
    f"{ARGUMENTS}._parse_cuda_graph_config",
}


def _is_later(entry: str) -> bool:
    return entry.startswith(_RUNNER_FOLDER) or entry in _LATER_FUNCTIONS or "prepare_for_draft" in entry


class Sglang0513(Sglang0514):
    """The adapter for 0.5.13."""

    decode_graphs = "graph_runner"
    prefill_graphs = "piecewise_cuda_graph_runner"
    plain_prefills_by_graph = False
    prompts_may_wait = False
    reads: tuple[str, ...] = (
        *(e for e in Sglang0514.reads if e not in _LATER_ATTRIBUTES and not e.startswith(_RUNNER_FOLDER)),
        *attributes(
            {
                ARGUMENTS: "cuda_graph_bs disable_cuda_graph max_prefill_tokens",
                RUNNER: "graph_runner piecewise_cuda_graph_runner",
                f"{_GRAPHS}:CudaGraphRunner": "capture_bs",
            }
        ),
    )
    relies_on: tuple[str, ...] = (
        *(entry for entry in Sglang0514.relies_on if not _is_later(entry)),
        f"{_DRAFT_INPUT}.prepare_for_extend_to_fill_draft_kvcache",
        f"{_DRAFT_INPUT}.prepare_for_v2_draft",
        f"{_GRAPHS}:get_batch_sizes_to_capture",
        *(f"{_GRAPHS}:CudaGraphRunner.{name}" for name in ("__init__", "can_run", "recapture_if_needed", "replay")),
    )

    def arguments(self, server_args: Any, **as_asked: Any) -> Any:
        values = {"cuda_graph_config": _graph_config(server_args), "speculative_use_rejection_sampling": False}
        return Arguments(server_args, values | as_asked)

    def take_limits(self, server_args: Any, most_spec_requests: int | None) -> None:
        """Both modes have graphs of the same sizes, SGLang's own."""

    def _graph_runner(self) -> Any:
        from sglang.srt.model_executor.cuda_graph_runner import CudaGraphRunner

        return CudaGraphRunner

    def _plain_graph_sizes(self, runner: Any) -> AbstractContextManager[Any]:
        del runner
        return nullcontext()

    def _name_backends(self, backend: Any, live: Any) -> None:
        """Models ask the runner, which says so itself."""

    def _read_done_event(self, runner: Any) -> str:
        # Nothing waits for one here.
        del runner
        return "adaptive_spec_read_done_event"

    def _decode_graph_config(self, runner: Any) -> Any:
        return _graph_config(runner.server_args).decode

    def _buffer_limits(self, runner: Any) -> tuple[int | None, int, int]:
        arguments = runner.server_args
        step = int(arguments.max_speculative_num_draft_tokens)
        return arguments.chunked_prefill_size, int(arguments.max_prefill_tokens), step


def _graph_config(server_args: Any) -> SimpleNamespace:
    """What later releases say of graphs, in their form."""
    backend = "disabled" if server_args.disable_cuda_graph else "full"
    return SimpleNamespace(decode=SimpleNamespace(backend=backend, bs=server_args.cuda_graph_bs))

"""Releases that load plugins and are not served: what is different there."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Different:
    """Why no adapter serves a release.

    Attributes:
        why: For the refusal.
        missing: Of the functions that every adapter needs, the ones this is about.
    """

    why: str
    missing: tuple[str, ...]


_WORKER = "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2"
_FUTURES = "sglang.srt.managers.overlap_utils:FutureMap"

# The worker gets a ModelWorkerBatch, a copy of fields; Scheduler.run_batch takes lengths from next_draft_input.
_COPIED_BATCH = Different(
    "There the worker gets a copy of the batch, so the mode that was decided for it does not arrive; the scheduler "
    "takes the lengths of the next step from the draft's input, which a plain step does not make; and without overlap "
    "an older worker runs, which this plugin does not know.",
    (
        "sglang.srt.managers.scheduler:Scheduler._forward_isolation",
        f"{_FUTURES}.publish",
        f"{_FUTURES}.resolve_seq_lens_cpu",
        f"{_WORKER}.init_cuda_graphs",
    ),
)
# model_executor/cuda_graph_runner.py; graph_runner; cuda_graph_bs and cuda_graph_max_bs among the arguments.
_EARLY_GRAPHS = Different(
    "There graphs are captured while the worker is made, by another runner and from other arguments, and the draft's "
    "forwards are prepared elsewhere: plain graphs and the draft's catch-up would have to be built anew for it.",
    (
        "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner.__init__",
        "sglang.srt.model_executor.runner.eager_runner:EagerRunner.__init__",
        "sglang.srt.speculative.base_spec_worker:EagleDraftWorkerBase.prepare_for_draft_extend",
        f"{_WORKER}.init_cuda_graphs",
    ),
)

NOT_SERVED = {
    "0.5.11": _COPIED_BATCH,
    "0.5.12": _COPIED_BATCH,
    "0.5.12.post1": _COPIED_BATCH,
    "0.5.13": _EARLY_GRAPHS,
    "0.5.13.post1": _EARLY_GRAPHS,
}

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
        "sglang.srt.managers.overlap_utils:decide_needs_cpu_seq_lens",
    ),
)

NOT_SERVED = {
    "0.5.11": _COPIED_BATCH,
    "0.5.12": _COPIED_BATCH,
    "0.5.12.post1": _COPIED_BATCH,
}

"""Spare a plain step the wait for lengths that the host knows already."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.patching import Patch


def _resolve(plugin: Plugin, original: Callable[..., Any], future_map: Any, args: Any, kwargs: Any) -> Any:
    batch = kwargs["batch"] if "batch" in kwargs else args[0]
    plan = plugin.release.plan_of(batch)
    if plan is None or plan.prepared is not Mode.PLAIN:
        return original(*args, **kwargs)
    known = plan.host_seq_lens
    needs_cpu_seq_lens = future_map.needs_cpu_seq_lens
    # The original runs in any case: it orders the GPU lengths between the streams. It waits on the host only
    # where it has to bring them over, which a plain step needs exactly once, after a verify step.
    future_map.needs_cpu_seq_lens = known is None
    try:
        resolved = original(*args, **kwargs)
    finally:
        future_map.needs_cpu_seq_lens = needs_cpu_seq_lens
    if known is not None:
        batch.seq_lens_cpu = known
        batch.seq_lens_sum = None  # ForwardBatch adds them up
    return resolved


PATCHES = (
    Patch(
        target="sglang.srt.managers.overlap_utils:FutureMap.resolve_seq_lens_cpu",
        wrapper=_resolve,
        why="A speculative step's lengths come back from the GPU, and the host waits for them. After a plain "
        "step they are one more than before.",
        upstream="none",
        remove_when="SGLang resolves lengths by what the step before could have accepted.",
    ),
)

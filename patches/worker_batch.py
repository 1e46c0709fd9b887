"""Let a copy of a batch say what was decided for the batch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch


def _copy(plugin: Plugin, original: Callable[..., Any], batch: Any, args: Any, kwargs: Any) -> Any:
    copied = original(*args, **kwargs)
    if plugin.engine is not None:
        plugin.release.carry(batch, copied)
    return copied


PATCHES = (
    Patch(
        target="sglang.srt.managers.schedule_batch:ScheduleBatch.get_model_worker_batch",
        wrapper=_copy,
        why="To 0.5.12 the worker gets a copy of declared fields: without this the decided mode would not arrive.",
        upstream="0.5.13 gives the worker the batch itself",
        remove_when="0.5.12 is no longer served.",
    ),
)

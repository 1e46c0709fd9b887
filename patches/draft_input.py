"""Allocate for the decided mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch


def _prepare(plugin: Plugin, original: Callable[..., Any], draft_input: Any, args: Any, kwargs: Any) -> Any:
    del draft_input
    if plugin.engine is None:
        return original(*args, **kwargs)
    batch = kwargs["batch"] if "batch" in kwargs else args[0]
    return plugin.engine.prepare(batch, original)


PATCHES = (
    Patch(
        target="sglang.srt.speculative.eagle_info_v2:EagleDraftInputV2Mixin.prepare_for_decode",
        other_targets=("sglang.srt.speculative.eagle_utils:eagle_prepare_for_decode",),
        wrapper=_prepare,
        why="Under speculation this allocates; a plain step needs one slot a request.",
        upstream="none",
        remove_when="The reserve of a decode step is a parameter.",
    ),
)

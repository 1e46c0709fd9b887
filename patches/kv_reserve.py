"""Reserve as many KV slots as the mode needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch


def _reserve(plugin: Plugin, original: Callable[..., Any], instance: None, args: Any, kwargs: Any) -> Any:
    del instance
    tokens = None if plugin.engine is None else plugin.engine.reserve_tokens()
    return original(*args, **kwargs) if tokens is None else -(-tokens // plugin.release.reserve_times)


PATCHES = (
    Patch(
        target="sglang.srt.speculative.eagle_info_v2:get_alloc_reserve_per_decode",
        other_targets=(
            "sglang.srt.speculative.eagle_utils:get_alloc_reserve_per_decode",
            "sglang.srt.speculative.eagle_info_v2:get_alloc_len_per_decode",
        ),
        wrapper=_reserve,
        why="What preparation allocates: one slot a request for a plain step, SGLang's reserve otherwise.",
        upstream="none",
        remove_when="The reserve of a decode step is a parameter.",
    ),
    Patch(
        target="sglang.srt.managers.schedule_batch:get_alloc_reserve_per_decode",
        other_targets=("sglang.srt.managers.utils:get_alloc_len_per_decode",),
        wrapper=_reserve,
        why="What the scheduler reckons with before it retracts: a batch that may run plain needs less.",
        upstream="none",
        remove_when="The reserve of a decode step is a parameter.",
    ),
)

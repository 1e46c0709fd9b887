"""Decide the mode before anything is allocated for the step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.patching import Patch

_never_started = Refusal(
    "A speculative server runs without this plugin's engine.",
    "Another plugin replaced SGLang's worker or its init_cuda_graphs, where the engine starts.",
    "Set SGLANG_PLUGINS to the plugins you need, or let the other plugin wrap instead of replace.",
)


def _decide_first(plugin: Plugin, original: Callable[..., Any], batch: Any, args: Any, kwargs: Any) -> Any:
    if plugin.release.is_speculative(batch):
        if plugin.engine is None:
            _never_started.end_process()
        plugin.engine.plan(batch)
    return original(*args, **kwargs)


PATCHES = (
    Patch(
        target="sglang.srt.managers.schedule_batch:ScheduleBatch.prepare_for_decode",
        wrapper=_decide_first,
        why="KV slots and graph shapes follow from the mode, so it has to be known before they are settled.",
        upstream="sgl-project/sglang#28045 asks for decisions by measured cost",
        remove_when="SGLang decides per step whether to speculate, with true plain decode as one choice.",
    ),
)

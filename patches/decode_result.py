"""Process a plain step's result as a server without speculation would."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch

_MIXIN = "sglang.srt.managers.scheduler_output_processor_mixin:SchedulerOutputProcessorMixin"


def _process(plugin: Plugin, original: Callable[..., Any], processor: Any, args: Any, kwargs: Any) -> Any:
    del processor
    if plugin.engine is None:
        return original(*args, **kwargs)
    batch = kwargs["batch"] if "batch" in kwargs else args[0]
    result = kwargs["result"] if "result" in kwargs else args[1]
    return plugin.engine.process(batch, result, original)


PATCHES = (
    Patch(
        target="sglang.srt.managers.scheduler_components.batch_result_processor:"
        "SchedulerBatchResultProcessor.process_batch_result_decode",
        other_targets=(f"{_MIXIN}.process_batch_result_decode",),
        wrapper=_process,
        why="A plain step is no verify step: not in the log, not in the metrics, not in a request's meta_info. "
        "Logprobs, grammars and hidden states take the path they take without speculation.",
        upstream="none",
        remove_when="A result says itself how it was made.",
        for_plain=False,
    ),
)

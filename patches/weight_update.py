"""Turn away a weight update that would leave the plain graphs behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.patching import Patch

_stale_graphs = Refusal(
    "Capturing graphs anew after a weight update is not served.",
    "SGLang captures the speculative ones only; the plain ones would go on with what they were captured with.",
    "Update without recapture_cuda_graph, or restart the server with the new weights.",
)


def _update(plugin: Plugin, original: Callable[..., Any], updater: Any, args: Any, kwargs: Any) -> Any:
    del updater
    request = kwargs["recv_req"] if "recv_req" in kwargs else args[0]
    engine = plugin.engine
    if engine is None or engine.runtime is None or not engine.runtime.graph_sizes or not request.recapture_cuda_graph:
        return original(*args, **kwargs)
    from sglang.srt.managers.io_struct import UpdateWeightFromDiskReqOutput

    return UpdateWeightFromDiskReqOutput(False, str(_stale_graphs))


PATCHES = (
    Patch(
        target="sglang.srt.managers.scheduler_components.weight_updater:"
        "SchedulerWeightUpdaterManager.update_weights_from_disk",
        other_targets=(
            "sglang.srt.managers.scheduler_update_weights_mixin:SchedulerUpdateWeightsMixin.update_weights_from_disk",
        ),
        wrapper=_update,
        why="With recapture_cuda_graph SGLang captures the graphs of its own mode anew, and knows of no others.",
        upstream="none",
        remove_when="SGLang keeps a non-speculative graph set on a speculative server.",
    ),
)

"""Build the plain graph set beside the speculative one."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.patching import Patch

logger = logging.getLogger("sglang_adaptive_spec")


def _build(plugin: Plugin, original: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    captured = original(*args, **kwargs)
    try:
        plugin.patch_set.verify()
        plugin.start_engine(worker.server_args)
        runtime = plugin.engine.build(worker)
        # On a server that never takes a plain step, SGLang's own path is to be just that.
        plugin.patch_set.plain_possible = runtime is not None
    except Refusal as refusal:
        refusal.end_process()
    if plugin.release.rank(worker) == 0:
        logger.info(plugin.summary(runtime))
        plugin.remind_of_drift()
    return captured


PATCHES = (
    Patch(
        target="sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2.init_cuda_graphs",
        other_targets=("sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2.__init__",),
        wrapper=_build,
        why="After SGLang's own graphs, a second attention backend and a decode graph set are built with "
        "speculation switched off for that moment; they share the graph pool.",
        upstream="none",
        remove_when="SGLang keeps a non-speculative graph set on a speculative server.",
        for_plain=False,
    ),
)

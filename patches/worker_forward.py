"""Execute the mode that a batch was prepared for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch


def _forward(plugin: Plugin, original: Callable[..., Any], worker: Any, args: Any, kwargs: Any) -> Any:
    if plugin.engine is None:
        return original(*args, **kwargs)
    batch = kwargs["batch"] if "batch" in kwargs else args[0]
    publish = kwargs.get("on_publish", args[1] if len(args) > 1 else None)
    return plugin.engine.run(worker, batch, publish, lambda: original(*args, **kwargs))


PATCHES = (
    Patch(
        target="sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2.forward_batch_generation",
        wrapper=_forward,
        why="A step prepared as plain takes one target forward instead of draft, verify and draft-extend; this "
        "replaces that mode's path. A speculative step is SGLang's own, untouched.",
        upstream="none",
        remove_when="SGLang decides per step whether to speculate, with true plain decode as one choice.",
    ),
)

"""Settle the account of a request that leaves: what it may leave in the radix cache, and how its steps ran."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch


def _settle(plugin: Plugin, original: Callable[..., Any], req: Any, args: Any, kwargs: Any) -> Any:
    if plugin.engine is not None:
        plugin.engine.before_release(req)
    return original(*args, **kwargs)


PATCHES = (
    Patch(
        target="sglang.srt.managers.schedule_batch:Req.pop_committed_kv_cache",
        other_targets=(
            "sglang.srt.managers.schedule_batch:Req.effective_kv_committed_len",
            "sglang.srt.managers.schedule_batch:Req.owned_kv_len",
        ),
        wrapper=_settle,
        why="A request that leaves in a plain phase has a few tokens that the draft has not seen. Cached, they "
        "would lower the acceptance of every later request that shares the prefix; released as over-allocated, "
        "they cost it a few tokens of prefill. It is also the last moment to count its plain steps, and the tokens "
        "behind its end.",
        upstream="sgl-project/sglang#16964 is of this kind",
        remove_when="The radix cache knows how far a prefix is true for the draft.",
        for_plain=False,
    ),
)

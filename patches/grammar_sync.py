"""Let a grammar see the last token before it decides on the next."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch


def _needs_sync(plugin: Plugin, original: Callable[..., Any], batch: Any, args: Any, kwargs: Any) -> Any:
    needed = original(*args, **kwargs)
    return needed if plugin.engine is None else needed or batch.has_grammar


PATCHES = (
    Patch(
        target="sglang.srt.managers.schedule_batch:ScheduleBatch.grammar_needs_sync",
        wrapper=_needs_sync,
        why="Where a verify step brings grammars up to date while the target runs (0.5.17), a plain step has no such "
        "place, and the result of one is accepted when it is processed. So the step before is processed first, as "
        "SGLang does for other algorithms.",
        upstream="none",
        remove_when="The target's own forward takes a grammar barrier.",
        required=False,
    ),
)

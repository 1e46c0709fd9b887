"""Refuse a configuration that can't be served before anything is started."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.patching import Patch


def _check(plugin: Plugin, original: Callable[..., Any], server_args: Any, args: Any, kwargs: Any) -> Any:
    # SGLang drops its own adaptive speculation with a warning where it can't serve it; asked for is asked for.
    asked = server_args.speculative_adaptive
    resolved = original(*args, **kwargs)
    try:
        plugin.check(plugin.release.arguments(server_args, speculative_adaptive=asked))
        plugin.take_limits(server_args)
    except Refusal as refusal:
        refusal.end_process()
    return resolved


PATCHES = (
    Patch(
        target="sglang.srt.server_args:ServerArgs.resolve_once",
        other_targets=("sglang.srt.server_args:ServerArgs.__post_init__",),
        wrapper=_check,
        why="The arguments are resolved here, for launch_server and for sglang.Engine alike.",
        upstream="none",
        remove_when="SGLang offers plugins a check of the resolved arguments.",
        for_plain=False,
    ),
)

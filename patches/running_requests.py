"""Leave the number of running requests to what it would be without speculation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch


def _leave_open(plugin: Plugin, original: Callable[..., Any], instance: Any, args: Any, kwargs: Any) -> Any:
    server_args = instance
    if server_args is None:
        server_args = kwargs["server_args"] if "server_args" in kwargs else args[0]
    if plugin.release.arguments(server_args).max_running_requests is not None or not plugin.lifts_request_limit:
        return original(*args, **kwargs)
    with plugin.release.request_limit_open(server_args):
        return original(*args, **kwargs)


PATCHES = (
    Patch(
        target="sglang.srt.arg_groups.speculative_hook:_handle_eagle_family",
        other_targets=("sglang.srt.server_args:ServerArgs._handle_speculative_decoding",),
        wrapper=_leave_open,
        why="With speculation SGLang falls to 48 running requests unless told otherwise, since speculation pays for "
        "few. A server that can go plain holds as many as the memory does, as one without speculation would.",
        upstream="none",
        remove_when="The limit is left to the memory upstream, too.",
        for_plain=False,
    ),
)

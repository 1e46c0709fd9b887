"""The plugin's flags on SGLang's command line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec import cli
from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.patching import Patch


def _add_flags(plugin: Plugin, original: Callable[..., Any], instance: None, args: Any, kwargs: Any) -> Any:
    del plugin, instance
    added = original(*args, **kwargs)
    cli.add_flags(kwargs["parser"] if "parser" in kwargs else args[0])
    return added


def _carry_flags(plugin: Plugin, original: Callable[..., Any], cls: Any, args: Any, kwargs: Any) -> Any:
    del plugin, cls
    try:
        cli.carry_flags(kwargs["args"] if "args" in kwargs else args[-1])
    except Refusal as refusal:
        refusal.end_process()
    return original(*args, **kwargs)


PATCHES = (
    Patch(
        target="sglang.srt.server_args:ServerArgs.add_cli_args",
        wrapper=_add_flags,
        why="The plugin's settings are flags of launch_server, listed in its --help.",
        upstream="none",
        remove_when="SGLang lets a plugin declare flags.",
        for_plain=False,
    ),
    Patch(
        target="sglang.srt.server_args:ServerArgs.from_cli_args",
        wrapper=_carry_flags,
        why="It keeps declared fields only; the plugin's flags would be parsed and lost.",
        upstream="none",
        remove_when="SGLang lets a plugin declare flags.",
        for_plain=False,
    ),
)

"""Report a request's accept length over its verify steps only."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch


def _correct(plugin: Plugin, original: Callable[..., Any], manager: Any, args: Any, kwargs: Any) -> Any:
    del plugin, manager
    meta_info = kwargs["meta_info"] if "meta_info" in kwargs else args[0]
    calculated = original(*args, **kwargs)
    verify_steps = meta_info.get("spec_verify_ct")
    if verify_steps:
        # Each verify step gives its correct drafts and one token of the target's own.
        meta_info["spec_accept_length"] = 1 + meta_info["spec_num_correct_drafts"] / verify_steps
    return calculated


PATCHES = (
    Patch(
        target="sglang.srt.managers.tokenizer_manager:TokenizerManager._calculate_spec_decoding_metrics",
        wrapper=_correct,
        why="It divides all of a request's tokens, those of plain steps too, by its verify steps.",
        upstream="none",
        remove_when="SGLang counts accepted tokens instead of completion tokens.",
    ),
)

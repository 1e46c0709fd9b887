"""Report a request's verify steps and plain steps each on their own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch
from sglang_adaptive_spec.request_steps import VerifySteps

PLAIN_STEPS = "adaptive_spec_plain_steps"


def _correct(plugin: Plugin, original: Callable[..., Any], manager: Any, args: Any, kwargs: Any) -> Any:
    del plugin, manager

    def call(meta_info: dict[str, Any], recv_obj: Any, i: int) -> Any:
        calculated = original(meta_info, recv_obj, i)
        verify_steps = meta_info.get("spec_verify_ct")
        if verify_steps:
            # Each verify step gives its correct drafts and one token of the target's own.
            drafts = "spec_num_correct_drafts" if "spec_num_correct_drafts" in meta_info else "spec_accepted_drafts"
            meta_info["spec_accept_length"] = 1 + meta_info[drafts] / verify_steps
            meta_info["spec_verify_ct"] = int(verify_steps)
        steps = getattr(recv_obj, "spec_verify_ct", ())
        if len(steps) > i and isinstance(steps[i], VerifySteps):
            meta_info[PLAIN_STEPS] = steps[i].plain_steps
        return calculated

    return call(*args, **kwargs)


PATCHES = (
    Patch(
        target="sglang.srt.managers.tokenizer_manager:TokenizerManager._calculate_spec_decoding_metrics",
        wrapper=_correct,
        why="It divides all of a request's tokens, those of plain steps too, by its verify steps, and knows of no "
        "plain ones.",
        upstream="none",
        remove_when="SGLang counts accepted tokens instead of completion tokens, and steps by how they ran.",
    ),
)

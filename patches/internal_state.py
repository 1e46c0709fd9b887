"""Show the plugin's state in /server_info, and take new settings from /set_internal_state."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.patching import Patch

logger = logging.getLogger("sglang_adaptive_spec")

KEY = "adaptive_spec"


def _show(plugin: Plugin, original: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    del scheduler
    output = original(*args, **kwargs)
    if plugin.engine is not None:
        output.internal_state[KEY] = plugin.engine.snapshot()
    return output


def _change(plugin: Plugin, original: Callable[..., Any], scheduler: Any, args: Any, kwargs: Any) -> Any:
    del scheduler
    request = kwargs["recv_req"] if "recv_req" in kwargs else args[0]
    if plugin.engine is None or KEY not in request.server_args:
        return original(*args, **kwargs)
    asked = request.server_args[KEY]
    others = sorted(set(request.server_args) - {KEY})
    try:
        if others or not isinstance(asked, dict):
            raise Refusal(
                f"The request can't be read: {KEY} is {asked!r}, beside {others}.",
                "The plugin's settings are a JSON object, and can't change in one step with SGLang's own: half of it "
                "could fail.",
                f'Send {{"server_args": {{"{KEY}": {{...}}}}}} alone.',
            )
        plugin.engine.use(asked)
    except Refusal as refusal:
        logger.warning("adaptive-spec: new settings refused: %s", refusal)
        return _answer(updated=False, state={"error": str(refusal)})
    return _answer(updated=True, state=plugin.engine.snapshot())


def _answer(*, updated: bool, state: dict[str, Any]) -> Any:
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    return SetInternalStateReqOutput(updated=updated, server_args={KEY: state})


PATCHES = (
    Patch(
        target="sglang.srt.managers.scheduler:Scheduler.get_internal_state",
        wrapper=_show,
        why="/server_info shows the mode, the counters and the last switches.",
        upstream="none",
        remove_when="SGLang lets a plugin add to its state.",
        for_plain=False,
    ),
    Patch(
        target="sglang.srt.managers.scheduler:Scheduler.set_internal_state",
        wrapper=_change,
        why="It rejects a key it does not know; the plugin's settings change on a running server.",
        upstream="none",
        remove_when="SGLang lets a plugin add to its state.",
        for_plain=False,
    ),
)

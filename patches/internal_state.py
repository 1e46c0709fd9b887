"""Show the plugin's state in /server_info, and take new settings from /set_internal_state."""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.config import SWITCHES
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
    request.server_args = _nested(request.server_args)
    if plugin.engine is None or KEY not in request.server_args:
        return original(*args, **kwargs)
    asked = request.server_args[KEY]
    others = sorted(set(request.server_args) - {KEY})
    # The request id is all that reaches a scheduler of whoever asked.
    by = f"request {request.rid}" if request.rid else None
    try:
        if not isinstance(asked, dict) or not asked:
            raise Refusal(
                f"{KEY} is {asked!r}.",
                "It has to be a JSON object that names at least one setting.",
                f'Send {{"server_args": {{"{KEY}": {{"disable_batch_threshold": 32}}}}}}, say.',
            )
        if others:
            raise Refusal(
                f"{KEY} can't change together with {', '.join(others)}.",
                "SGLang's own settings and the plugin's can't change in one step: half of it could fail.",
                "Send one request for each.",
            )
        plugin.engine.use(asked, by)
    except Refusal as refusal:
        logger.warning("adaptive-spec: new settings refused%s: %s", f", asked by {by}" if by else "", refusal)
        return _refused(str(refusal))
    except Exception as error:
        logger.exception("adaptive-spec: new settings could not be read: %r", asked)
        return _refused(f"A fault of the plugin: {error!r}. Nothing was changed.")
    return _answer(updated=True, state=plugin.engine.snapshot())


def _refused(why: str) -> Any:
    # What stands in "updated" is all of an answer that reaches the HTTP server's side.
    return _answer(updated={"error": why} if _says_why() else False, state={"error": why})


def _answer(*, updated: bool | dict[str, str], state: dict[str, Any]) -> Any:
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    more = {"server_args": {KEY: state}} if _says_why() else {}
    return SetInternalStateReqOutput(updated=updated, **more)


def _says_why() -> bool:
    """Whether SGLang's answer has a place for more than yes and no, as it had up to 0.5.15."""
    from sglang.srt.managers.io_struct import SetInternalStateReqOutput

    return "server_args" in inspect.signature(SetInternalStateReqOutput).parameters


def _nested(asked: dict[str, Any]) -> dict[str, Any]:
    """Settings in the form that every release lets through, as one JSON object.

    From 0.5.16 on SGLang takes nothing but numbers by name. So ``adaptive_spec.min_dwell_steps: 4`` stands for a
    number, ``adaptive_spec.policy.plain: 1`` for a word, and ``adaptive_spec.dry_run: 0`` for off.
    """
    flat = {name.removeprefix(f"{KEY}."): value for name, value in asked.items() if name.startswith(f"{KEY}.")}
    if not flat:
        return asked
    settings: dict[str, Any] = {}
    for name, value in flat.items():
        setting, _, word = name.partition(".")
        settings[setting] = word or (bool(value) if setting in SWITCHES and value in (0, 1) else value)
    return {KEY: settings, **{name: value for name, value in asked.items() if not name.startswith(f"{KEY}.")}}


def _ask_in_turn(plugin: Plugin, original: Callable[..., Any], manager: Any, args: Any, kwargs: Any) -> Any:
    del plugin
    # Made on first use, in the event loop's only thread.
    turn = vars(manager).setdefault("adaptive_spec_turn", asyncio.Lock())

    async def ask() -> Any:
        from fastapi import HTTPException

        async with turn:
            answers = await original(*args, **kwargs)
        refused = [answer["error"] for answer in answers if isinstance(answer, dict)]
        if refused:
            raise HTTPException(status_code=400, detail=refused[0])
        return answers

    return ask()


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
    Patch(
        target="sglang.srt.managers.tokenizer_control_mixin:TokenizerControlMixin.set_internal_state",
        wrapper=_ask_in_turn,
        why="It answers a refusal with status 200 and a bare false; whoever asked has to hear that, and why. Of calls "
        "at the same moment one may fail: FanOutCommunicator lets a new call overtake the one whose turn it is.",
        upstream="sgl-project/sglang#30606 fixes the latter",
        remove_when="/set_internal_state answers a refusal with an error, and calls at the same moment in turn.",
        for_plain=False,
    ),
)

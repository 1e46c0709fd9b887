"""SGLang 0.5.17 and 0.5.18: resolved settings lie in read-only bags; a graph's hidden-state mode is fixed."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

from sglang_adaptive_spec.releases.arguments import Arguments
from sglang_adaptive_spec.releases.reads import (
    ARGUMENT_METHODS,
    ARGUMENTS,
    DRAFT_WORKER,
    FIXED_CAPTURE,
    READS,
    RELIES_ON,
    REQUEST,
    RUNNER,
    RUNTIME_CONTEXT,
    SERVER_ARGUMENTS,
    attributes,
)
from sglang_adaptive_spec.releases.refusals_0_5_14 import NOT_PROVEN, UNSERVED, Unserved
from sglang_adaptive_spec.releases.sglang_0_5_14 import swapped
from sglang_adaptive_spec.releases.sglang_0_5_15 import HIDDEN_SIZES
from sglang_adaptive_spec.releases.sglang_0_5_16 import RECURRENT, Sglang0516

BAG_OVERRIDE = f"{RUNTIME_CONTEXT}:_ConfigBag.override"


class Sglang0517(Sglang0516):
    """The adapter for 0.5.17 and 0.5.18."""

    unserved: tuple[Unserved, ...] = (
        *UNSERVED,
        Unserved("--return-hidden-states-mode last", lambda a: a.return_hidden_states_mode == "last", NOT_PROVEN),
    )
    reads: tuple[str, ...] = attributes(
        READS,
        {
            ARGUMENTS: f"{SERVER_ARGUMENTS} {ARGUMENT_METHODS} return_hidden_states_mode",
            REQUEST: "kv_committed_len req_pool_idx",
            RUNNER: "tp_group",
            DRAFT_WORKER: "draft_tp_context",
            RUNTIME_CONTEXT: "get_exec get_parallel get_spec",
        },
    )
    relies_on: tuple[str, ...] = (*RELIES_ON, *HIDDEN_SIZES, RECURRENT, FIXED_CAPTURE, BAG_OVERRIDE)

    def take_limits(self, server_args: Any, most_spec_requests: int | None) -> None:
        """Resolved arguments are read-only here, so both modes have graphs of the same sizes, SGLang's own."""

    def _configured(self, runner: Any, values: dict[str, Any]) -> AbstractContextManager[None]:
        return _overridden_everywhere(runner, values)


@contextmanager
def _overridden_everywhere(runner: Any, values: dict[str, Any]) -> Iterator[None]:
    # Some readers take them from the bags, some still from the arguments, which can't be changed any more.
    with overridden(values), swapped(runner, server_args=Arguments(runner.server_args, values)):
        yield


@contextmanager
def overridden(values: dict[str, Any]) -> Iterator[None]:
    """Let SGLang's resolved settings read differently for a moment, in whatever bag each of them lies."""
    from sglang.srt.runtime_context import get_exec, get_spec

    with ExitStack() as stack:
        for bag in (get_spec(), get_exec().features):
            here = {name: value for name, value in values.items() if name in bag}
            if here:
                stack.enter_context(bag.override(**here))
        yield

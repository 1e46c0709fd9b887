"""A fault in the plugin, or in what surrounds it, costs no request."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.engine.load import Request, differences, run_load
from tests.engine.saboteur import install
from tests.engine.serving import CHAIN, SPECULATION, serve

pytestmark = pytest.mark.engine

TURNS_PLANS_AROUND = """
from sglang.srt.plugins.hook_registry import HookRegistry, HookType
from sglang_adaptive_spec.modes import Decision, Mode, Reason
steps = 0
def after(result, batch, *args, **kwargs):
    global steps
    steps += 1
    plan = getattr(batch, "adaptive_spec_plan", None)
    if plan is not None and steps == 10:
        other = Mode.SPEC if plan.mode is Mode.PLAIN else Mode.PLAIN
        plan.decision = Decision(other, Reason.FORCED)
def register():
    HookRegistry.register("sglang.srt.managers.schedule_batch.ScheduleBatch.prepare_for_decode", after, HookType.AFTER)
"""
BREAKS_A_PLAIN_STEP = """
def register():
    from sglang_adaptive_spec.releases.sglang_0_5_14 import Sglang0514
    original, steps = Sglang0514.run_plain_decode, 0
    def breaking(self, worker, runtime, batch, publish):
        nonlocal steps
        steps += 1
        result = original(self, worker, runtime, batch, None)
        if steps == 8:
            raise RuntimeError("injected")
        if publish is not None:
            publish(result.new_seq_lens)
        return result
    Sglang0514.run_plain_decode = breaking
"""


@pytest.mark.parametrize(
    ("source", "message"),
    [(TURNS_PLANS_AROUND, "turned into"), (BREAKS_A_PLAIN_STEP, "a plain step failed")],
    ids=["a mode changed after preparation", "an exception in a plain step"],
)
def test_a_fault_is_said_once_and_costs_no_request(
    tmp_path: Path, load: list[Request], reference: list[list[int]], source: str, message: str
) -> None:
    settings = {"policy": "alternate", "alternate_period_steps": 3}
    env = install(tmp_path / "saboteur", source)
    with serve(tmp_path / "log", [*SPECULATION, *CHAIN], settings=settings, env=env) as server:
        tokens = run_load(server, load)
        state = server.state()
        text = server.log

        assert differences(load, reference, tokens) == []
        assert state["faults"] == 1
        assert text.count(message) == 1
        assert "must match the size of tensor" not in text
        assert state["mode"] == "spec"
        assert server.used_tokens() == 0

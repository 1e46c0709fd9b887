"""The measurement, as pytest-benchmark runs it; ``python -m bench.overhead`` says how often."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from bench.overhead.step import CASES, DecodeSteps, Prefills, hooked, serve_from, upstream_left_out
from sglang_adaptive_spec.controller import Controller
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.policies import ThresholdPolicy

STEPS = 64
"""In a round: whatever is done every so many steps is in each of them, and none is short for having been spared it."""

Measure = Callable[[Callable[[], Any]], None]


@pytest.fixture(scope="module", autouse=True)
def _scheduler_process(tmp_path_factory: pytest.TempPathFactory, device: str) -> Iterator[None]:
    torch.set_num_threads(1)
    serve_from(tmp_path_factory.mktemp("models"), device)
    with torch.inference_mode(), upstream_left_out():
        yield


@pytest.fixture
def measure(benchmark: Any, rounds: int) -> Measure:
    """Times a callable: many rounds, of which a busy machine leaves some undisturbed."""
    return lambda call: benchmark.pedantic(call, rounds=rounds, iterations=STEPS, warmup_rounds=1)


@pytest.mark.parametrize("side", ["bare", "hooked"])
@pytest.mark.parametrize("name", list(CASES))
def test_step(repeat: int, batch_size: int, name: str, side: str, device: str, measure: Measure) -> None:
    case = CASES[name]
    kind = Prefills if case.prefills else DecodeSteps
    steps = kind(batch_size, device, speculates=case.speculates)
    if side == "bare":
        measure(steps)
        return
    with hooked(case, steps) as plugin:
        engine = plugin.engine if plugin else None
        steps.settle()
        before = engine.controller.steps.copy() if engine else None
        measure(steps)
        if engine is not None:
            ran = engine.controller.steps - before
            decoded = ran[case.mode] == ran.total() > 0
            assert decoded is not case.prefills, f"{ran} are not all {case.mode.value} steps"
            assert not engine.snapshot()["faults"]


@pytest.mark.parametrize("side", ["hooked"])
@pytest.mark.parametrize("name", ["controller"])
def test_controller(repeat: int, batch_size: int, name: str, side: str, measure: Measure) -> None:
    controller = Controller(ThresholdPolicy(512, 384, 8))

    def step() -> None:
        controller.decide(batch_size, lambda: 1000)  # steps that the pool has room for
        controller.note_step(Mode.SPEC)
        controller.note_result(Mode.SPEC, batch_size, 2 * batch_size, 2 * batch_size)

    measure(step)

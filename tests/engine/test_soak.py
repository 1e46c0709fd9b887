"""Ten thousand steps with flips at random moments: no slot lost, no token changed. Run by ``make soak``."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.engine.load import Request, differences, run_load
from tests.engine.serving import CHAIN, SPECULATION, serve

pytestmark = [pytest.mark.engine, pytest.mark.soak, pytest.mark.timeout(1800)]

STEPS = 10_000


def test_random_flips_leak_nothing(tmp_path: Path, load: list[Request], reference: list[list[int]]) -> None:
    draw = random.Random(0)
    settings = {"policy": "alternate", "alternate_period_steps": 1, "catch_up_tokens": 8}
    with serve(tmp_path / "log", [*SPECULATION, *CHAIN], settings=settings) as server:
        while sum(server.state()["steps"].values()) < STEPS:
            assert server.use(**settings | {"alternate_period_steps": draw.randint(1, 12)})
            order = draw.sample(range(len(load)), len(load))
            tokens = run_load(server, [load[index] for index in order])
            assert differences([load[i] for i in order], [reference[i] for i in order], tokens) == []
            if draw.random() < 0.3:
                assert server.used_tokens() == 0
        state = server.state()
        assert server.used_tokens() == 0
    assert state["faults"] == 0
    assert min(state["steps"].values()) > STEPS / 4
    print(f"{state['steps']} steps, {state['switches']} flips, {state['catch_ups']} catch-ups")

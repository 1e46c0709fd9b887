"""What the policy that measures makes of the ramp of bench.ramp, in a simulator that the H200's own ramps confirm."""

from __future__ import annotations

from collections import Counter
from functools import cache
from pathlib import Path
from statistics import fmean

import pytest

import bench
from bench.ramp.__main__ import PHASES
from bench.ramp.outcome import phase_of, without_probes
from bench.ramp.trace import boundaries, parse_phases
from bench.results import Results
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.policies.auto import AutoPolicy
from tests.unit.rush import Server, serve
from tests.unit.traces import MAX_ACCEPT_LENGTH

BACKENDS = ("fa3", "triton")
LOAD = parse_phases(PHASES, 0.8)
SEEDS = range(1, 6)


@cache
def measured(backend: str) -> Results:
    return Results.read(Path(bench.__file__).parent / "results" / f"h200-{backend}-ramp-graphs.jsonl")


@cache
def server(backend: str) -> Server:
    """With the step times that ``ours-auto`` measured at its start, for short contexts."""
    (row,) = (row for row in measured(backend).of_kind("server") if row["mode"] == "ours-auto")
    step: dict[Mode, dict[int, float]] = {mode: {} for mode in Mode}
    for cell in row["plugin"]["step_costs"]:
        if not cell["context_tokens"]:
            step[Mode(cell["mode"])][cell["requests"]] = cell["start_up_seconds"]
    return Server(step)


@cache
def latency_s(backend: str, mode: Mode) -> float:
    return fmean(serve(server(backend), mode, LOAD, seed=seed).latency_s for seed in SEEDS)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("mode", "name"), [(Mode.PLAIN, "base"), (Mode.SPEC, "spec")])
def test_the_simulator_gives_the_latency_that_was_measured(backend: str, mode: Mode, name: str) -> None:
    (row,) = (row for row in measured(backend).of_kind("measurement") if row["mode"] == name)
    assert latency_s(backend, mode) == pytest.approx(row["latency_ms"]["mean"] / 1e3, rel=0.08)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_policy_is_about_as_fast_as_the_better_of_two_servers_that_can_not_choose(backend: str) -> None:
    """Keeping the draft true is in it: some 2 % of a plain step, which a queue makes more of."""
    better_s = min(latency_s(backend, mode) for mode in Mode)
    runs = [serve(server(backend), policy(backend), LOAD, seed=seed) for seed in SEEDS]
    assert better_s / fmean(run.latency_s for run in runs) > 0.95


@pytest.mark.parametrize(("backend", "most"), [("triton", 1), ("fa3", 2)])
def test_few_switches_follow_a_change_of_the_load(backend: str, most: int) -> None:
    edges = boundaries(LOAD)
    for seed in SEEDS:
        lasting = without_probes(serve(server(backend), policy(backend), LOAD, seed=seed).switches)
        a_phase = Counter(phase_of(switch.at_s, edges) for switch in lasting)
        assert max(a_phase.values(), default=0) <= most


def test_a_rush_is_decoded_plainly_where_that_is_faster_and_speculation_comes_back() -> None:
    """Or a policy that never leaves a mode would pass for one that chooses."""
    switches = serve(server("triton"), policy("triton"), LOAD).switches
    lasting = without_probes(switches)
    assert [switch.after for switch in lasting] == ["plain", "spec"] * 2
    assert min(switch.running for switch in lasting if switch.after == "plain") > 32


def policy(backend: str) -> AutoPolicy:
    return AutoPolicy(server(backend).costs(), 8, None, MAX_ACCEPT_LENGTH)

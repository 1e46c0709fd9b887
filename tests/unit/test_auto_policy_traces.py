"""The policy ``auto`` on whole traces of a simulated server: the modes it ends in, its switches, and its regret.

Regret is what is lost against the better mode at every step, known in hindsight and with free switches.
"""

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from statistics import mean
from typing import Any

import pytest

from sglang_adaptive_spec.costs import StepCosts
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.policies import AutoPolicy, FixedPolicy
from tests.unit.traces import BUCKETS, MAX_ACCEPT_LENGTH, PROBING, Load, Machine, Run, seeded_costs, serve

MOST_REGRET = 0.03
CLEAR = 0.1
"""A load's better mode is expected at its end where it is better by this."""
SEEDS, LONE_SEEDS = range(2), range(8)
"""What a probe shows is partly luck, the more so of a lone request, so regret is a mean."""


def policy(costs: StepCosts) -> AutoPolicy:
    return AutoPolicy(costs, min_dwell_steps=8, max_accept_length=MAX_ACCEPT_LENGTH)


def no_costs() -> StepCosts:
    return StepCosts(dict.fromkeys(Mode, BUCKETS))


@dataclass(frozen=True)
class Start:
    """How much is known when serving begins, and how it hears of step times.

    Attributes:
        extra_switches: Until what start-up got wrong is corrected.
    """

    costs: Callable[[Machine], StepCosts]
    ranks: int = 1
    extra_switches: int = 0


STARTS = {
    "measured": Start(seeded_costs),
    # What start-up measured flatters one mode by 15 %.
    "spec-flattered": Start(
        lambda machine: seeded_costs(machine, bias=lambda m: 0.85 if m is Mode.SPEC else 0.98), extra_switches=1
    ),
    "plain-flattered": Start(
        lambda machine: seeded_costs(machine, bias=lambda m: 0.85 if m is Mode.PLAIN else 0.98), extra_switches=1
    ),
    # As between tensor-parallel ranks.
    "relayed": Start(seeded_costs, ranks=2),
}


def up_and_down(*requests: int, seconds: float, accept_length: float = 2.5, **kinds: Any) -> list[Load]:
    return [Load(seconds, n, accept_length, **kinds) for n in (*requests, *requests[-2::-1])]


def noisy(mean: int, deviation: float, *, seconds: float, each_seconds: float) -> list[Load]:
    rng = random.Random(5)
    return [Load(each_seconds, max(1, round(rng.gauss(mean, deviation)))) for _ in range(round(seconds / each_seconds))]


@dataclass(frozen=True)
class Trace:
    """A trace and what is allowed on it.

    Attributes:
        backend: Attention backend, which decides where the crossover lies.
        loads: One after the other.
        switches: That last, at most; None for one a load change.
        ends_right: Whether every load is to end in its better mode where that is clear.
        seeds: Runs.
    """

    backend: str
    loads: list[Load]
    switches: int | None = None
    ends_right: bool = True
    seeds: range = SEEDS


RAMP = (1, 4, 16, 32, 64, 128, 192, 256)
TRACES = {
    "steady-1": Trace("fa3", [Load(30, 1)], 0),
    "steady-64": Trace("fa3", [Load(30, 64)], 0),
    "steady-64-triton": Trace("triton", [Load(30, 64)], 1),
    "steady-256": Trace("fa3", [Load(60, 256)], 3),
    "steady-256-triton": Trace("triton", [Load(60, 256)], 1),
    "ramp": Trace("fa3", up_and_down(*RAMP, seconds=5)),
    "ramp-triton": Trace("triton", up_and_down(*RAMP, seconds=5), 2),
    "ramp-low-acceptance": Trace("fa3", up_and_down(*RAMP, seconds=5, accept_length=1.6)),
    "ramp-low-acceptance-alike": Trace(
        "fa3", up_and_down(*RAMP, seconds=5, accept_length=1.6, alike=True), ends_right=False
    ),
    "steady-48-alike": Trace("fa3", [Load(30, 48, 1.6, alike=True)], 3),
    "steady-64-alike": Trace("fa3", [Load(30, 64, 1.6, alike=True)], 4),
    "steady-256-alike": Trace("fa3", [Load(60, 256, 2.5, alike=True)], 4),
    "ramp-fine": Trace("triton", up_and_down(*range(1, 257, 3), seconds=0.3), 6, ends_right=False),
    "bursts": Trace("triton", [Load(8, 4), Load(2, 250)] * 5),
    "bursts-of-64": Trace("triton", [Load(0.02, 32), Load(0.8, 64)] * 30, ends_right=False),
    # As a benchmark sends its requests: the first one is decoded alone for a step.
    "runs-of-256": Trace("fa3", [Load(0.001, 1), Load(1.2, 256)] * 12, 12, ends_right=False),
    "bursts-short": Trace("triton", [Load(1, 8), Load(0.25, 250)] * 30, ends_right=False),
    "noise-at-the-crossover": Trace("fa3", noisy(228, 8, seconds=60, each_seconds=0.2), 12, ends_right=False),
    "noise-across-it": Trace("triton", noisy(36, 8, seconds=60, each_seconds=0.2), 150, ends_right=False),
    "acceptance-collapse": Trace("fa3", [Load(40, 8), Load(40, 8, 1.1)], 1),
    "acceptance-collapse-lone": Trace("fa3", [Load(40, 1), Load(40, 1, 1.1)], 1, seeds=LONE_SEEDS),
    "acceptance-recovery": Trace("fa3", [Load(10, 8), Load(20, 8, 1.1), Load(60, 8)], 2),
    "acceptance-recovery-lone": Trace("fa3", [Load(10, 1), Load(20, 1, 1.1), Load(60, 1)], 2, seeds=LONE_SEEDS),
    "acceptance-recovery-busy": Trace("triton", [Load(10, 32), Load(20, 32, 1.1), Load(60, 32)], 2),
    "long-contexts": Trace("triton", [Load(10, 128, 2.5, c) for c in (320, 2000, 8000, 16000, 8000, 2000, 320)]),
    "long-contexts-ramp": Trace("fa3", [Load(6, n, 2.5, 6000) for n in (4, 16, 64, 128, 192, 128, 64, 4)], 0),
    "poor-draft": Trace("fa3", [Load(150, 8, 1.05)], 1),
}


def allowed(trace: Trace) -> int:
    return len(trace.loads) - 1 if trace.switches is None else trace.switches


def check(trace: Trace, run: Run, machine: Machine, extra_switches: int = 0) -> None:
    assert len(run.switches()) <= allowed(trace) + extra_switches
    if trace.ends_right:
        for load, mode in zip(trace.loads, run.modes_at_end_of_loads(), strict=True):
            goodput = [machine.goodput(m, load.requests, load.context_tokens, load.accept_length) for m in Mode]
            assert max(goodput) / min(goodput) < 1 + CLEAR or mode is machine.better(load), load


@pytest.mark.parametrize("start", STARTS.values(), ids=STARTS)
@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_a_trace(trace, start):
    machine = Machine(trace.backend)
    runs = [
        serve(policy(start.costs(machine)), machine, trace.loads, seed=seed, ranks=start.ranks) for seed in trace.seeds
    ]
    for run in runs:
        print(f"regret {run.regret:.2%}, switches {len(run.switches())}, probes {len(run.switches(probes=True)) // 2}")
        check(trace, run, machine, start.extra_switches)
    assert mean(run.regret for run in runs) < MOST_REGRET


@pytest.mark.parametrize("backend", ["fa3", "triton"])
@pytest.mark.parametrize("requests", [1, 16, 64, 256])
def test_no_data_yet(requests, backend):
    """Neither measured at start nor served: it tries both modes and learns."""
    machine, trace = Machine(backend), Trace(backend, [Load(60, requests)], 1)
    check(trace, serve(policy(no_costs()), machine, trace.loads), machine)


@pytest.mark.parametrize("backend", ["fa3", "triton"])
def test_no_data_yet_on_a_ramp(backend):
    machine, trace = Machine(backend), Trace(backend, up_and_down(*RAMP, seconds=5))
    check(trace, serve(policy(no_costs()), machine, trace.loads), machine)


BUSY = {
    "256": Trace("fa3", [Load(60, 256, prefill_share=1.0)], 3),
    "64-triton": Trace("triton", [Load(2, 8), Load(30, 64, prefill_share=1.0)], 1),
    "ramp": Trace("fa3", up_and_down(*RAMP, seconds=5, prefill_share=1.0)),
    "ramp-triton": Trace("triton", up_and_down(*RAMP, seconds=5, prefill_share=1.0), 2),
    "ramp-low-acceptance-triton": Trace(
        "triton", up_and_down(*RAMP, seconds=5, accept_length=1.6, prefill_share=1.0), 2
    ),
}


@pytest.mark.parametrize("trace", BUSY.values(), ids=BUSY)
def test_a_load_with_a_prefill_behind_every_step(trace):
    """No step can be timed; what start-up measured has to do."""
    machine = Machine(trace.backend)
    runs = [serve(policy(seeded_costs(machine)), machine, trace.loads, seed=seed) for seed in trace.seeds]
    for run in runs:
        check(trace, run, machine)
    assert mean(run.regret for run in runs) < MOST_REGRET


def test_a_poor_draft_costs_nothing_measurable():
    machine = Machine()
    run = serve(policy(seeded_costs(machine)), machine, [Load(300, 8, 1.05)])
    assert run.regret < 0.005


def test_a_lone_user_with_good_and_poor_requests_loses_little_to_always_speculating():
    machine, lost = Machine(), []
    for seed in range(8):
        rng = random.Random(seed)
        loads = [Load(1, 1, rng.choice([1.3, 2.2, 3.2])) for _ in range(90)]
        auto = serve(policy(seeded_costs(machine)), machine, loads, seed=seed)
        spec = serve(FixedPolicy(Mode.SPEC), machine, loads, seed=seed)
        lost.append(auto.regret - spec.regret)
    assert mean(lost) < 0.02


# --- clocks ----------------------------------------------------------------------------------------------


def no_time(value: float, every: int) -> Callable[[int, float], float]:
    return lambda step, seconds: value if step % every == every - 1 else seconds


CLOCKS = {
    "stalls": no_time(3.0, 97),
    "stalls-in-a-row": lambda step, seconds: 0.5 if step % 500 in (7, 8, 9) else seconds,
    "jumps-ahead": no_time(1e9, 61),
    "jumps-back": no_time(-4.0, 61),
    "stands-still": no_time(0.0, 13),
    "not-a-number": no_time(math.nan, 13),
    "is-dead": lambda step, seconds: 0.0,
}


@pytest.mark.parametrize("clock", CLOCKS.values(), ids=CLOCKS)
@pytest.mark.parametrize(("requests", "backend", "mode"), [(8, "fa3", Mode.SPEC), (64, "triton", Mode.PLAIN)])
def test_no_clock_flips_the_mode_by_itself(requests, backend, mode, clock):
    machine = Machine(backend)
    run = serve(policy(seeded_costs(machine)), machine, [Load(40, requests)], clock=clock)
    assert len(run.switches()) == (mode is not Mode.SPEC)
    assert run.decisions[-1].mode is mode or run.decisions[-1].reason in PROBING


@pytest.mark.parametrize("seconds", [math.nan, 0.0, -1.0, 2.0, 1e9])
@pytest.mark.parametrize("requests", [8, 200])
def test_one_odd_step_changes_no_decision(requests, seconds):
    machine, loads = Machine(noise=0.0), [Load(20, requests)]
    runs = [
        serve(policy(seeded_costs(machine)), machine, loads, clock=clock)
        for clock in (lambda step, s: s, lambda step, s: seconds if step == 700 else s)
    ]
    assert runs[0].decisions == runs[1].decisions


def test_two_ranks_with_clocks_of_their_own_decide_alike():
    """Both hear of rank 0's step times; whatever a rank's own clock shows reaches no policy."""
    machine = Machine("triton")

    class Ranks(AutoPolicy):
        """Rank 0, with rank 1 beside it that gets the same notes and observations."""

        other = policy(seeded_costs(machine))

        def decide(self, seen):
            decision = super().decide(seen)
            assert self.other.decide(seen) == decision
            return decision

        def note_verify(self, requests, *tokens):
            super().note_verify(requests, *tokens)
            self.other.note_verify(requests, *tokens)

        def note_step(self, mode, requests, context_tokens, *seconds):
            super().note_step(mode, requests, context_tokens, *seconds)
            self.other.note_step(mode, requests, context_tokens, *seconds)

        def note_switch(self, mode, requests, context_tokens, seconds):
            super().note_switch(mode, requests, context_tokens, seconds)
            self.other.note_switch(mode, requests, context_tokens, seconds)

    ranks = Ranks(seeded_costs(machine), 8, max_accept_length=MAX_ACCEPT_LENGTH)
    run = serve(ranks, machine, up_and_down(*RAMP, seconds=3), ranks=2, clock=CLOCKS["stalls"])
    assert run.switches()


def table(seeds: int) -> None:
    """Print the table of docs/how-it-decides.md: ``python -m tests.unit.test_auto_policy_traces``."""
    for name, trace in TRACES.items():
        machine = Machine(trace.backend)
        runs = [
            serve(policy(start.costs(machine)), machine, trace.loads, seed=seed, ranks=start.ranks)
            for start in STARTS.values()
            for seed in range(seeds)
        ]
        regrets = [100 * run.regret for run in runs]
        switches = max(len(run.switches()) for run in runs)
        probes = max(len(run.switches(probes=True)) // 2 for run in runs)
        regret = f"{mean(regrets):.2f} | {max(regrets):.2f}"
        print(f"| {name} | {regret} | {switches} ({allowed(trace)}) | {probes} |", flush=True)


if __name__ == "__main__":
    table(seeds=6)

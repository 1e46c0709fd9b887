import json
import math
import time
from itertools import cycle, islice, pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.costs import BLOCK_STEPS, StepCosts
from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies import AutoPolicy, Observation, make_policy

SPEC, PLAIN = Mode.SPEC, Mode.PLAIN
DWELL = 8


def costs(spec_seconds: float | None = 0.010, plain_seconds: float | None = 0.005, served: bool = True) -> StepCosts:
    """Step times that are the same for every batch."""
    table = StepCosts()
    for mode, seconds in ((SPEC, spec_seconds), (PLAIN, plain_seconds)):
        for requests in (1, 4, 16, 64, 256) if seconds else ():
            table.seed(mode, requests, 0, seconds)
            for _ in range(BLOCK_STEPS if served else 0):
                table.observe(mode, requests, 0, seconds)
    return table


class Server:
    """Asks a policy as a controller does, and tells it of what it asked for."""

    def __init__(self, policy: AutoPolicy, accept_length: float = 2.5) -> None:
        self.policy = policy
        self.accept_length = accept_length
        self.mode, self.steps_in_mode = policy.initial_mode, 0
        self.short_of_slots = False
        self.made: list[Decision] = []

    def run(self, requests: int, steps: int, context_tokens: int = 0) -> str:
        """The modes of so many steps, one letter each."""
        start = len(self.made)
        for _ in range(steps):
            decision = self.policy.decide(Observation(requests, self.mode, self.steps_in_mode, context_tokens))
            self.steps_in_mode = self.steps_in_mode + 1 if decision.mode is self.mode else 1
            self.mode = decision.mode
            self.made.append(decision)
            if self.mode is SPEC and not self.short_of_slots:
                self.policy.note_verify(requests, round(requests * self.accept_length))
        return "".join(decision.mode.value[0] for decision in self.made[start:])

    def switches(self) -> list[Decision]:
        return [now for before, now in zip(self.made, self.made[1:], strict=False) if before.mode is not now.mode]


def test_it_listens_closely_where_a_switch_may_be_near():
    """Results are heard of one by one then; otherwise many at a time, which costs less."""
    assert AutoPolicy(costs(0.006), DWELL).attentive  # nothing was accepted yet
    for spec_seconds, accept_length, expected in ((0.006, 2.5, False), (0.0125, 2.5, True)):
        server = Server(AutoPolicy(costs(spec_seconds), 1000), accept_length)
        server.run(16, 20)
        assert server.mode is SPEC
        assert server.policy.attentive is expected
    poor = Server(AutoPolicy(costs(0.010), DWELL), 1.05)
    attentive = set()
    for _ in range(400):
        poor.run(16, 1)
        attentive.add((poor.made[-1].reason, poor.policy.attentive))
    assert {(Reason.PROBE, True), (Reason.STEADY, False)} <= attentive
    assert (Reason.PROBE, False) not in attentive


# --- which mode ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("spec_seconds", "accept_length", "expected"),
    [(0.010, 2.5, SPEC), (0.010, 1.5, PLAIN), (0.020, 2.5, PLAIN), (0.006, 1.5, SPEC)],
)
def test_the_mode_with_the_higher_goodput_is_chosen(spec_seconds, accept_length, expected):
    server = Server(AutoPolicy(costs(spec_seconds), DWELL), accept_length)
    server.run(16, 60)
    assert server.mode is expected


def test_it_starts_speculating_and_keeps_the_dwell():
    server = Server(AutoPolicy(costs(0.030), DWELL))
    assert server.run(16, 20)[: DWELL + 1] == "s" * DWELL + "p"
    assert server.switches() == [Decision(PLAIN, Reason.PLAIN_FASTER)]


@pytest.mark.parametrize(("lone", "rush", "dwells"), [(1, 64, False), (40, 64, True), (32, 64, False)])
def test_the_dwell_ends_once_the_load_has_doubled(lone, rush, dwells):
    """The first prompt of a rush is decoded alone, by speculation, and all others would dwell for it."""
    sizes = (1, 32, 40, 64)
    known = StepCosts(dict.fromkeys(Mode, sizes))
    for requests in sizes:
        known.seed(PLAIN, requests, 0, 0.005)
        known.seed(SPEC, requests, 0, 0.006 if requests < 64 else 0.030)
    server = Server(AutoPolicy(known, DWELL))
    assert server.run(64, 40).endswith("pp")
    entered = server.run(lone, 3).count("s")
    assert server.mode is SPEC
    assert server.run(rush, DWELL).count("s") == (DWELL - entered if dwells else 0)
    assert server.mode is PLAIN


def test_the_dwell_ends_once_the_load_has_halved():
    known = StepCosts(dict.fromkeys(Mode, (4, 64)))
    for requests in (4, 64):
        known.seed(PLAIN, requests, 0, 0.005)
        known.seed(SPEC, requests, 0, 0.006 if requests == 4 else 0.030)
    server = Server(AutoPolicy(known, DWELL))
    assert server.run(64, DWELL + 2).endswith("spp")
    assert server.run(4, DWELL - 2).endswith("sss")


@pytest.mark.parametrize("spec_seconds", [0.0124, 0.0126])
def test_what_is_about_equal_is_no_reason_to_switch(spec_seconds):
    server = Server(AutoPolicy(costs(spec_seconds), DWELL))
    assert server.run(16, 2000) == "s" * 2000


def test_a_gain_has_to_make_up_for_the_switch_first():
    """The dearer the switch, the longer a loss has to last."""
    waits = []
    for steps in (0.0, 4.0, 12.0):
        policy = AutoPolicy(costs(0.015), DWELL)
        Server(policy).run(16, 1)
        for _ in range(5):
            policy.note_switch(PLAIN, 16, 0, 0.005 * (1 + steps))
            policy.note_switch(SPEC, 16, 0, 0.015 * (1 + steps))
        waits.append(Server(policy).run(16, 200).index("p"))
    assert waits[0] == DWELL
    assert waits == sorted(set(waits))


def test_a_switch_counts_in_steps_of_its_own_batch_however_late_it_is_heard_of():
    known = costs(0.015, served=False)
    known.seed(SPEC, 64, 0, 0.06)
    policy = AutoPolicy(known, DWELL)
    Server(policy).run(16, 1)
    for _ in range(5):
        policy.note_switch(SPEC, 64, 0, 0.18)
    assert policy.explain()["modes"]["spec"]["switch_steps"] == pytest.approx(2.0)


@pytest.mark.parametrize("seconds", [math.nan, math.inf, -math.inf, 0.0, -1.0, 50.0])
def test_one_odd_switch_time_does_not_matter(seconds):
    policies = [AutoPolicy(costs(0.015), DWELL) for _ in range(2)]
    for policy in policies:
        Server(policy).run(16, 1)
    policies[0].note_switch(PLAIN, 16, 0, seconds)
    policies[0].note_switch(SPEC, 16, 0, seconds)
    assert Server(policies[0]).run(16, 200) == Server(policies[1]).run(16, 200)


def test_more_requests_than_speculative_graphs_hold_are_plain_at_once():
    server = Server(AutoPolicy(costs(0.006), DWELL, max_spec_requests=64))
    assert server.run(64, 2) == "ss"
    assert server.run(65, 200) == "p" * 200
    assert server.switches() == [Decision(PLAIN, Reason.NO_SPEC_GRAPH)]
    assert server.run(64, 60)[-1] == "s"


def test_a_loss_is_forgotten_where_speculation_can_not_be():
    """Or a server that is that busy would hear of every step by itself."""
    server = Server(AutoPolicy(costs(0.006), 1000, max_spec_requests=64))
    server.run(64, 20)
    server.run(65, 2)
    server.run(64, 4)
    assert server.mode is PLAIN
    assert server.policy.attentive
    server.run(65, 1)
    assert not server.policy.attentive


def test_a_lone_request_with_poor_acceptance_is_not_yet_the_workload():
    waits = []
    for requests in (1, 4, 16):
        server = Server(AutoPolicy(costs(), DWELL))
        server.run(requests, 400)
        server.accept_length = 1.0
        waits.append(server.run(requests, 400).index("p"))
    assert waits == sorted(waits, reverse=True)
    assert waits[0] > 2 * waits[1]


# --- probes ----------------------------------------------------------------------------------------------


def probe_starts(server: Server) -> list[int]:
    return [
        step
        for step, (before, now) in enumerate(zip(server.made, server.made[1:], strict=False), 1)
        if before.mode is not now.mode and now.reason is Reason.PROBE
    ]


def test_a_poor_draft_is_tried_ever_more_rarely_and_shortly():
    server = Server(AutoPolicy(costs(), DWELL, max_accept_length=4), accept_length=1.0)
    modes = server.run(16, 20_000)
    starts = probe_starts(server)
    waits = [b - a for a, b in pairwise(starts)]
    assert all(b >= 0.9 * a for a, b in pairwise(waits[:4]))
    assert min(waits[4:]) >= 1000
    assert modes[100:].count("s") < 0.005 * len(modes)


def test_a_better_draft_is_noticed():
    server = Server(AutoPolicy(costs(), DWELL, max_accept_length=4), accept_length=1.0)
    assert server.run(16, 5000)[-1] == "p"
    server.accept_length = 3.0
    modes = server.run(16, 3000)
    assert modes.index("s") < 2000
    assert modes.endswith("s" * 500)


def test_what_can_not_win_is_never_tried():
    """Four tokens at most, for a step of five plain ones."""
    server = Server(AutoPolicy(costs(0.025), DWELL, max_accept_length=4))
    server.run(16, 20_000)
    assert [decision.reason for decision in server.switches()] == [Reason.PLAIN_FASTER]


@pytest.mark.parametrize(("requests", "context_tokens"), [(40, 0), (7, 0), (16, 2000)])
def test_another_load_is_a_reason_to_try_plain_soon(requests, context_tokens):
    """Its step time was measured at the first load only."""
    times = StepCosts()
    for mode, seconds in ((Mode.SPEC, 0.010), (Mode.PLAIN, 0.0048)):
        times.seed(mode, 16, 0, seconds)
    server = Server(AutoPolicy(times, DWELL, max_accept_length=4), accept_length=2.2)
    server.run(16, 9000)
    while "p" not in server.run(16, 64):
        pass
    assert "p" not in server.run(16, 128), "another probe is due no sooner than a thousand steps on"
    assert "p" in server.run(requests, 64, context_tokens)


@pytest.mark.parametrize(("requests", "context_tokens"), [(40, 0), (7, 0), (16, 2000)])
def test_another_load_says_nothing_about_what_is_accepted(requests, context_tokens):
    server = Server(AutoPolicy(costs(), DWELL, max_accept_length=4), accept_length=1.0)
    server.run(16, 9000)
    assert "s" not in server.run(requests, 64, context_tokens)


def test_a_load_that_always_changes_does_not_make_probes_dear():
    server = Server(AutoPolicy(costs(), DWELL, max_accept_length=4), accept_length=1.0)
    modes = "".join(server.run(requests, 40) for requests in [8, 32, 16, 64] * 250)
    assert modes[100:].count("s") < 0.01 * len(modes)


@pytest.mark.parametrize("accept_lengths", [(2.5,), (1.0, 4.0)])
def test_tries_that_found_no_slots_do_not_end_speculation(accept_lengths):
    """A full pool makes their steps plain, so that nothing is heard of what would be accepted."""
    times, accepted = costs(0.0100), cycle(accept_lengths)
    for _ in range(50 * BLOCK_STEPS):
        times.observe(SPEC, 64, 0, 0.0137)
    server = Server(AutoPolicy(times, DWELL, max_accept_length=4))

    def run(requests: int, steps: int) -> str:
        modes = ""
        for server.accept_length in islice(accepted, steps):
            modes += server.run(requests, 1)
        return modes

    assert run(64, 500)[-1] == "p"
    server.short_of_slots = True
    assert "s" in run(64, 100_000)
    server.short_of_slots = False
    assert run(4, 4000)[-1] == "s"


def test_plain_mode_is_tried_while_its_time_is_a_guess():
    """Start-up says 9 % slower; serving, that it is much faster."""
    policy = AutoPolicy(costs(0.010, 0.0044, served=False), DWELL)
    server = Server(policy)
    for _ in range(100):
        server.run(16, 1)
        policy.note_step(server.mode, 16, 0, 0.010 if server.mode is SPEC else 0.003)
    assert server.switches()[0] == Decision(PLAIN, Reason.PROBE)
    assert server.made[40].mode is PLAIN


def test_a_try_of_plain_mode_is_judged_by_plain_steps():
    """Times of speculative ones that came late say nothing of it."""
    policy = AutoPolicy(costs(0.010, 0.0042, served=False), DWELL)
    policy.costs.observe(PLAIN, 16, 0, *[0.0042] * BLOCK_STEPS)
    policy.costs.observe(SPEC, 16, 0, *[0.010] * 60_000)  # it is long ago that plain steps took that
    server = Server(policy)
    first = server.run(16, 100).index("p")
    assert server.made[first].reason is Reason.PROBE
    server = Server(AutoPolicy(policy.costs, DWELL))
    server.run(16, first + 1)
    server.policy.note_step(SPEC, 16, 0, *[0.010] * BLOCK_STEPS)
    assert server.run(16, 10) == "p" * 10
    assert {decision.reason for decision in server.made[-10:]} == {Reason.PROBE}
    server.policy.note_step(PLAIN, 16, 0, *[0.003] * 2 * BLOCK_STEPS)
    server.run(16, 1)
    assert server.made[-1].reason is Reason.PLAIN_FASTER


def test_a_mode_left_by_a_try_of_the_other_is_not_tried_at_once():
    """A draft that is accepted to the last token would win; but what is accepted was just seen."""
    policy = AutoPolicy(costs(0.010, 0.0044, served=False), DWELL, max_accept_length=4)
    server = Server(policy)
    modes = ""
    for _ in range(100):
        modes += server.run(16, 1)
        policy.note_step(server.mode, 16, 0, 0.010 if server.mode is SPEC else 0.003)
    first = modes.index("p")
    assert modes[first : first + 50] == "p" * 50


# --- nothing measured yet --------------------------------------------------------------------------------


def test_without_any_times_it_speculates():
    server = Server(AutoPolicy(StepCosts(), DWELL))
    assert server.run(16, 500) == "s" * 500
    assert server.made[-1].reason is Reason.NO_DATA


@pytest.mark.parametrize(("plain_seconds", "expected"), [(0.003, PLAIN), (0.005, SPEC)])
def test_without_start_up_times_the_other_mode_is_tried_and_serving_tells(plain_seconds, expected):
    policy = AutoPolicy(StepCosts(), DWELL)
    server = Server(policy)
    for _ in range(200):
        server.run(16, 1)
        policy.note_step(server.mode, 16, 0, 0.010 if server.mode is SPEC else plain_seconds)
    assert server.switches()[0] == Decision(PLAIN, Reason.NO_DATA)
    assert server.made[40].mode is expected


def test_a_policy_that_takes_over_in_plain_mode_learns_the_acceptance():
    server = Server(AutoPolicy(costs(), DWELL))
    server.mode = PLAIN
    assert server.run(16, 60)[-1] == "s"


def test_a_mode_that_somebody_else_chose_ends_a_probe():
    policy = AutoPolicy(costs(), DWELL, max_accept_length=4)
    server = Server(policy, accept_length=1.0)
    while not probe_starts(server):
        server.run(16, 1)
    server.mode, server.steps_in_mode = PLAIN, 3
    server.run(16, 1)
    assert server.mode is PLAIN
    assert not policy.explain()["probing"]


# --- clocks ----------------------------------------------------------------------------------------------


def test_no_clock_is_read(monkeypatch):
    def unexpected():
        raise AssertionError("ranks would differ")

    for name in ("time", "monotonic", "perf_counter", "time_ns", "monotonic_ns", "perf_counter_ns", "process_time"):
        monkeypatch.setattr(time, name, unexpected)
    server = Server(AutoPolicy(costs(), DWELL), 1.0)
    made = server.run(16, 3000)
    monkeypatch.undo()
    assert made == Server(AutoPolicy(costs(), DWELL), 1.0).run(16, 3000)


NOTES = st.one_of(
    st.tuples(st.just("verify"), st.integers(-1, 300), st.integers(-1, 1200)),
    st.tuples(st.just("step"), st.sampled_from(list(Mode)), st.integers(0, 300), st.integers(0, 40_000), st.floats()),
    st.tuples(st.just("switch"), st.sampled_from(list(Mode)), st.integers(0, 300), st.integers(0, 40_000), st.floats()),
    st.tuples(st.just("run"), st.integers(0, 300), st.integers(0, 40), st.integers(0, 40_000)),
)


@given(st.lists(NOTES, max_size=40), st.sampled_from([None, 4]), st.sampled_from([None, 64]))
@settings(max_examples=200, deadline=None)
def test_whatever_it_hears_it_decides_and_two_that_hear_the_same_decide_alike(notes, most, reach):
    servers = [Server(AutoPolicy(StepCosts(), 2, reach, most)) for _ in range(2)]
    for server in servers:
        for kind, *heard in notes:
            if kind == "run":
                server.run(*heard)
            else:
                getattr(server.policy, f"note_{kind}")(*heard)
        json.dumps(server.policy.explain(), allow_nan=False)
    assert servers[0].made == servers[1].made
    assert servers[0].policy.explain() == servers[1].policy.explain()


# --- the rest --------------------------------------------------------------------------------------------


def test_it_explains_itself():
    policy = AutoPolicy(costs(), DWELL, max_accept_length=4)
    Server(policy).run(16, 40)
    told = policy.explain()
    assert told["requests"] == 16
    assert told["accept_length"] == pytest.approx(2.5)
    assert told["modes"]["spec"]["tokens_per_second_per_request"] == pytest.approx(250)
    assert told["modes"]["plain"]["tokens_per_second_per_request"] == pytest.approx(200)
    assert told["modes"]["plain"]["step_seconds_from"] == "served"


def test_it_explains_itself_before_it_knows_anything():
    told = json.loads(json.dumps(AutoPolicy(StepCosts(), DWELL).explain()))
    assert told["accept_length"] is None
    assert told["modes"]["spec"]["step_seconds"] is None


def test_the_settings_reach_it():
    table = StepCosts()
    policy = make_policy(Settings(policy="auto", min_dwell_steps=3), table, 64, 4)
    assert isinstance(policy, AutoPolicy)
    assert (policy.costs, policy.min_dwell_steps) == (table, 3)
    assert (policy.max_spec_requests, policy.max_accept_length) == (64, 4)
    assert policy.needs_plain
    assert policy.returns_to_spec


def test_a_decision_costs_microseconds():
    """Under 5 on a quiet core; the bound leaves room for a busy one."""
    policy = AutoPolicy(costs(), DWELL, max_accept_length=4)
    Server(policy).run(16, 100)
    seen = Observation(16, SPEC, 100, 300)
    best = math.inf
    for _ in range(20):
        start = time.perf_counter()
        for _ in range(500):
            policy.decide(seen)
        best = min(best, (time.perf_counter() - start) / 500)
    assert best < 20e-6

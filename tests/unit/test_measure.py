from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adaptive_spec.costs import StepCosts
from sglang_adaptive_spec.engine.measure import CONTEXTS_TOKENS, measure, sizes_to_measure, spread
from sglang_adaptive_spec.modes import Mode


class IdleServer:
    """Step times of a server that serves nothing; every step takes its time on a clock of our own."""

    def __init__(self, monkeypatch, *, ranks_clock: float = 1.0, no_room_from: int = 10**9, room: int = 10**9) -> None:
        self.now = 0.0
        self.no_room_from = no_room_from
        self.room = room
        self.ranks_clock = ranks_clock
        self.launched: list = []
        monkeypatch.setattr("time.perf_counter", lambda: self.now)

    def rank(self, worker):
        return 0

    def from_rank_0(self, worker, value):
        return value

    @contextmanager
    def idle_batch(self, worker, runtime, requests, context_tokens):
        if requests >= self.no_room_from:
            yield None
            return

        def seconds_a_step(mode, steps):
            seconds = (0.2 if mode is Mode.SPEC else 0.1) * requests * (1 + context_tokens / 1024)
            self.launched.append((mode, requests, steps))
            self.now += seconds * steps
            return seconds

        context_tokens = min(context_tokens, self.room // requests)
        yield SimpleNamespace(requests=requests, context_tokens=context_tokens, seconds_a_step=seconds_a_step)


def run(server, sizes, budget_seconds=1e9) -> tuple[StepCosts, int]:
    costs = StepCosts()
    return costs, measure(server, None, None, costs, sizes, budget_seconds)


def test_both_modes_are_timed_at_each_size(monkeypatch):
    costs, measured = run(IdleServer(monkeypatch), [1, 4])
    assert measured == 2
    assert CONTEXTS_TOKENS == (256, 3072)
    assert costs.seconds(Mode.SPEC, 4, 256) == pytest.approx(1.0)
    assert costs.seconds(Mode.SPEC, 4, 3072) == pytest.approx(3.2)
    assert costs.seconds(Mode.PLAIN, 1, 256) == pytest.approx(0.125)


def test_a_context_that_the_pool_cuts_down_to_one_timed_already_is_left_out(monkeypatch):
    costs, measured = run(IdleServer(monkeypatch, room=4 * 400), [1, 4])
    assert measured == 2
    assert [(row["requests"], row["context_tokens"]) for row in costs.table() if row["mode"] == "spec"] == [
        (1, 0),
        (1, 1024),
        (4, 0),
    ]


def test_no_size_is_begun_after_the_time_is_up(monkeypatch):
    server = IdleServer(monkeypatch)
    _, measured = run(server, [1, 2, 4, 8], budget_seconds=9)
    assert measured == 2
    assert {requests for _, requests, _ in server.launched} == {1, 2}


def test_a_size_without_room_is_left_out(monkeypatch):
    costs, measured = run(IdleServer(monkeypatch, no_room_from=4), [1, 4])
    assert measured == 1
    assert {row["requests"] for row in costs.table()} == {1}


def test_slow_steps_are_timed_singly(monkeypatch):
    server = IdleServer(monkeypatch)
    run(server, [1])
    assert {mode: max(n for m, _, n in server.launched if m is mode) for mode in Mode} == {Mode.SPEC: 1, Mode.PLAIN: 2}


@given(st.lists(st.integers(1, 999), unique=True).map(sorted))
def test_a_spread_has_every_size_once_and_the_ends_first(sizes):
    order = list(spread(sizes))
    assert sorted(order) == sizes
    assert set(order[:2]) == {*sizes[:1], *sizes[-1:]}


def test_graph_sizes_that_both_modes_have_are_measured_and_where_speculation_ends():
    assert sorted(sizes_to_measure([1, 2, 3, 4, 6, 50], [1, 2, 4, 8, 16, 64], 64)) == [1, 2, 4, 50]


@pytest.mark.parametrize(
    ("most", "sizes"), [(1, [1]), (6, [1, 2, 4]), (8, [1, 2, 4, 8]), (2048, [1, 2, 4, 8, 16, 32, 64])]
)
def test_without_graphs_powers_of_two_are(most, sizes):
    assert sizes_to_measure((), (), most) == sizes

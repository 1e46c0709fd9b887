import math
import random
from collections.abc import Callable
from statistics import pstdev

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sglang_adaptive_spec.acceptance import AcceptLength
from tests.unit.traces import accepted, accepted_alike, probability

TOGETHER = pytest.mark.parametrize("together", [1, 3, 16])
"""Steps that it hears of at once."""


def fed(
    accept_length: float,
    requests: int,
    steps: int,
    seed: int = 0,
    into: AcceptLength | None = None,
    together: int = 1,
    drawn: Callable[[random.Random, float, int], int] = accepted,
) -> AcceptLength:
    """An average that has heard of so many verify steps of one workload."""
    rng = random.Random(seed)
    draw = probability(accept_length) if drawn is accepted else accept_length
    tokens = [drawn(rng, draw, requests) for _ in range(steps)]
    average = AcceptLength(4) if into is None else into
    for first in range(0, steps, together):
        average.note(requests, *tokens[first : first + together])
    return average


def test_nothing_is_known_before_the_first_verify():
    average = AcceptLength(4)
    assert average.mean is None
    assert average.deviation == float("inf")
    assert average.relative_deviation == 0


def test_each_verified_request_counts_alike():
    average = AcceptLength(4)
    average.note(1, 4)
    average.note(3, 4)
    assert average.mean == pytest.approx(2, rel=0.02)
    assert average.verified_requests == 4


@TOGETHER
@pytest.mark.parametrize("requests", [1, 4, 16, 64])
@pytest.mark.parametrize("accept_length", [1.1, 2.5, 3.5])
def test_the_mean_is_near_and_the_deviation_honest(requests, accept_length, together):
    averages = [fed(accept_length, requests, 400, seed, together=together) for seed in range(30)]
    errors = [average.mean - accept_length for average in averages]
    claimed = sum(average.deviation for average in averages) / len(averages)
    assert max(map(abs, errors)) < 0.25
    assert 0.5 * pstdev(errors) < claimed < 3 * pstdev(errors)


@TOGETHER
@pytest.mark.parametrize("requests", [4, 16, 64, 256])
@pytest.mark.parametrize("accept_length", [1.6, 2.5])
def test_a_batch_accepted_alike_says_as_much_as_one_request(requests, accept_length, together):
    averages = [fed(accept_length, requests, 400, seed, together=together, drawn=accepted_alike) for seed in range(30)]
    errors = [average.mean - accept_length for average in averages]
    claimed = sum(average.deviation for average in averages) / len(averages)
    assert pstdev(errors) < 0.08
    assert 0.5 * pstdev(errors) < claimed < 3 * pstdev(errors)


@TOGETHER
@pytest.mark.parametrize(("requests", "steps"), [(1, 60), (4, 15), (16, 6), (64, 4)])
@pytest.mark.parametrize(("before", "after"), [(2.5, 1.05), (1.05, 2.5)])
def test_a_change_of_workload_shows_at_once(requests, steps, before, after, together):
    average = fed(before, requests, 1000, together=together)
    fed(after, requests, steps, 1, average, together=together)
    assert abs(average.mean - after) < abs(average.mean - before)


@pytest.mark.parametrize(("requests", "steps"), [(1, 80), (4, 220), (8, 220)])
@pytest.mark.parametrize("before", [1.6, 2.5])
def test_a_change_shows_soon_behind_a_batch_accepted_alike(requests, steps, before):
    """A lone request has nothing in common with others."""
    average, rng = AcceptLength(4), random.Random(2)
    for _ in range(400):
        average.note(256, accepted_alike(rng, before, 256))
    after = before + 1.2
    fed(before, requests, 8, 3, average)
    fed(after, requests, steps, 1, average)
    assert abs(average.mean - after) < abs(average.mean - before)


@TOGETHER
@pytest.mark.parametrize("requests", [1, 16])
def test_chance_alone_is_no_change_of_workload(requests, together):
    average, means = AcceptLength(4), []
    rng, chance = random.Random(3), probability(2.5)
    for step in range(0, 5000, together):
        average.note(requests, *(accepted(rng, chance, requests) for _ in range(together)))
        if step > 500:
            means.append(average.mean)
    assert max(means) - min(means) < 0.5


def test_what_is_old_counts_less():
    average = fed(2.5, 8, 200)
    before = average.deviation
    average.age(1000)
    assert average.deviation > 3 * before
    assert average.mean == pytest.approx(2.5, abs=0.2)
    fed(1.1, 8, 8, 1, average)
    assert average.mean < 1.5


def test_doubt_leaves_a_first_guess():
    average = fed(2.5, 64, 50)
    average.doubt()
    fed(1.1, 64, 1, 1, average)
    assert average.mean < 1.4


def test_however_long_ago_a_request_says_as_much_as_one():
    average = fed(2.5, 8, 200)
    for _ in range(1000):
        average.doubt()
        average.age(3000)
    assert average.mean == pytest.approx(2.5, abs=0.2)
    assert 0.5 < average.deviation < 1.5


HEARD = st.one_of(
    st.tuples(
        st.just("note"),
        st.sampled_from([1, 2, 16, 256, 4096]),
        st.floats(0, 1),
        st.integers(1, 300),
        st.sampled_from([1, 2, 16]),
    ),
    st.tuples(st.just("age"), st.integers(0, 10**7)),
    st.tuples(st.just("doubt")),
)


@given(st.integers(1, 8), st.lists(HEARD, max_size=20), st.integers(1, 40))
@settings(max_examples=100, deadline=None)
def test_whatever_it_hears_its_numbers_make_sense(most, heard, times):
    average = AcceptLength(most)
    for kind, *what in heard * times:
        if kind == "note":
            requests, share, steps, together = what
            tokens = requests + round(share * requests * (most - 1))
            for _ in range(max(1, steps // times // together)):
                average.note(requests, *[tokens] * together)
        else:
            getattr(average, kind)(*what)
        if average.mean is not None:
            assert average.mean * (1 + 1e-9) >= 1
            assert average.mean <= most * (1 + 1e-9)
            assert 0 < average.deviation < most
            assert math.isfinite(average.relative_deviation)


@pytest.mark.parametrize(
    ("requests", "tokens"), [(0, [0]), (0, [5]), (-1, [3]), (4, [3]), (1, [0]), (4, [3, 0]), (4, [])]
)
def test_what_can_not_be_is_left_out(requests, tokens):
    average = AcceptLength(4)
    average.note(requests, *tokens)
    assert average.mean is None
    average.note(4, 8, 3, 8)
    assert (average.mean, average.verified_requests) == (2, 8)


@TOGETHER
@pytest.mark.parametrize("requests", [1, 4, 16, 64])
def test_steps_heard_of_together_weigh_as_much_as_one_by_one(requests, together):
    """All of the same mean: so chance, which is seen through the steps before, plays no part."""
    averages = []
    for at_once in (1, together):
        average = AcceptLength(4)
        for _ in range(0, 48, at_once):
            average.note(requests, *[2 * requests] * at_once)
        averages.append(average)
    one, other = averages
    assert other.verified_requests == pytest.approx(one.verified_requests, rel=0.3)
    assert other._average.requests == pytest.approx(one._average.requests, rel=0.01)
    assert other._alert.requests == pytest.approx(one._alert.requests, rel=0.01)
    assert other._average.squares == pytest.approx(one._average.squares, rel=0.01)


@pytest.mark.parametrize("into_the_delivery", range(0, 16, 3))
@pytest.mark.parametrize(("requests", "most_steps"), [(16, 20), (64, 20)])
@pytest.mark.parametrize(("before", "after"), [(2.5, 1.05), (1.05, 2.5)])
def test_a_change_shows_with_the_delivery_after_the_one_it_falls_into(
    requests, most_steps, before, after, into_the_delivery
):
    """What came before it in the same delivery weighs less than what came since."""
    average = fed(before, requests, 992, together=16)
    rng, chances = random.Random(5), (probability(before), probability(after))
    drawn = [accepted(rng, chances[step >= into_the_delivery], requests) for step in range(32)]
    for first in (0, 16):
        average.note(requests, *drawn[first : first + 16])
        steps_since = first + 16 - into_the_delivery
        if abs(average.mean - after) < abs(average.mean - before):
            break
    assert abs(average.mean - after) < abs(average.mean - before)
    assert steps_since <= most_steps

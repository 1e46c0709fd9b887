"""The clock: which steps it times, and which it leaves alone."""

import pytest

from sglang_adaptive_spec.clock import StepClock
from sglang_adaptive_spec.modes import Mode

PLAIN, SPEC = Mode.PLAIN, Mode.SPEC


class Hand:
    """A clock that goes when it is told to."""

    def __init__(self):
        self.at = 100.0

    def __call__(self):
        return self.at


@pytest.fixture
def hand():
    return Hand()


@pytest.fixture
def clock(hand):
    return StepClock(hand)


def step(clock, hand, seconds, mode=PLAIN, number=0, requests=4):
    clock.launched(mode, requests, number)
    hand.at += seconds
    return clock.processed(mode)


def test_times_a_step_by_the_result_before_it(clock, hand):
    assert step(clock, hand, 0.5) is None
    timed = step(clock, hand, 0.02, number=1)
    assert (timed.mode, timed.after, timed.requests, timed.number) == (PLAIN, PLAIN, 4, 1)
    assert timed.seconds == pytest.approx(0.02)


def test_a_prefill_breaks_the_row(clock, hand):
    step(clock, hand, 0.02)
    clock.interrupted()
    assert step(clock, hand, 0.7) is None
    assert step(clock, hand, 0.02).seconds == pytest.approx(0.02)


def test_a_step_with_a_prefill_launched_behind_it_is_told_apart_and_the_next_one_not_timed(clock, hand):
    step(clock, hand, 0.02)
    clock.launched(PLAIN, 4, 1)
    clock.launched(PLAIN, 4, 2)
    hand.at += 0.03
    first = clock.processed(PLAIN)
    assert (first.seconds, first.alone) == (pytest.approx(0.03), True)
    clock.interrupted()
    hand.at += 0.8
    assert not clock.processed(PLAIN).alone
    assert step(clock, hand, 0.9) is None
    assert step(clock, hand, 0.02).seconds == pytest.approx(0.02)
    assert clock.recent_seconds(PLAIN) == pytest.approx(0.025)


def test_overlapped_steps_are_told_apart(clock, hand):
    step(clock, hand, 0.02)
    clock.launched(PLAIN, 4, 1)
    clock.launched(SPEC, 5, 2)
    hand.at += 0.01
    assert clock.processed(PLAIN).number == 1
    hand.at += 0.04
    switched = clock.processed(SPEC)
    assert (switched.number, switched.requests, switched.after) == (2, 5, PLAIN)
    assert switched.seconds == pytest.approx(0.04)


def test_a_lost_result_spoils_no_time(clock, hand):
    step(clock, hand, 0.02)
    clock.launched(SPEC, 4, 1)
    clock.launched(PLAIN, 4, 2)
    hand.at += 0.09
    assert clock.processed(PLAIN) is None
    assert step(clock, hand, 0.02, number=3) is None
    assert step(clock, hand, 0.02, number=4).number == 4


def test_a_result_of_nothing_launched_has_no_time(clock):
    assert clock.processed(SPEC) is None


def test_the_recent_time_of_a_mode_is_a_median_without_switches(clock, hand):
    assert clock.recent_seconds(PLAIN) is None
    for seconds in (1.0, 0.02, 0.03, 9.0):
        step(clock, hand, seconds)
    step(clock, hand, 5.0, mode=SPEC)
    step(clock, hand, 7.0)
    assert clock.recent_seconds(PLAIN) == pytest.approx(0.03)
    assert clock.recent_seconds(SPEC) is None

"""Rates and slots from samples."""

from __future__ import annotations

import json

import pytest

from sglang_adaptive_spec.top.history import History, rates_between
from tests.unit.top_samples import sample, steady

TTFT = """\
# TYPE sglang:time_to_first_token_seconds histogram
sglang:time_to_first_token_seconds_count {count}
sglang:time_to_first_token_seconds_sum {total}
"""


def run(modes: str, start: float = 1000.0, every: float = 1.0) -> History:
    """A server sampled at a steady pace; a letter a stretch: s speculates, p plain, . idle."""
    history = History(keep_seconds=60)
    last = steady(start, plain=False)
    history.add(last)
    for index, letter in enumerate(modes, start=1):
        at = start + index * every
        if letter == ".":
            last = sample(at, running=0, steps=last.steps, tokens=last.tokens, accepted_tokens=last.accepted_tokens,
                          verified_requests=last.verified_requests)  # fmt: skip
        else:
            last = steady(at, plain=letter == "p", since=last)
        history.add(last)
    return history


def shares(history: History, count: int, seconds: float) -> list[float | None]:
    return [slot and slot.plain_share for slot in history.slots(count, seconds)]


def test_rates_are_what_happened_between_two_samples() -> None:
    spec = steady(1000.0, plain=False)
    rates = rates_between(spec, steady(1002.0, plain=False, since=spec))
    assert rates.tokens_per_second == pytest.approx(1000)
    assert rates.steps_per_second == pytest.approx(10)
    assert rates.plain_share == 0
    assert rates.accept_length == 2.5
    plain = rates_between(spec, steady(1002.0, plain=True, since=spec))
    assert (plain.plain_share, plain.accept_length) == (1, None)
    assert plain.tokens_per_second == pytest.approx(400)


def test_an_idle_stretch_has_no_shares() -> None:
    idle = run("....").rates()
    assert idle is not None
    assert (idle.tokens_per_second, idle.plain_share, idle.accept_length) == (0, None, None)


def test_latency_is_the_mean_of_what_came_in_between() -> None:
    before = sample(1000.0, exposition=TTFT.format(count=10, total=1.0))
    after = sample(1001.0, exposition=TTFT.format(count=14, total=3.0))
    assert rates_between(before, after).time_to_first_token_seconds == pytest.approx(0.5)
    assert rates_between(before, after).inter_token_latency_seconds is None
    assert rates_between(before, sample(1001.0, exposition="")).time_to_first_token_seconds is None
    first = rates_between(sample(1000.0, exposition=""), after)  # the histogram appears with its first request
    assert first.time_to_first_token_seconds is None


def test_readings_are_over_the_last_seconds_only() -> None:
    rates = run("ssssssssss" + "ppppp").rates()
    assert rates is not None
    assert rates.seconds == pytest.approx(5)
    assert rates.plain_share == 1


def test_before_the_second_sample_there_are_no_rates() -> None:
    history = run("")
    assert history.rates() is None
    assert history.slots(3, 1.0) == [None, None, None]
    assert history.as_json()["tokens_per_second"] is None


def test_slots_show_the_mode_over_time() -> None:
    assert shares(run("ssspp"), 6, 1.0)[:5] == [0, 0, 0, 1, 1]
    assert shares(run("sspp"), 3, 2.0)[:2] == [0, 1]
    assert shares(run("sp"), 3, 2.0)[1] == 0.5


def test_slots_shorter_than_the_pace_repeat_the_stretch_around_them() -> None:
    found = shares(run("sspp", every=3.0), 12, 1.0)
    assert None not in found[:-1]
    assert found[0] == 0
    assert found[-2] == 1


def test_slots_before_the_first_sample_are_empty() -> None:
    assert shares(run("pp"), 6, 1.0)[:3] == [None, None, None]


def test_a_slot_keeps_its_place_as_time_goes_on() -> None:
    one, later = run("spspss", start=1000.4), run("spspsspp", start=1000.4)
    assert shares(one, 4, 2.0)[:-1] == shares(later, 5, 2.0)[:3]


def test_old_samples_are_dropped_but_for_the_edge() -> None:
    history = run("s" * 100)
    assert None not in shares(history, 60, 1.0)
    assert shares(history, 90, 1.0)[:20] == [None] * 20


def test_a_restarted_server_starts_anew() -> None:
    history = run("ssss")
    history.add(sample(1010.0, steps={"spec": 1, "plain": 0}, tokens={"spec": 3, "plain": 0}))
    assert history.latest.all_steps == 1
    assert history.rates() is None


def test_a_clock_set_back_starts_anew_and_one_that_stands_changes_nothing() -> None:
    history = run("ssss")
    history.add(history.latest)
    assert history.rates() is not None
    history.add(steady(history.latest.at_seconds - 3600, plain=False))
    assert history.rates() is None


def test_json_is_plain_and_complete() -> None:
    told = json.loads(json.dumps(run("sspp").as_json()))
    assert told["mode"] == "plain"
    assert told["running_requests"] == 40
    assert told["plain_share"] == 0.5
    assert told["accept_length"] == 2.5
    assert told["last_switches"][0]["reason"] == "more requests run than the threshold"

"""What bench.soak finds fault with."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from bench.soak import MOST_GROWTH, THRESHOLD, Seen, any_policy, complaints, outcomes

STATE = {"steps": {"spec": 900, "plain": 800}, "switches": 40, "faults": 0, "faults_by_kind": {}}


def seen(**changes) -> Seen:
    memory = [{"at_s": float(second), "host_gib": 4.0, "device_gib": 0.0} for second in range(50)]
    return Seen(**{"answers": 500, "flips": 10, "memory": memory} | changes)


def grown(last: float) -> list[dict[str, float]]:
    """Memory that doubles while all is used for the first time, and then grows to so many times that."""
    sizes = [min(1.0, 0.5 + second / 20) for second in range(10)] + [1 + (last - 1) * k / 39 for k in range(40)]
    return [{"at_s": float(second), "host_gib": gib, "device_gib": 1.0} for second, gib in enumerate(sizes)]


def test_a_good_run_has_nothing_against_it():
    assert complaints(seen(), STATE, used_tokens=0, on_gpu=False) == []
    assert complaints(seen(memory=grown(1.02)), STATE, used_tokens=0, on_gpu=False) == []


@pytest.mark.parametrize(
    ("changes", "state", "used_tokens", "said"),
    [
        ({"wrong": [(3, 17), (4, 0)]}, {}, 0, "2 answers differ, the first (prompt 3) from token 17 on"),
        ({}, {"faults": 1, "faults_by_kind": {"policy": 1}}, 0, "faults: {'policy': 1}"),
        ({}, {}, 7, "7 KV slots are lost"),
        ({"memory": grown(2 * MOST_GROWTH)}, {}, 0, "host_gib grew"),
        ({"answers": 0}, {}, 0, "too little happened"),
        ({}, {"steps": {"spec": 900, "plain": 3}}, 0, "too little happened"),
        ({}, {"switches": 3}, 0, "too little happened"),
    ],
)
def test_what_is_wrong_is_said(changes, state, used_tokens, said):
    (found,) = complaints(seen(**changes), STATE | state, used_tokens, on_gpu=False)
    assert said in found


def test_in_bf16_a_few_answers_may_differ():
    few = seen(wrong=[(3, 17)] * 50)
    assert complaints(few, STATE, used_tokens=0, on_gpu=True) == []
    assert "50 answers differ" in complaints(few, STATE, used_tokens=0, on_gpu=False)[0]
    many = seen(wrong=[(3, 17)] * 51)
    assert "51 answers differ" in complaints(many, STATE, used_tokens=0, on_gpu=True)[0]


def test_no_policy_asks_for_more_than_the_speculative_graphs_hold():
    drawn = [any_policy(random.Random(seed)) for seed in range(200)]
    thresholds = {settings["disable_batch_threshold"] for settings in drawn if "policy" not in settings}
    assert max(thresholds) == THRESHOLD
    assert {settings.get("policy") for settings in drawn} == {"spec", "plain", "alternate", None}


def test_pytests_outcomes_are_kept(tmp_path: Path):
    junit = tmp_path / "junit.xml"
    junit.write_text(
        '<testsuites><testsuite hostname="somewhere"><testcase classname="a" name="fine" time="1.5"/>'
        '<testcase classname="a" name="not" time="2.0"><failure message="no">why</failure></testcase>'
        "</testsuite></testsuites>"
    )
    row = outcomes(junit)
    assert row["seconds"] == {"a::fine": 1.5, "a::not": 2.0}
    assert row["complaints"] == ["a::not did not pass"]

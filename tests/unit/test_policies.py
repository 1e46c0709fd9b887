from itertools import groupby

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies import (
    AlternatePolicy,
    FixedPolicy,
    Observation,
    Policy,
    ThresholdPolicy,
    make_policy,
)


def decisions(policy: Policy, loads) -> list[Decision]:
    """The decisions over a trace of running requests, the way a controller asks for them."""
    mode, steps_in_mode, made = policy.initial_mode, 0, []
    for running in loads:
        decision = policy.decide(Observation(running, mode, steps_in_mode))
        if decision.mode is not mode:
            mode, steps_in_mode = decision.mode, 0
        steps_in_mode += 1
        made.append(decision)
    return made


def modes(policy: Policy, loads) -> str:
    """The modes over a trace, one letter a step: s or p."""
    return "".join(decision.mode.value[0] for decision in decisions(policy, loads))


def switches(trace: str) -> int:
    return sum(1 for _ in groupby(trace)) - 1


# --- threshold -------------------------------------------------------------------------------------------


def test_a_steady_low_load_stays_speculative():
    assert modes(ThresholdPolicy(8, 6, 2), [5] * 20) == "s" * 20


def test_exactly_the_threshold_is_not_above_it():
    assert modes(ThresholdPolicy(8, 6, 2), [8] * 20) == "s" * 20


def test_a_steady_high_load_turns_plain_after_the_dwell_and_stays():
    assert modes(ThresholdPolicy(8, 6, 3), [9] * 10) == "sss" + "p" * 7


def test_a_ramp_turns_plain_above_the_threshold_and_speculative_at_the_resume_threshold():
    up, down = list(range(1, 13)), list(range(12, 0, -1))
    trace = modes(ThresholdPolicy(8, 6, 1), up + down)
    assert trace[: len(up)] == "s" * 8 + "p" * 4
    assert trace[len(up) :] == "p" * 6 + "s" * 6


@pytest.mark.parametrize("start", ["s", "p"])
def test_between_the_thresholds_the_mode_stays_as_it_is(start):
    lead = [1] * 5 if start == "s" else [20] * 5
    assert modes(ThresholdPolicy(8, 6, 1), lead + [7] * 20)[5:] == start * 20


def test_a_burst_shorter_than_the_dwell_left_goes_unnoticed():
    assert modes(ThresholdPolicy(8, 6, 4), [20, 20, 20, 1, 1, 1]) == "s" * 6


def test_a_long_burst_is_plain_for_its_length():
    assert modes(ThresholdPolicy(8, 6, 2), [1] * 5 + [20] * 6 + [1] * 5) == "s" * 5 + "p" * 6 + "s" * 5


def test_noise_around_one_threshold_never_flips_back():
    """The gap between the thresholds takes it up: 9 turns plain, 7 is not low enough to return."""
    assert switches(modes(ThresholdPolicy(8, 6, 1), [9, 7, 8] * 50)) == 1


@pytest.mark.parametrize("dwell", [1, 2, 5, 16])
def test_dwell_bounds_the_switches_of_a_load_that_jumps_across_both(dwell):
    steps = 160
    trace = modes(ThresholdPolicy(8, 6, dwell), [9, 1] * (steps // 2))
    assert 1 <= switches(trace) <= steps // dwell


def test_a_threshold_of_one_speculates_for_a_lone_request_only():
    assert modes(make_policy(Settings(disable_batch_threshold=1, min_dwell_steps=1)), [1, 1, 2, 3, 1]) == "sspps"


@pytest.mark.parametrize(
    ("running", "mode", "steps", "expected", "reason"),
    [
        (9, Mode.SPEC, 4, Mode.PLAIN, Reason.LOAD_ROSE),
        (9, Mode.SPEC, 3, Mode.SPEC, Reason.DWELL),
        (6, Mode.PLAIN, 4, Mode.SPEC, Reason.LOAD_FELL),
        (6, Mode.PLAIN, 3, Mode.PLAIN, Reason.DWELL),
        (7, Mode.SPEC, 9, Mode.SPEC, Reason.STEADY),
        (7, Mode.PLAIN, 9, Mode.PLAIN, Reason.STEADY),
    ],
)
def test_each_decision_says_why(running, mode, steps, expected, reason):
    assert ThresholdPolicy(8, 6, 4).decide(Observation(running, mode, steps)) == Decision(expected, reason)


@st.composite
def threshold_traces(draw):
    disable = draw(st.integers(1, 40))
    resume = draw(st.integers(1, max(1, disable - 1)))
    dwell = draw(st.integers(1, 12))
    load = st.integers(0, 60)
    # Runs of one load, so that modes have the time to settle.
    runs = draw(st.lists(st.tuples(load, st.integers(1, 20)), max_size=30))
    loads = [running for running, length in runs for _ in range(length)]
    return ThresholdPolicy(disable, resume, dwell), loads


@given(threshold_traces())
def test_no_mode_ends_before_its_dwell(case):
    policy, loads = case
    lengths = [len(list(run)) for _, run in groupby(modes(policy, loads))]
    assert all(length >= policy.min_dwell_steps for length in lengths[:-1])


@given(threshold_traces())
def test_after_a_dwell_above_the_threshold_the_mode_is_plain(case):
    policy, loads = case
    trace = modes(policy, loads)
    for step in range(policy.min_dwell_steps, len(loads)):
        if min(loads[step - policy.min_dwell_steps : step + 1]) > policy.disable_above_requests:
            assert trace[step] == "p"


@given(threshold_traces())
def test_after_a_dwell_at_or_below_the_resume_threshold_the_mode_is_spec(case):
    policy, loads = case
    trace = modes(policy, loads)
    for step in range(policy.min_dwell_steps, len(loads)):
        if max(loads[step - policy.min_dwell_steps : step + 1]) <= policy.resume_at_requests:
            assert trace[step] == "s"


# --- fixed and alternate ---------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", Mode)
def test_a_fixed_policy_never_leaves_its_mode(mode):
    made = decisions(FixedPolicy(mode), [0, 1, 500, 1, 500])
    assert made == [Decision(mode, Reason.FIXED)] * 5


@pytest.mark.parametrize(("period", "expected"), [(1, "spspspsp"), (2, "ssppsspp"), (3, "sssp" + "ppss")])
def test_alternate_flips_every_period_whatever_the_load(period, expected):
    assert modes(AlternatePolicy(period), [1, 90] * 4) == expected


def test_alternate_calls_its_flips_forced():
    assert decisions(AlternatePolicy(1), [1, 1])[1] == Decision(Mode.PLAIN, Reason.FORCED)


# --- what the engine asks of a policy --------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "kind", "needs_plain", "returns_to_spec", "initial"),
    [
        (Settings(disable_batch_threshold=8), ThresholdPolicy, True, True, Mode.SPEC),
        (Settings(policy="alternate"), AlternatePolicy, True, True, Mode.SPEC),
        (Settings(policy="plain"), FixedPolicy, True, False, Mode.PLAIN),
        (Settings(policy="spec"), FixedPolicy, False, False, Mode.SPEC),
    ],
    ids=lambda value: value.policy if isinstance(value, Settings) else "",
)
def test_a_policy_says_what_has_to_be_built_for_it(settings, kind, needs_plain, returns_to_spec, initial):
    policy = make_policy(settings)
    assert isinstance(policy, kind)
    assert policy.needs_plain is needs_plain
    assert policy.returns_to_spec is returns_to_spec
    assert policy.initial_mode is initial


def test_the_settings_reach_the_threshold_policy():
    settings = Settings(disable_batch_threshold=32, resume_batch_threshold=5, min_dwell_steps=3)
    assert make_policy(settings) == ThresholdPolicy(32, 5, 3)


def test_the_period_reaches_the_alternate_policy():
    assert make_policy(Settings(policy="alternate", alternate_period_steps=7)) == AlternatePolicy(7)

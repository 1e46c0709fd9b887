import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_adaptive_spec.costs import BLOCK_STEPS, StepCosts
from sglang_adaptive_spec.modes import Mode

SPEC, PLAIN = Mode.SPEC, Mode.PLAIN
GRAPHS = {SPEC: (1, 2, 4, 8, 16), PLAIN: (1, 2, 4, 8, 16, 32)}
NO_TIMES = [math.nan, math.inf, -math.inf, 0.0, -1.0, 1e9]


def served(costs: StepCosts, mode: Mode, requests: int, context_tokens: int, seconds: float, blocks: int = 20) -> None:
    for _ in range(blocks * BLOCK_STEPS):
        costs.observe(mode, requests, context_tokens, seconds)


# --- buckets and classes ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "requests", "bucket"),
    [(SPEC, 1, 1), (SPEC, 3, 4), (SPEC, 9, 16), (SPEC, 16, 16), (SPEC, 17, 32), (PLAIN, 17, 32), (PLAIN, 33, 64)],
)
def test_a_batch_is_padded_to_its_graph_or_to_a_power_of_two(mode, requests, bucket):
    assert StepCosts(GRAPHS).bucket(mode, requests) == bucket


@pytest.mark.parametrize(("requests", "bucket"), [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128)])
def test_without_graphs_buckets_are_powers_of_two(requests, bucket):
    assert StepCosts().bucket(SPEC, requests) == bucket


@pytest.mark.parametrize(
    ("tokens", "context"), [(-1, 0), (0, 0), (511, 0), (512, 1), (1023, 1), (1024, 2), (131072, 9)]
)
def test_context_classes_double(tokens, context):
    assert StepCosts.context_class(tokens) == context


# --- what is measured ------------------------------------------------------------------------------------


def test_nothing_measured_is_nothing_known():
    costs = StepCosts(GRAPHS)
    assert costs.seconds(SPEC, 4, 300) is None
    costs.seed(SPEC, 4, 300, 0.01)
    assert costs.seconds(PLAIN, 4, 300) is None


def test_a_start_up_measurement_holds_for_its_bucket():
    costs = StepCosts(GRAPHS)
    costs.seed(SPEC, 8, 300, 0.01)
    assert costs.seconds(SPEC, 5, 100) == 0.01
    assert costs.estimate(SPEC, 5, 100).source == "start-up"


def test_serving_corrects_the_start_up_measurement():
    costs = StepCosts(GRAPHS)
    costs.seed(SPEC, 8, 300, 0.010)
    served(costs, SPEC, 8, 300, 0.014)
    assert costs.seconds(SPEC, 8, 300) == pytest.approx(0.014, rel=0.01)
    assert costs.estimate(SPEC, 8, 300).source == "served"


def test_one_block_moves_a_known_time_by_a_part_only():
    costs = StepCosts(GRAPHS)
    served(costs, SPEC, 8, 300, 0.010)
    served(costs, SPEC, 8, 300, 0.012, blocks=1)
    assert 0.010 < costs.seconds(SPEC, 8, 300) < 0.011


def test_a_lasting_change_is_followed():
    costs = StepCosts(GRAPHS)
    served(costs, SPEC, 8, 300, 0.010)
    served(costs, SPEC, 8, 300, 0.030, blocks=12)
    assert costs.seconds(SPEC, 8, 300) == pytest.approx(0.030, rel=0.05)


def test_a_step_in_thirty_two_that_is_longer_is_part_of_the_price():
    """The draft's catch-up: a median alone would never see it."""
    costs = StepCosts(GRAPHS)
    for step in range(32 * 40):
        costs.observe(PLAIN, 8, 300, 0.0074 if step % 32 == 0 else 0.005)
    assert costs.seconds(PLAIN, 8, 300) == pytest.approx(0.005 * (1 + 0.48 / 32), rel=0.01)


@pytest.mark.parametrize("seconds", NO_TIMES)
def test_what_is_no_time_changes_nothing(seconds):
    costs = StepCosts(GRAPHS)
    served(costs, SPEC, 8, 300, 0.010)
    version = costs.version
    served(costs, SPEC, 8, 300, seconds)
    costs.seed(SPEC, 8, 300, seconds)
    assert (costs.seconds(SPEC, 8, 300), costs.version) == (0.010, version)


@pytest.mark.parametrize("no_time", NO_TIMES)
def test_what_is_no_time_amid_others_is_left_out_alone(no_time):
    costs = StepCosts(GRAPHS)
    costs.observe(SPEC, 8, 300, *[0.010] * 4, no_time, *[0.010] * 3)
    assert costs.seconds(SPEC, 8, 300) is None
    costs.observe(SPEC, 8, 300, 0.010)
    assert costs.seconds(SPEC, 8, 300) == 0.010
    assert costs.blocks == {SPEC: 1, PLAIN: 0}


@given(st.lists(st.sampled_from([*NO_TIMES, 1e-9, 1e-4, 0.3, 50.0]), min_size=1, max_size=3), st.integers(0, 7))
def test_no_few_samples_matter(odd, after):
    costs = StepCosts(GRAPHS)
    served(costs, SPEC, 8, 300, 0.010)
    served(costs, SPEC, 8, 300, 0.010, blocks=1)
    for _ in range(after):
        costs.observe(SPEC, 8, 300, 0.010)
    for seconds in odd:
        costs.observe(SPEC, 8, 300, seconds)
    served(costs, SPEC, 8, 300, 0.010, blocks=1)
    assert costs.seconds(SPEC, 8, 300) == pytest.approx(0.010, rel=0.05)


# --- what is derived -------------------------------------------------------------------------------------


def test_between_two_buckets_a_time_is_interpolated():
    costs = StepCosts(GRAPHS)
    costs.seed(PLAIN, 8, 300, 0.006)
    costs.seed(PLAIN, 32, 300, 0.012)
    assert costs.seconds(PLAIN, 16, 300) == pytest.approx(0.008)
    assert costs.estimate(PLAIN, 16, 300).source == "derived"


def test_beyond_what_was_measured_the_other_mode_tells_how_a_time_grows():
    costs = StepCosts(GRAPHS)
    costs.seed(PLAIN, 8, 300, 0.005)
    costs.seed(SPEC, 8, 300, 0.008)
    costs.seed(SPEC, 16, 300, 0.010)
    assert costs.seconds(PLAIN, 16, 300) == pytest.approx(0.007)
    assert costs.estimate(PLAIN, 16, 300).doubt == math.inf


def test_a_longer_context_adds_as_much_to_both_modes():
    """Verifying reads the KV cache once, as a plain step does."""
    costs = StepCosts(GRAPHS)
    for requests in (1, 8, 16):
        costs.seed(PLAIN, requests, 300, 0.005)
        costs.seed(SPEC, requests, 300, 0.008)
    served(costs, SPEC, 8, 9000, 0.020)
    assert costs.seconds(PLAIN, 8, 9000) == pytest.approx(0.017)


def test_a_context_class_that_neither_mode_knows_is_the_nearest_one_for_both():
    costs = StepCosts(GRAPHS)
    costs.seed(PLAIN, 8, 300, 0.005)
    costs.seed(SPEC, 8, 300, 0.008)
    assert {mode: costs.seconds(mode, 8, 40_000) for mode in Mode} == {PLAIN: 0.005, SPEC: 0.008}


def test_beyond_the_contexts_of_one_mode_both_grow_as_that_one_shows():
    costs = StepCosts(GRAPHS)
    costs.seed(PLAIN, 8, 300, 0.005)
    costs.seed(SPEC, 8, 300, 0.008)
    served(costs, SPEC, 8, 9000, 0.020)
    spec, plain = (costs.seconds(mode, 8, 40_000) for mode in (SPEC, PLAIN))
    assert spec > 0.020
    assert spec - plain == pytest.approx(0.003)


@pytest.mark.parametrize(("tokens", "ms"), [(256, 5.0), (768, 5.5), (1536, 6.25), (3072, 7.75), (12_288, 16.75)])
def test_between_and_beyond_two_context_lengths_a_time_lies_on_their_line(tokens, ms):
    """Attention reads the whole KV cache."""
    costs = StepCosts(GRAPHS)
    for requests in (1, 16):
        costs.seed(PLAIN, requests, 256, 0.005)
        costs.seed(PLAIN, requests, 3072, 0.00775)
    assert costs.seconds(PLAIN, 8, tokens) == pytest.approx(ms * 1e-3)


def test_a_longer_context_is_never_guessed_to_be_quicker():
    costs = StepCosts(GRAPHS)
    costs.seed(PLAIN, 8, 256, 0.005)
    costs.seed(PLAIN, 8, 3072, 0.004)
    assert costs.seconds(PLAIN, 8, 12_000) == 0.004


def test_what_serving_adds_to_one_bucket_it_adds_to_the_others():
    costs = StepCosts(GRAPHS)
    for requests in (8, 16):
        costs.seed(SPEC, requests, 300, 0.010)
    served(costs, SPEC, 8, 300, 0.012)
    assert costs.seconds(SPEC, 16, 300) == pytest.approx(0.012, rel=0.01)


def test_while_one_mode_has_not_served_start_up_says_how_they_compare():
    costs = StepCosts(GRAPHS)
    costs.seed(SPEC, 8, 300, 0.010)
    costs.seed(PLAIN, 8, 300, 0.005)
    served(costs, SPEC, 8, 300, 0.012)
    assert costs.seconds(PLAIN, 8, 300) == pytest.approx(0.006, rel=0.01)
    served(costs, PLAIN, 8, 300, 0.005)
    served(costs, SPEC, 8, 300, 0.014)
    assert costs.seconds(PLAIN, 8, 300) == pytest.approx(0.005, rel=0.02)


def test_doubt_falls_from_derived_over_start_up_to_served():
    costs = StepCosts(GRAPHS)
    costs.seed(SPEC, 8, 300, 0.010)
    costs.seed(SPEC, 2, 300, 0.010)
    served(costs, SPEC, 2, 300, 0.010)
    doubts = [costs.estimate(SPEC, requests, 300).doubt for requests in (16, 4, 8, 2)]
    assert doubts == sorted(doubts, reverse=True)
    assert len(set(doubts)) == 4


def test_doubt_grows_while_a_time_is_not_measured_again():
    costs = StepCosts(GRAPHS)
    served(costs, PLAIN, 8, 300, 0.005)
    before = costs.estimate(PLAIN, 8, 300).doubt
    served(costs, SPEC, 8, 300, 0.005, blocks=4000)
    assert costs.estimate(PLAIN, 8, 300).doubt > before


def test_what_the_other_mode_shows_makes_no_time_negative():
    costs = StepCosts(GRAPHS)
    served(costs, SPEC, 1, 0, 0.1)
    served(costs, SPEC, 2, 0, 1.0)
    served(costs, PLAIN, 2, 0, 0.25)
    # On its own scale a lone request would take 0.9 s less than two.
    assert costs.seconds(PLAIN, 1, 0) == 0.125


@given(
    st.lists(
        st.tuples(
            st.booleans(),
            st.sampled_from(list(Mode)),
            st.integers(1, 40),
            st.integers(0, 20_000),
            st.floats(1e-4, 1.0),
        ),
        max_size=60,
    ),
    st.sampled_from(list(Mode)),
    st.integers(1, 300),
    st.integers(0, 200_000),
)
def test_whatever_was_measured_a_time_is_positive_and_finite(measured, mode, requests, context_tokens):
    costs = StepCosts(GRAPHS)
    for is_seed, of, size, tokens, seconds in measured:
        if is_seed:
            costs.seed(of, size, tokens, seconds)
        else:
            served(costs, of, size, tokens, seconds, blocks=1)
    seconds = costs.seconds(mode, requests, context_tokens)
    assert (seconds is None) is all(of is not mode for _, of, *_ in measured)
    assert seconds is None or 0 < seconds < math.inf


# --- tables and files ------------------------------------------------------------------------------------


def test_the_table_says_what_was_measured_where():
    costs = StepCosts(GRAPHS)
    costs.seed(SPEC, 8, 1500, 0.010)
    costs.observe(PLAIN, 8, 300, 0.005)
    served(costs, SPEC, 8, 1500, 0.012)
    (row,) = json.loads(json.dumps(costs.table()))
    assert (row["mode"], row["requests"], row["context_tokens"]) == ("spec", 8, 1024)
    assert row["start_up_seconds"] == 0.010
    assert row["served_seconds"] == row["seconds"] == pytest.approx(0.012, rel=0.01)
    assert row["served_steps"] == 160


def test_what_is_saved_seeds_the_next_start():
    costs = StepCosts(GRAPHS)
    for mode in Mode:
        costs.seed(mode, 8, 300, 0.010)
        costs.seed(mode, 16, 9000, 0.020)
    served(costs, SPEC, 8, 300, 0.012)
    again = StepCosts.from_json(json.loads(json.dumps(costs.to_json())), GRAPHS)
    for mode in Mode:
        for requests, tokens in ((8, 300), (16, 9000)):
            assert again.seconds(mode, requests, tokens) == pytest.approx(costs.seconds(mode, requests, tokens))
    assert again.estimate(SPEC, 8, 300).source == "start-up"


@pytest.mark.parametrize(
    "saved",
    [
        {},
        {"steps": 3},
        {"steps": [{}]},
        {"steps": [{"mode": "both", "requests": 1, "context_tokens": 0, "seconds": 0.1}]},
        {"steps": [{"mode": "spec", "requests": 0, "context_tokens": 0, "seconds": 0.1}]},
        {"steps": [{"mode": "spec", "requests": 1, "context_tokens": 0, "seconds": math.nan}]},
        {"steps": [{"mode": "spec", "requests": "1", "context_tokens": 0, "seconds": 0.1}]},
        [],
    ],
)
def test_what_is_no_table_is_refused(saved):
    with pytest.raises(ValueError, match=r"step time|Mode"):
        StepCosts.from_json(saved)

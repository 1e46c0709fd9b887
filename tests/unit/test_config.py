import json

import pytest

from sglang_adaptive_spec.config import (
    CONFIG_VARIABLE,
    DEFAULT_MIN_DWELL_STEPS,
    FLAGS,
    POLICIES,
    Settings,
    read_config_variable,
    write_config_variable,
)
from sglang_adaptive_spec.errors import Refusal

COUNTS = ("disable_batch_threshold", "resume_batch_threshold", "min_dwell_steps", "alternate_period_steps")


def refusal_of(**values) -> Refusal:
    with pytest.raises(Refusal) as caught:
        Settings.from_mapping(values)
    return caught.value


# --- values ----------------------------------------------------------------------------------------------


def test_a_threshold_alone_is_enough():
    settings = Settings(disable_batch_threshold=32)
    assert settings.policy == "threshold"
    assert settings.threshold_requests == 32
    assert settings.min_dwell_steps == DEFAULT_MIN_DWELL_STEPS


def test_without_a_threshold_the_policy_measures():
    assert Settings().policy == "auto"
    assert Settings() == Settings(policy="auto")


@pytest.mark.parametrize("policy", ["auto", "spec", "plain", "alternate"])
def test_other_policies_need_no_threshold(policy):
    assert Settings(policy=policy).disable_batch_threshold is None


@pytest.mark.parametrize(("disable", "resume"), [(1, 1), (2, 1), (3, 2), (4, 3), (8, 6), (32, 24), (100, 75)])
def test_resume_defaults_to_three_quarters_and_never_below_one(disable, resume):
    assert Settings(disable_batch_threshold=disable).resume_threshold_requests == resume


def test_the_default_resume_threshold_leaves_a_gap():
    for disable in range(2, 200):
        assert 1 <= Settings(disable_batch_threshold=disable).resume_threshold_requests < disable


def test_a_given_resume_threshold_holds():
    assert Settings(disable_batch_threshold=32, resume_batch_threshold=5).resume_threshold_requests == 5


def test_a_threshold_of_one_may_resume_at_one():
    assert Settings(disable_batch_threshold=1, resume_batch_threshold=1).resume_threshold_requests == 1


# --- refusals --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", COUNTS)
@pytest.mark.parametrize("value", [0, -1, True, False, 2.0, "4", [4]], ids=repr)
def test_a_count_is_a_whole_number_of_one_or_more(name, value):
    refusal = refusal_of(**{"disable_batch_threshold": 8, name: value})
    assert f"{FLAGS.get(name, name)} ({name} in JSON) is {value!r}" in refusal.what
    assert "a whole number, 1 or more" in refusal.why
    assert CONFIG_VARIABLE in refusal.remedy


@pytest.mark.parametrize("policy", ["", "Threshold", "adaptive", None, 3, ["spec"]], ids=repr)
def test_an_unknown_policy_is_refused_with_the_known_ones(policy):
    refusal = refusal_of(policy=policy, disable_batch_threshold=8)
    assert repr(policy) in refusal.what
    assert all(known in refusal.why for known in POLICIES)


@pytest.mark.parametrize("values", [{"policy": "threshold"}, {"resume_batch_threshold": 4}], ids=str)
def test_no_threshold_is_refused_with_the_ways_out(values):
    refusal = refusal_of(**values)
    assert "No batch threshold was given" in refusal.what
    assert "no number is right" in refusal.why
    assert "--speculative-disable-batch-threshold N" in refusal.remedy
    assert "'auto', which measures" in refusal.remedy


@pytest.mark.parametrize(("disable", "resume"), [(8, 8), (8, 9), (2, 2), (1, 2)])
def test_a_resume_threshold_has_to_be_below_the_disable_threshold(disable, resume):
    refusal = refusal_of(disable_batch_threshold=disable, resume_batch_threshold=resume)
    assert f"({resume})" in refusal.what
    assert f"({disable})" in refusal.what
    assert "flip" in refusal.why
    assert "--adaptive-spec-resume-batch-threshold" in refusal.remedy


@pytest.mark.parametrize("policy", ["auto", "spec", "plain", "alternate"])
@pytest.mark.parametrize("name", ["disable_batch_threshold", "resume_batch_threshold"])
def test_a_threshold_that_the_policy_would_ignore_is_refused(policy, name):
    refusal = refusal_of(policy=policy, **{name: 4})
    assert repr(policy) in refusal.what
    assert "ignored" in refusal.why
    assert "--adaptive-spec-policy threshold" in refusal.remedy


def test_unknown_names_are_all_named_beside_the_known_ones():
    refusal = refusal_of(disable_batch_threshold=8, treshold=3, dwell=2)
    assert "'dwell', 'treshold'" in refusal.what
    assert "nobody reads" in refusal.why
    assert "disable_batch_threshold" in refusal.remedy
    assert "min_dwell_steps" in refusal.remedy


# --- JSON ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "settings",
    [
        Settings(disable_batch_threshold=32),
        Settings(disable_batch_threshold=32, resume_batch_threshold=4, min_dwell_steps=3),
        Settings(),
        Settings(dry_run=True, costs="costs.json", measure_seconds=3),
        Settings(disable_batch_threshold=32, dry_run=True),
        Settings(policy="spec"),
        Settings(policy="plain", min_dwell_steps=1),
        Settings(policy="alternate", alternate_period_steps=7),
    ],
    ids=lambda settings: settings.to_json(),
)
def test_settings_survive_the_environment(settings):
    write_config_variable(settings)
    assert Settings.from_mapping(read_config_variable()) == settings


def test_json_leaves_defaults_out():
    settings = Settings(disable_batch_threshold=32, min_dwell_steps=DEFAULT_MIN_DWELL_STEPS)
    assert json.loads(settings.to_json()) == {"disable_batch_threshold": 32}


@pytest.mark.parametrize("text", [None, "", "  \n"], ids=repr)
def test_an_empty_variable_counts_as_no_settings(text, monkeypatch):
    if text is not None:
        monkeypatch.setenv(CONFIG_VARIABLE, text)
    assert read_config_variable() is None


@pytest.mark.parametrize("text", ["{", "disable_batch_threshold=32", "[1]", "32", '"spec"', "null"])
def test_what_is_no_json_object_is_refused_and_quoted(text, monkeypatch):
    monkeypatch.setenv(CONFIG_VARIABLE, text)
    with pytest.raises(Refusal) as caught:
        read_config_variable()
    assert CONFIG_VARIABLE in caught.value.what
    assert repr(text) in caught.value.what
    assert caught.value.why
    assert '{"disable_batch_threshold": 32}' in caught.value.remedy


@pytest.mark.parametrize("name", ["min_dwell_steps", "alternate_period_steps"])
def test_a_count_that_has_a_default_is_never_none(name):
    assert refusal_of(disable_batch_threshold=8, **{name: None})


# --- changes on a running server -------------------------------------------------------------------------

RUNNING = Settings(disable_batch_threshold=32, resume_batch_threshold=8, min_dwell_steps=20)


def test_what_a_change_does_not_mention_stays():
    assert RUNNING.with_changes({"disable_batch_threshold": 64}) == Settings(
        disable_batch_threshold=64, resume_batch_threshold=8, min_dwell_steps=20
    )
    assert RUNNING.with_changes({"resume_batch_threshold": 2}).threshold_requests == 32


def test_a_held_server_needs_nothing_else_and_goes_back():
    assert RUNNING.with_changes({"policy": "plain"}).policy == "plain"
    assert RUNNING.with_changes({"policy": "threshold"}) == RUNNING


@pytest.mark.parametrize("asked", [{"disable_batch_threshold": 8}, {"catch_up_tokens": 4}, {"threshold": 3}], ids=repr)
def test_a_change_that_makes_no_settings_is_refused(asked):
    with pytest.raises(Refusal):
        RUNNING.with_changes(asked)


def test_effective_settings_have_the_derived_ones_filled_in():
    assert Settings(disable_batch_threshold=8).effective() == {
        "policy": "threshold",
        "disable_batch_threshold": 8,
        "resume_batch_threshold": 6,
        "min_dwell_steps": 8,
        "catch_up_tokens": 32,
        "dry_run": False,
    }


def test_effective_settings_of_the_policy_that_measures():
    effective = Settings().effective()
    assert effective["policy"] == "auto"
    assert effective["measure_seconds"] == 6
    assert effective["costs"] is None


# --- dry run and step times ------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["spec", "plain"])
def test_a_dry_run_of_a_fixed_policy_is_refused(policy):
    refusal = refusal_of(policy=policy, dry_run=True)
    assert "nothing to report" in refusal.why


@pytest.mark.parametrize("value", [1, "yes", None], ids=repr)
def test_a_dry_run_is_true_or_false(value):
    assert "true or false" in refusal_of(dry_run=value).why


@pytest.mark.parametrize("values", [{"policy": "plain"}, {"disable_batch_threshold": 8}], ids=str)
def test_step_times_that_the_policy_would_ignore_are_refused(values):
    refusal = refusal_of(costs="costs.json", **values)
    assert "ignored" in refusal.why
    assert "--adaptive-spec-costs" in refusal.remedy


def test_the_name_of_a_file_is_text():
    assert "the name of a file" in refusal_of(costs=3).why


def test_a_server_that_measures_may_be_held_and_goes_back():
    measuring = Settings(min_dwell_steps=3)
    assert measuring.with_changes({"policy": "plain"}).policy == "plain"
    assert measuring.with_changes({"policy": "auto"}) == measuring
    assert measuring.with_changes({"min_dwell_steps": 5}) == Settings(min_dwell_steps=5)
    by_load = measuring.with_changes({"disable_batch_threshold": 8})
    assert (by_load.policy, by_load.threshold_requests) == ("threshold", 8)
    assert by_load.with_changes({"policy": "auto"}) == measuring


@pytest.mark.parametrize("asked", [{"costs": "other.json"}, {"measure_seconds": 9}], ids=str)
def test_what_is_read_at_start_can_not_change_later(asked):
    with pytest.raises(Refusal, match="can't change on a running server"):
        Settings().with_changes(asked)


def test_a_dry_run_may_be_ended_and_begun():
    assert not Settings(dry_run=True).with_changes({"dry_run": False}).dry_run
    assert Settings(disable_batch_threshold=4).with_changes({"dry_run": True}).dry_run
    assert Settings(dry_run=True).with_changes({"disable_batch_threshold": 4}).dry_run

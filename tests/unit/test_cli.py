import argparse
import json
import os

import pytest

from sglang_adaptive_spec.cli import add_flags, carry_flags
from sglang_adaptive_spec.config import CONFIG_VARIABLE, Settings, read_config_variable
from sglang_adaptive_spec.errors import Refusal

N = "--speculative-disable-batch-threshold"
M = "--adaptive-spec-resume-batch-threshold"
POLICY = "--adaptive-spec-policy"
DWELL = "--adaptive-spec-min-dwell-steps"


def parse(*flags: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="server")
    parser.add_argument("--speculative-num-steps", type=int)  # one of SGLang's own
    add_flags(parser)
    return parser.parse_args(flags)


def carried(*flags: str) -> Settings | None:
    carry_flags(parse(*flags))
    values = read_config_variable()
    return None if values is None else Settings.from_mapping(values)


def test_flags_not_given_are_none():
    ours = {name: value for name, value in vars(parse()).items() if name != "speculative_num_steps"}
    assert len(ours) == 7
    assert set(ours.values()) == {None}


def test_without_flags_nothing_is_carried():
    assert carried("--speculative-num-steps", "3") is None
    assert CONFIG_VARIABLE not in os.environ


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ((N, "32"), Settings(disable_batch_threshold=32)),
        ((POLICY, "threshold", N, "32"), Settings(disable_batch_threshold=32)),
        ((POLICY, "plain"), Settings(policy="plain")),
        ((POLICY, "auto"), Settings()),
        (("--adaptive-spec-dry-run",), Settings(dry_run=True)),
        (("--adaptive-spec-costs", "costs.json"), Settings(costs="costs.json")),
        ((POLICY, "spec", DWELL, "2"), Settings(policy="spec", min_dwell_steps=2)),
        (
            (N, "32", M, "5", DWELL, "3"),
            Settings(disable_batch_threshold=32, resume_batch_threshold=5, min_dwell_steps=3),
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_flags_become_settings_in_the_environment(flags, settings):
    assert carried(*flags) == settings


def test_a_settings_of_defaults_alone_is_still_carried():
    """An explicit flag must not read as "no settings" in a child process."""
    carry_flags(parse(N, "32", DWELL, "8"))
    assert json.loads(os.environ[CONFIG_VARIABLE]) == {"disable_batch_threshold": 32}


@pytest.mark.parametrize(
    "flags",
    [(N, "many"), (N, "2.5"), (M, ""), (DWELL, "x"), (POLICY, "fast"), (POLICY, "alternate"), (POLICY,)],
    ids=" ".join,
)
def test_the_parser_turns_away_what_is_no_value_and_names_the_flag(flags, capsys):
    with pytest.raises(SystemExit) as ended:
        parse(*flags)
    assert ended.value.code == 2
    assert f"argument {flags[0]}: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "flags",
    [
        (N, "0"),
        (N, "-4"),
        (N, "8", M, "8"),
        (N, "8", M, "0"),
        (N, "8", DWELL, "0"),
        (POLICY, "plain", N, "8"),
        (M, "3"),
    ],
    ids=" ".join,
)
def test_flags_that_make_no_settings_are_refused_and_not_carried(flags):
    with pytest.raises(Refusal):
        carry_flags(parse(*flags))
    assert CONFIG_VARIABLE not in os.environ


def test_the_same_flags_may_be_parsed_twice_in_one_process():
    for _ in range(2):
        carry_flags(parse(N, "8"))
    assert carried() == Settings(disable_batch_threshold=8)


def test_flags_and_variable_that_differ_are_refused(monkeypatch):
    text = '{"disable_batch_threshold": 64}'
    monkeypatch.setenv(CONFIG_VARIABLE, text)
    with pytest.raises(Refusal) as caught:
        carry_flags(parse(N, "32"))
    assert CONFIG_VARIABLE in caught.value.what
    assert "which of the two" in caught.value.why
    assert f"Unset {CONFIG_VARIABLE}, or drop the flags" in caught.value.remedy
    assert os.environ[CONFIG_VARIABLE] == text


def test_the_variable_alone_stays_as_it_is(monkeypatch):
    monkeypatch.setenv(CONFIG_VARIABLE, '{"policy": "plain"}')
    assert carried() == Settings(policy="plain")


def test_arguments_of_another_parser_carry_nothing():
    carry_flags(argparse.Namespace(speculative_num_steps=3))
    assert CONFIG_VARIABLE not in os.environ


def test_the_help_describes_each_flag(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert "sglang-adaptive-spec:" in text
    assert f"{N} N Decode plainly, without speculation, while more than N requests run." in text
    assert f"{M} M Speculate again once at most M requests run" in text
    assert f"{POLICY} {{auto,threshold,spec,plain}}" in text
    assert f"{DWELL} K Decode steps a mode lasts" in text

"""Without the environment variable an installed plugin is a stub; with it, every target is wrapped."""

from importlib.metadata import version

import pytest

from sglang_adaptive_spec.releases import lock

from .starts import ENABLE, THRESHOLD

STUB = ["sglang_adaptive_spec", "sglang_adaptive_spec.plugin"]
TARGETS = tuple(lock.read_lock(version("sglang")).targets)


@pytest.mark.parametrize("env", [{}, {ENABLE: ""}, {ENABLE: "0"}], ids=str)
def test_the_help_of_a_server_without_us_imports_the_stub_alone(probe, env):
    outcome = probe.start("--help", plugin="off", env=env)
    assert outcome.started
    assert outcome.facts["our_modules"] == STUB
    assert "adaptive-spec" not in outcome.stdout


def test_a_speculative_server_without_us_starts_and_imports_the_stub_alone(probe, eagle3):
    outcome = probe.start(*eagle3, plugin="off")
    assert outcome.started
    assert outcome.facts["our_modules"] == STUB
    assert outcome.facts["config"] is None
    assert "adaptive-spec" not in outcome.stdout + outcome.stderr


def test_without_us_our_flags_are_unknown(probe, eagle3):
    error = probe.start(*eagle3, *THRESHOLD, plugin="off").usage_error
    assert "unrecognized arguments: " + " ".join(THRESHOLD) in error


def test_without_us_nothing_is_wrapped(probe):
    outcome = probe.start(plugin="off", check_targets=TARGETS)
    assert outcome.facts["wrapped"] == dict.fromkeys(TARGETS, False)
    assert outcome.facts["our_modules"] == STUB


def test_with_us_every_target_is_wrapped(probe):
    outcome = probe.start(plugin="own", env={ENABLE: "1"}, check_targets=TARGETS)
    assert outcome.started
    assert outcome.facts["wrapped"] == dict.fromkeys(TARGETS, True)


def test_sglangs_own_adaptive_stays_dropped_without_speculation(probe, model):
    assert probe.start(*model, "--speculative-adaptive").facts["speculative_adaptive"] is False

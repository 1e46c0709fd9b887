"""The servers that are compared, and the proof that each ran as claimed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.modes import (
    MODES,
    Served,
    complaints_about_mode,
    complaints_about_outputs,
    verify_steps,
)
from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.releases.flashinfer_workspace import WORKSPACE_VARIABLE

OUTPUT_TOKENS = 128


def served(mode: str, plain: int = 0, spec: int = 0, **changes: Any) -> Served:
    """The state of a server that is what its mode says, except for the changes."""
    wanted = MODES[mode]
    state: dict[str, Any] = {
        "speculative_algorithm": "EAGLE3" if wanted.speculates else None,
        "speculative_adaptive": wanted.arguments.get("speculative_adaptive", False),
        "speculative_num_steps": 0 if mode == "upstream-zero" else 3,
    }
    if wanted.plugin is not None:
        policy = wanted.plugin["policy"]
        state["adaptive_spec"] = {"policy": policy, "faults": 0, "steps": {"plain": plain, "spec": spec}}
    return Served(state | changes)


def output(tokens: int = OUTPUT_TOKENS, verified: int = 0, **meta: Any) -> dict[str, Any]:
    found = {"completion_tokens": tokens, "finish_reason": {"type": "length"}, "cached_tokens": 0}
    return {"meta_info": found | ({"spec_verify_ct": verified} if verified else {}) | meta}


RIGHT = {
    "base": (0, 0, 0),
    "spec": (0, 0, 51),
    "ours-spec": (0, 52, 51),
    "ours-plain": (128, 0, 0),
    **{name: (126, 1, 1) for name in MODES if name.startswith("ours-threshold")},
    "ours-alternate": (90, 15, 15),
    "ours-auto": (70, 22, 22),
    "upstream-zero": (0, 0, 127),
    "upstream-adaptive": (0, 0, 60),
}


def complaints(mode: str, plain: int, spec: int, verified: int, **changes: Any) -> list[str]:
    before, after = served(mode, 1000, 500, **changes), served(mode, 1000 + plain, 500 + spec, **changes)
    return complaints_about_mode(MODES[mode], before, after, [output(verified=verified)], OUTPUT_TOKENS)


def test_every_mode_has_a_right_run() -> None:
    assert RIGHT.keys() == MODES.keys()


@pytest.mark.parametrize("mode", MODES)
def test_right_run_passes(mode: str) -> None:
    assert complaints(mode, *RIGHT[mode]) == []


@pytest.mark.parametrize(
    ("mode", "plain", "spec", "verified"),
    [
        ("base", 0, 0, 51),
        ("spec", 0, 0, 0),
        ("ours-spec", 1, 51, 51),
        ("ours-spec", 0, 0, 51),
        ("ours-spec", 0, 52, 0),
        ("ours-plain", 127, 1, 1),
        ("ours-plain", 126, 0, 0),
        ("ours-plain", 128, 0, 51),
        ("ours-threshold", 0, 52, 51),
        ("ours-threshold", 60, 30, 30),
        ("ours-alternate", 127, 0, 0),
        ("upstream-zero", 0, 0, 51),
        ("upstream-adaptive", 0, 0, 0),
    ],
)
def test_other_mode_is_noticed(mode: str, plain: int, spec: int, verified: int) -> None:
    assert complaints(mode, plain, spec, verified)


@pytest.mark.parametrize("mode", MODES)
def test_other_server_is_noticed(mode: str) -> None:
    right = RIGHT[mode]
    algorithm = None if MODES[mode].speculates else "EAGLE3"
    assert complaints(mode, *right, speculative_algorithm=algorithm)
    assert complaints(mode, *right, speculative_adaptive=not MODES[mode].arguments.get("speculative_adaptive", False))


def test_rejected_drafts_are_no_zero_step_tier() -> None:
    assert complaints("upstream-zero", *RIGHT["upstream-zero"], speculative_num_steps=3)


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.plugin is not None])
def test_inactive_or_faulty_plugin_is_noticed(mode: str) -> None:
    plain, spec, verified = RIGHT[mode]
    state = served(mode, plain, spec).plugin
    assert state is not None
    right = [output(verified=verified)]
    for changed in (None, {**state, "faults": 1}, {**state, "policy": "another"}):
        after = served(mode, adaptive_spec=changed)
        assert complaints_about_mode(MODES[mode], served(mode), after, right, OUTPUT_TOKENS)


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if mode.plugin is None])
def test_plugin_where_none_belongs_is_noticed(mode: str) -> None:
    plugin = {"policy": "spec", "faults": 0, "steps": {"plain": 0, "spec": 0}}
    assert complaints(mode, *RIGHT[mode], adaptive_spec=plugin)


def test_outputs_have_to_be_whole_and_uncached() -> None:
    assert complaints_about_outputs([output(), output()], OUTPUT_TOKENS) == []
    assert complaints_about_outputs([output(), output(tokens=127)], OUTPUT_TOKENS)
    assert complaints_about_outputs([output(finish_reason={"type": "abort"})], OUTPUT_TOKENS)
    assert complaints_about_outputs([output(cached_tokens=16)], OUTPUT_TOKENS)


def test_verify_steps_are_the_slowest_requests() -> None:
    assert verify_steps([output(verified=50), output(verified=52)]) == 52
    assert verify_steps([output()]) == 0


@pytest.mark.parametrize("mode", MODES.values(), ids=lambda mode: mode.name)
def test_environment_says_all_and_nothing_else(mode: Any) -> None:
    left_over = {
        "PATH": "/bin",
        "SGLANG_ADAPTIVE_SPEC": "1",
        "SGLANG_ADAPTIVE_SPEC_CONFIG": '{"policy": "alternate"}',
        "SGLANG_SIMULATE_ACC_LEN": "4",
    }
    env = mode.environment(left_over, 2.5, "fa3")
    assert env["PATH"] == "/bin"
    assert env.get("SGLANG_ADAPTIVE_SPEC") == (None if mode.plugin is None else "1")
    assert env.get("SGLANG_SIMULATE_ACC_LEN") == ("2.5" if mode.speculates else None)
    if mode.plugin is not None:
        # What the plugin itself would make of it: it refuses what it does not know.
        Settings.from_mapping(json.loads(env["SGLANG_ADAPTIVE_SPEC_CONFIG"]))
    assert "SGLANG_SIMULATE_ACC_LEN" not in mode.environment(left_over, None, "fa3")


@pytest.mark.parametrize(
    ("name", "backend", "given", "workspace"),
    [
        ("spec", "flashinfer", {}, str(2**30)),
        ("upstream-adaptive", "flashinfer", {}, str(2**30)),
        ("spec", "flashinfer", {WORKSPACE_VARIABLE: "1"}, "1"),
        ("spec", "fa3", {}, None),
        ("base", "flashinfer", {}, None),
        ("ours-spec", "flashinfer", {}, None),
        ("ours-auto", "flashinfer", {}, None),
    ],
)
def test_sglangs_own_speculation_gets_a_workspace_for_its_graphs(
    name: str, backend: str, given: dict[str, str], workspace: str | None
) -> None:
    assert MODES[name].environment(given, None, backend).get(WORKSPACE_VARIABLE) == workspace


def test_upstream_table_is_written(tmp_path: Path) -> None:
    arguments = MODES["upstream-zero"].engine_arguments(Path("draft"), tmp_path)
    table = json.loads(Path(arguments["speculative_adaptive_config"]).read_text())
    assert table["1"]["candidate_steps"] == [0]
    # SGLang insists that the initial steps are in the table.
    assert any(arguments["speculative_num_steps"] in entry["candidate_steps"] for entry in table.values())

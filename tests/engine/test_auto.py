"""The policy that measures, dry runs, saved step times, and several ranks."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load_file, save_file

from tests.engine.load import Request, differences, run_load
from tests.engine.serving import CHAIN, COMMON, DRAFT, FORK, SPECULATION, TARGET, Server, environment, serve
from tests.models.prompts import heldout_prompts

pytestmark = pytest.mark.engine

NO_LIMIT = [argument for argument in COMMON if "max-running-requests" not in argument]
LONG = {"max_new_tokens": 120, "ignore_eos": True}


@pytest.fixture(scope="module")
def poor_draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tests' draft with its vocabulary mixed up: next to nothing that it drafts is accepted."""
    folder = tmp_path_factory.mktemp("poor") / "draft"
    shutil.copytree(DRAFT, folder)
    weights = load_file(folder / "model.safetensors")
    weights["lm_head.weight"] = weights["lm_head.weight"].roll(37, dims=0).contiguous()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def costs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Step times as the command saves them."""
    folder = tmp_path_factory.mktemp("calibrate")
    command = [sys.executable, "-m", "sglang_adaptive_spec.calibrate", "--measure-seconds=4"]
    command += [f"--save={folder / 'costs.json'}", f"--png={folder / 'costs.png'}"]
    command += ["--model-path", str(TARGET), *COMMON, *SPECULATION, *CHAIN]
    done = subprocess.run(
        command, env=environment(FORK, plugin=False), capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-4000:]
    assert "breaks even at accept length" in done.stdout
    assert re.search(r"^ +1.2   .*$", done.stdout, re.MULTILINE)
    assert (folder / "costs.png").read_bytes().startswith(b"\x89PNG")
    return folder / "costs.json"


def test_without_a_threshold_the_server_finds_out_that_a_poor_draft_costs_more_than_it_gives(
    poor_draft: Path, load: list[Request], reference: list[list[int]], tmp_path: Path
) -> None:
    speculation = [argument for argument in SPECULATION if "draft-model-path" not in argument]
    arguments = [*speculation, *CHAIN, f"--speculative-draft-model-path={poor_draft}"]
    with serve(tmp_path / "log", arguments, settings={}, common=NO_LIMIT) as server:
        # A new server speculates: only verify steps show what is accepted.
        assert server.state()["settings"]["policy"] == "auto"
        tokens = run_load(server, load)
        for prompt in heldout_prompts(4, seed=51):
            server.generate(prompt, **LONG)
        state = server.state()
        assert differences(load, reference, tokens) == []
        assert state["faults"] == 0, server.process.log_tail()
        assert state["measured_sizes"] >= 1
        assert state["accept_length"] < 1.3
        assert "plain decode is faster" in state["switches_by_reason"]
        assert state["steps"]["plain"] > 2 * state["steps"]["spec"]
        assert state["explain"]["modes"]["plain"]["step_seconds"] < state["explain"]["modes"]["spec"]["step_seconds"]
        assert server.used_tokens() == 0
        # SGLang's own number for a pool and a context of this size; with speculation it would be 48.
        assert state["most_requests"] == 4096


@pytest.fixture(scope="module")
def dry(costs: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"dry_run": True, "costs": str(costs)}
    with serve(tmp_path_factory.mktemp("dry") / "log", [*SPECULATION, *CHAIN], settings=settings) as server:
        yield server


def test_saved_step_times_are_used_instead_of_measuring(dry: Server, costs: Path) -> None:
    state = dry.state()
    assert state["measured_sizes"] == 0
    assert {row["mode"] for row in state["step_costs"] if row["start_up_seconds"]} == {"spec", "plain"}
    assert f"dry run of auto, step times from {costs}" in dry.log


def test_a_dry_run_decides_and_changes_nothing(dry: Server, load: list[Request], reference: list[list[int]]) -> None:
    assert dry.use(disable_batch_threshold=3, min_dwell_steps=1)
    tokens = run_load(dry, load)
    state = dry.state()
    assert differences(load, reference, tokens) == []
    assert state["dry_run"]
    assert state["steps"]["plain"] == 0
    assert state["dry_run_steps"]["plain"] > 0
    assert state["switches"] >= 1
    assert state["tokens"]["plain"] == 0
    assert "adaptive-spec (dry run): spec -> plain" in dry.log
    assert state["faults"] == 0


def test_a_dry_run_ends_on_a_running_server(dry: Server, load: list[Request], reference: list[list[int]]) -> None:
    assert dry.use(dry_run=False, disable_batch_threshold=3, min_dwell_steps=1)
    tokens = run_load(dry, load)
    state = dry.state()
    assert differences(load, reference, tokens) == []
    assert state["steps"]["plain"] > 0
    assert state["faults"] == 0
    assert dry.used_tokens() == 0


@pytest.mark.supports("Parallelism", "`--tp-size 2`", since="0.1.0", note="on CPU ranks; on two GPUs measured by hand")
def test_two_ranks_switch_at_the_same_steps(load: list[Request], reference: list[list[int]], tmp_path: Path) -> None:
    # The other tests of this file have an attention backend that wants lengths on the host.
    env = {"SGLANG_CPU_ENGINE_NEEDS_CPU_SEQ_LENS": "0"}
    arguments = [*SPECULATION, *CHAIN, "--tp-size=2"]
    with serve(tmp_path / "log", arguments, settings={"min_dwell_steps": 4}, env=env) as server:
        assert server.state()["measured_sizes"] >= 1
        for flips in ({"policy": "auto"}, {"policy": "alternate", "alternate_period_steps": 3}, {"policy": "auto"}):
            assert server.use(**flips)
            assert differences(load, reference, run_load(server, load)) == []
        # Those whose client hung up may still be decoding; this waits for them, so that state and log are of one time.
        assert server.used_tokens() == 0
        state = server.state()
        assert state["faults"] == 0, server.process.log_tail()
        assert min(state["steps"].values()) > 6
        assert any(row["served_steps"] for row in state["step_costs"]), "no step time reached the policy"
        switches = [re.findall(rf"TP{rank}\] adaptive-spec: (.* -> .*)", server.log) for rank in (0, 1)]
        assert len(switches[0]) == state["switches"]
        assert switches[0] == switches[1]

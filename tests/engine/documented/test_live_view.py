"""The live view of a real server: what it shows is what the server says and what a client counts."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from bench.server import free_port
from tests.engine.documented.launcher import Launcher, environment, launch_command, on_a_terminal
from tests.engine.serving import Server
from tests.models.prompts import heldout_prompts

pytestmark = pytest.mark.engine

TOP = [sys.executable, "-m", "sglang_adaptive_spec.top"]


@pytest.fixture(scope="module")
def server(launcher: Launcher) -> Server:
    """The README's, with a threshold that a small load can pass."""
    server = launcher(launch_command("README.md"))
    assert server.use(policy="threshold", disable_batch_threshold=3, resume_batch_threshold=1, min_dwell_steps=1)
    return server


def load(server: Server, requests: int, new_tokens: int) -> int:
    """Requests all at once; the tokens that came back."""
    with ThreadPoolExecutor(requests) as pool:
        answers = pool.map(
            lambda prompt: server.generate(prompt, max_new_tokens=new_tokens, ignore_eos=True),
            heldout_prompts(requests, seed=51),
        )
        return sum(len(answer["output_ids"]) for answer in answers)


def once(server: Server, *options: str) -> str:
    done = subprocess.run(
        [*TOP, server.process.url, "--once", "--interval", "0.5", *options],
        capture_output=True,
        text=True,
        timeout=60,
        env=environment() | {"COLUMNS": "100"},
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


def test_what_it_says_is_what_the_server_says_and_the_client_counts(server: Server) -> None:
    before = json.loads(once(server, "--json"))
    received = load(server, requests=6, new_tokens=40)
    after = json.loads(once(server, "--json"))
    state = server.state()
    for name in ("mode", "steps", "tokens", "settings", "switches", "last_switches", "catch_ups", "faults"):
        assert after[name] == state[name]
    decoded = sum(after["tokens"].values()) - sum(before["tokens"].values())
    assert decoded == received - 6  # the first token of each comes from its prefill
    assert after["switches"] > before["switches"]
    assert after["running_requests"] == 0
    assert after["tokens_per_second"] == 0


def test_one_frame_says_why(server: Server) -> None:
    load(server, requests=6, new_tokens=40)
    frame = once(server)
    assert server.process.url in frame
    assert "plain above 3 running, spec again at 1" in frame
    assert "spec → plain" in frame
    assert "more requests run than the threshold" in frame


def test_live_it_follows_the_load_until_ctrl_c(server: Server) -> None:
    with ThreadPoolExecutor(1) as pool:
        loaded = pool.submit(load, server, requests=8, new_tokens=200)
        code, written = on_a_terminal([*TOP, server.process.url, "--interval", "0.2", "--minutes", "0.1"], seconds=3)
        loaded.result()
    assert code == 0, written
    frames = written.split("\x1b[H")[2:]
    assert len(frames) >= 5
    assert any(" PLAIN " in frame for frame in frames)
    assert any("running" in frame and "8" in frame for frame in frames)
    assert "Traceback" not in written
    assert "\x1b[?1049l" in written  # the screen is given back as it was


def test_a_server_without_the_plugin_and_none_at_all_end_it_with_one_message(plain_server: Server) -> None:
    nowhere = f"http://127.0.0.1:{free_port()}"
    for url, code, words in (
        (plain_server.process.url, os.EX_CONFIG, "runs without this plugin"),
        (nowhere, os.EX_UNAVAILABLE, "No answer from"),
    ):
        done = subprocess.run([*TOP, url, "--once"], capture_output=True, text=True, timeout=60)
        assert done.returncode == code
        assert words in done.stderr
        assert done.stderr.count("\n") == 1

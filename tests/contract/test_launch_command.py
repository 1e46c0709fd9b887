"""The real command, in a process of its own: it ends before it starts any other."""

import subprocess
import sys

import pytest

from .starts import ENABLE, THRESHOLD, N, Outcome, environment

STARTS = {
    "a threshold of zero": ((N, "0"), "(disable_batch_threshold in JSON) is 0"),
    "SGLang's own adaptive speculation": (
        (*THRESHOLD, "--speculative-adaptive"),
        "--speculative-adaptive is not served",
    ),
}


@pytest.fixture(scope="module")
def started(eagle3):
    """Both at once: each spends its time on imports."""
    return {
        name: subprocess.Popen(
            [sys.executable, "-m", "sglang.launch_server", *eagle3, *flags],
            env=environment() | {ENABLE: "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for name, (flags, _) in STARTS.items()
    }


@pytest.mark.parametrize("name", STARTS)
def test_the_command_is_refused_with_one_message(started, name):
    stdout, stderr = started[name].communicate(timeout=120)
    outcome = Outcome(started[name].returncode, stdout, stderr)
    assert outcome.exit_code == 78
    assert STARTS[name][1] in outcome.refusal

"""Starts of SGLang and what became of them."""

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ENABLE = "SGLANG_ADAPTIVE_SPEC"
CONFIG = "SGLANG_ADAPTIVE_SPEC_CONFIG"

N = "--speculative-disable-batch-threshold"
M = "--adaptive-spec-resume-batch-threshold"
POLICY = "--adaptive-spec-policy"
THRESHOLD = (N, "8")


@dataclass(frozen=True)
class Outcome:
    """How a start ended.

    Attributes:
        facts: What the probe found out: our modules, the carried config, which targets are wrapped.
    """

    exit_code: int
    stdout: str
    stderr: str
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def refusal(self) -> str:
        """The one message of a refused start."""
        assert self.exit_code != 0, self.stderr
        assert "Traceback" not in self.stderr
        assert self.stderr.count("refuses to start") == 1, self.stderr
        message = self.stderr.partition("sglang-adaptive-spec refuses to start")[2]
        assert [line.split(":")[0].strip() for line in message.splitlines()[1:4]] == ["what", "why", "do"]
        return message

    @property
    def usage_error(self) -> str:
        """The last line of a start that the argument parser turned away."""
        assert self.exit_code == 2, self.stderr
        assert "Traceback" not in self.stderr
        return self.stderr.splitlines()[-1]

    @property
    def started(self) -> bool:
        """Whether it got through without a word of ours."""
        assert "refuses to start" not in self.stderr, self.stderr
        assert "Traceback" not in self.stderr, self.stderr
        return self.exit_code == 0


def environment() -> dict[str, str]:
    """This environment without settings of ours; offline, and on one thread."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SGLANG_ADAPTIVE_SPEC")}
    return ours | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}


class Probe:
    """A process that has imported SGLang and starts it again and again; see probe.py."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, str(Path(__file__).with_name("probe.py"))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment(),
        )

    def start(
        self,
        *flags: str,
        plugin: str = "on",
        env: dict[str, str] | None = None,
        sglang_version: str | None = None,
        check_targets: tuple[str, ...] = (),
        paths_before: tuple[str, ...] = (),
        paths_after: tuple[str, ...] = (),
    ) -> Outcome:
        """Start SGLang with these flags; ``plugin`` is "on", "off", or "own" (as ``env`` says).

        With "own", the plugins in ``paths_before`` load before ours, the ones in ``paths_after`` after it.
        """
        request = {
            "flags": flags,
            "plugin": plugin,
            "env": env or {},
            "sglang_version": sglang_version,
            "check_targets": check_targets,
            "paths_before": paths_before,
            "paths_after": paths_after,
        }
        assert self._process.stdin
        assert self._process.stdout
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        reply = self._process.stdout.readline()
        assert reply, "the probe has died; its last words are above"
        return Outcome(**json.loads(reply))

    def close(self) -> None:
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait(timeout=30)

"""A child process with its own log, its own process group and a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

from bench.results import without_paths

ROOT = Path(__file__).resolve().parent.parent

_TERM_GRACE_S = 5.0


def run_module(module: str, arguments: list[str], env: Mapping[str, str], log: Path, timeout_s: float) -> int | None:
    """Run ``python -m module`` with all its output in ``log``.

    Whatever the child started is gone when this returns: a server left behind would hold the GPU.

    Returns:
        The exit code, or None when the child was ended at the timeout.
    """
    command = [sys.executable, "-m", module, *arguments]
    env = {**env, "PYTHONPATH": os.pathsep.join(filter(None, (str(ROOT), env.get("PYTHONPATH", ""))))}
    with log.open("wb") as output:
        # A session of its own: the server's processes can be ended together, and Ctrl-C reaches only us.
        child = subprocess.Popen(
            command, env=env, cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output, start_new_session=True
        )
    try:
        return child.wait(timeout=max(0.0, timeout_s))
    except subprocess.TimeoutExpired:
        return None
    finally:
        _end_group(child)


def _end_group(child: subprocess.Popen[bytes]) -> None:
    """End what is left of the child's session: ask first, so that GPU memory is given back in order."""
    for signal_number in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(child.pid, signal_number)
        except ProcessLookupError:
            break
        end = time.monotonic() + _TERM_GRACE_S
        while time.monotonic() < end and _group_exists(child):
            time.sleep(0.05)
    child.wait()


def _group_exists(child: subprocess.Popen[bytes]) -> bool:
    child.poll()  # a zombie of ours would count as alive
    try:
        os.killpg(child.pid, 0)
    except ProcessLookupError:
        return False
    return True


def log_tail(log: Path, lines: int = 40, columns: int = 300) -> list[str]:
    """The end of a log without progress bars and machine paths."""
    if not log.exists():
        return []
    text = log.read_text(errors="replace").replace("\r", "\n")
    kept = [line.rstrip() for line in text.splitlines() if line.strip() and "it/s]" not in line and "s/it]" not in line]
    return [without_paths(line)[:columns] for line in kept[-lines:]]

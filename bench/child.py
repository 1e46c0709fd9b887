"""A child process with its own log, its own process group and a deadline."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from bench.results import without_paths

ROOT = Path(__file__).resolve().parent.parent

_TERM_GRACE_S = 5.0
_WATCH_S = 1.0


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """An environment in which ``bench`` is found, but after everything that is installed.

    The working tree has the plugin's folder too, without its patches: ahead of an installed plugin it would
    hide it. Hence also no current directory on the path (and, for Python 3.10, another current directory).
    """
    path = os.pathsep.join(filter(None, (base.get("PYTHONPATH", ""), str(ROOT))))
    return {**base, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


def run_module(
    module: str,
    arguments: list[str],
    env: Mapping[str, str],
    log: Path,
    timeout_s: float,
    watch: Callable[[], None] = lambda: None,
) -> int | None:
    """Run ``python -m module`` with all its output in ``log``.

    Whatever the child started is gone when this returns: a server left behind would hold the GPU.

    Args:
        watch: Called about once a second while it runs.

    Returns:
        The exit code, or None when the child was ended at the timeout.
    """
    command = [sys.executable, "-m", module, *arguments]
    with log.open("wb") as output:
        child = subprocess.Popen(
            command,
            env=environment(env),
            cwd=log.parent,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            # Of its own: the server's processes can be ended together, and Ctrl-C reaches only us.
            start_new_session=True,
        )
    end = time.monotonic() + timeout_s
    try:
        while child.poll() is None and time.monotonic() < end:
            time.sleep(_WATCH_S)
            watch()
        return child.poll()
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

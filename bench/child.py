"""Child processes with a log and a process group of their own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from bench.results import without_paths

ROOT = Path(__file__).resolve().parent.parent

_TERM_GRACE_S = 5.0
_WATCH_S = 1.0


def environment(base: Mapping[str, str]) -> dict[str, str]:
    """An environment in which ``bench`` is found, but after everything that is installed.

    The working tree has the plugin's folder too: ahead of an installed plugin it would hide it, and what was measured
    would not be what is installed. Hence also no current directory on the path (and, for Python 3.10, another current
    directory).
    """
    path = os.pathsep.join(filter(None, (base.get("PYTHONPATH", ""), str(ROOT))))
    return {**base, "PYTHONPATH": path, "PYTHONSAFEPATH": "1"}


class Child:
    """A running ``python -m module`` with all its output in ``log``; it can be given lines.

    Whoever starts one ends it with :func:`end`: a server left behind would hold the GPU.
    """

    def __init__(self, module: str, arguments: list[str], env: Mapping[str, str], log: Path) -> None:
        with log.open("wb") as output:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                env=environment(env),
                cwd=log.parent,
                # Unbuffered: a line is there once it is sent. However we end, the child sees the end of its input.
                stdin=subprocess.PIPE,
                bufsize=0,
                stdout=output,
                stderr=output,
                # Of its own: the server's processes can be ended together, and Ctrl-C reaches only us.
                start_new_session=True,
            )

    @property
    def session(self) -> int:
        """The process session that it and all it starts run in."""
        return self._process.pid

    def send(self, line: str) -> None:
        """Give it a line; where it is gone, :meth:`poll` says so."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(f"{line}\n".encode())

    def close(self) -> None:
        """No more lines."""
        assert self._process.stdin is not None
        self._process.stdin.close()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._process.poll()

    def _signal_group(self, number: int) -> bool:
        """Signal all that is left of its session; False where nothing is."""
        self.poll()  # a zombie of ours would count as alive
        try:
            os.killpg(self._process.pid, number)
        except ProcessLookupError:
            return False
        return True


def end(children: Sequence[Child]) -> None:
    """End what is left of the children's sessions: ask first, so that GPU memory is given back in order."""
    for child in children:
        child.close()
    for number in (signal.SIGTERM, signal.SIGKILL):
        for child in children:
            child._signal_group(number)
        until = time.monotonic() + _TERM_GRACE_S
        while time.monotonic() < until and any(child._signal_group(0) for child in children):
            time.sleep(0.05)


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
    child = Child(module, arguments, env, log)
    until = time.monotonic() + timeout_s
    try:
        child.close()
        while child.poll() is None and time.monotonic() < until:
            time.sleep(_WATCH_S)
            watch()
        return child.poll()
    finally:
        end([child])


def log_tail(log: Path, lines: int = 40, columns: int = 300) -> list[str]:
    """The end of a log without progress bars and machine paths."""
    if not log.exists():
        return []
    text = log.read_text(errors="replace").replace("\r", "\n")
    kept = [line.rstrip() for line in text.splitlines() if line.strip() and "it/s]" not in line and "s/it]" not in line]
    return [without_paths(line)[:columns] for line in kept[-lines:]]

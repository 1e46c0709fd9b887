"""Servers started by the commands of the documentation, on the tiny pair and the CPU engine."""

from __future__ import annotations

import os
import pty
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Sequence
from contextlib import ExitStack
from fcntl import ioctl
from pathlib import Path
from select import select

from tests.engine.serving import DRAFT, TARGET, Server, serve
from tests.pages import Command, commands

LAUNCH = ["python", "-m", "sglang.launch_server"]
# What a page says for its reader's models, and what runs here in their place.
_MODELS = {"--model-path": str(TARGET), "--speculative-draft-model-path": str(DRAFT)}


def launch_command(page: str) -> Command:
    """The first command of a page that starts a server, else the one of the quick start."""
    found = [command for command in commands(page) if command.call[:3] == LAUNCH]
    return found[0] if found else launch_command("docs/quick-start.md")


class Launcher:
    """Starts what a launch command starts, one server at a time: an idle one keeps a core busy."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = ExitStack()
        self._server: Server | None = None
        self._command: Command | None = None

    def __call__(self, command: Command) -> Server:
        """The server that a command starts, with the tiny pair in place of its models."""
        if self._server is None or command != self._command:
            self.stop()
            flags = command.call[len(LAUNCH) :]
            flags = [_MODELS.get(before, flag) for before, flag in zip(["", *flags], flags, strict=False)]
            # As many as SGLang would admit on a reader's GPU.
            flags = ["--max-running-requests=256", *flags]
            log = self._folder / f"{command.page.replace('/', '-')}.log"
            self._server = self._running.enter_context(serve(log, flags, env=command.variables))
            self._command = command
        return self._server

    def stop(self) -> None:
        self._server = None
        self._running.close()


def environment() -> dict[str, str]:
    """Where `python` is this one."""
    return os.environ | {"PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}


def on_a_terminal(command: Sequence[str], seconds: float, columns: int = 100, rows: int = 40) -> tuple[int, str]:
    """Run a command on a terminal of its own, press Ctrl-C after a while; its exit code, and all that it wrote."""
    master, slave = pty.openpty()
    ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
    # A shell lets what it starts in the background ignore Ctrl-C, and all its children with it, these tests perhaps.
    command = ["env", "--default-signal=INT", *command]
    written = b""
    with subprocess.Popen(
        command, stdin=slave, stdout=slave, stderr=slave, env=environment() | {"TERM": "xterm-256color"}
    ) as process:
        os.close(slave)
        press_at, pressed_at = time.monotonic() + seconds, None
        try:
            while True:
                now = time.monotonic()
                if pressed_at is None and now > press_at:
                    process.send_signal(signal.SIGINT)
                    pressed_at = now
                if not select([master], [], [], 0.1)[0]:
                    assert pressed_at is None or now < pressed_at + 30, "it does not end"
                    continue
                try:
                    chunk = os.read(master, 65536)
                except OSError:  # Linux' way to say that the other end is closed
                    break
                if not chunk:
                    break
                written += chunk
        except BaseException:
            # Nobody reads what it writes any more, so it would never end.
            process.kill()
            raise
    os.close(master)
    return process.returncode, written.decode()

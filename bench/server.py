"""Start an SGLang server in a process group of its own, and be sure to end it."""

from __future__ import annotations

import ctypes
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import requests

from bench.child import environment as as_installed

_TAIL_LINES = 30


class ServerError(Exception):
    """The server did not start, or ended early."""


def cuda_device_present() -> bool:
    """Whether the CUDA driver sees a device; asking torch would take seconds."""
    try:
        driver = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    count = ctypes.c_int(0)
    return driver.cuInit(0) == 0 and driver.cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0


def free_port(among: range = range(20_000, 32_000)) -> int:
    """A free port; by default below the range from which the system hands out ports, and below 55536.

    SGLang takes `port + 10000` for a second server, which must be a port too.
    """
    # Not the shared generator: who seeds that (Hypothesis does) would get the same port again and again.
    for port in random.SystemRandom().sample(among, len(among)):
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise ServerError(f"No free port from {among.start} to {among.stop - 1}.")


def server_arguments(
    model: Path, draft: Path | None, threshold: int, on_gpu: bool, extra: Sequence[str] = ()
) -> list[str]:
    """Arguments of `sglang.launch_server`; without a draft, those of the reference server."""
    arguments = ["--model-path", str(model), "--max-total-tokens", "16384"]
    # SGLang's kernels for GPUs take no float32.
    arguments += ["--dtype", "bfloat16" if on_gpu else "float32"]
    if on_gpu:
        # The tiny model's heads are too small for the other attention backends.
        arguments += ["--attention-backend", "triton", "--mem-fraction-static", "0.5"]
    else:
        arguments += ["--device", "cpu", "--disable-cuda-graph"]
    if draft is not None:
        arguments += ["--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", str(draft)]
        arguments += ["--speculative-num-steps", "3", "--speculative-eagle-topk", "1"]
        arguments += ["--speculative-num-draft-tokens", "4"]
        arguments += ["--speculative-disable-batch-threshold", str(threshold)]
    return [*arguments, *extra]


def settings_body(settings: Mapping[str, str | int]) -> dict[str, dict[str, int]]:
    """What to post to /set_internal_state for other settings, in the form that all releases let through."""
    numbers = {
        f"adaptive_spec.{name}.{value}" if isinstance(value, str) else f"adaptive_spec.{name}": (
            1 if isinstance(value, str) else int(value)
        )
        for name, value in settings.items()
    }
    return {"server_args": numbers}


def server_environment(base: Mapping[str, str], with_plugin: bool, on_gpu: bool) -> dict[str, str]:
    """`base` with the plugin switched on or off, whatever it said before."""
    environment = {name: value for name, value in base.items() if not name.startswith("SGLANG_ADAPTIVE_SPEC")}
    if with_plugin:
        environment["SGLANG_ADAPTIVE_SPEC"] = "1"
    if not on_gpu:
        # More threads only get in each other's way on a model this small.
        environment.setdefault("OMP_NUM_THREADS", "1")
    return environment


class Server:
    """One `sglang.launch_server`, alive inside a `with` block and not a moment longer."""

    def __init__(
        self,
        name: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        log: Path,
        port: int | None = None,
    ) -> None:
        self.name = name
        self.log = log
        port = port or free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._command = [sys.executable, "-m", "sglang.launch_server", *arguments]
        self._command += ["--host", "127.0.0.1", "--port", str(port)]
        self._environment = as_installed(environment)
        self.grace_seconds = 2.0  # for children to end by themselves once their parent is gone
        self.ended_by_itself: int | None = None  # its exit code, if it was not for us to end it
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        with self.log.open("wb") as output:
            output.write((" ".join(self._command) + "\n").encode())
            output.flush()
            self._process = subprocess.Popen(
                self._command,
                env=self._environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group to end as a whole
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def wait_until_healthy(self, timeout_seconds: float) -> None:
        """Return once the server has generated a token.

        Raises:
            ServerError: it ended, or took longer than that.
        """
        deadline = time.monotonic() + timeout_seconds
        while time.monotonic() < deadline:
            if self.is_healthy():
                return
            time.sleep(0.5)
        raise ServerError(f"The {self.name} server was not ready after {timeout_seconds:.0f} s.")

    def is_healthy(self) -> bool:
        """Whether the server generates a token now; False while it starts.

        Raises:
            ServerError: it ended.
        """
        if self._process is None or self._process.poll() is not None:
            raise ServerError(f"The {self.name} server did not get ready.")
        with suppress(requests.RequestException):
            return requests.get(f"{self.url}/health", timeout=25.0).ok
        return False

    @property
    def pid(self) -> int:
        """The server's first process."""
        assert self._process is not None
        return self._process.pid

    def send_signal(self, number: signal.Signals) -> None:
        """Signal the server's first process, as a supervisor would."""
        assert self._process is not None
        self._process.send_signal(number)

    def wait(self, timeout_seconds: float) -> int | None:
        """The exit code, once it has ended by itself; None if it has not by then."""
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            return self._process.wait(timeout_seconds)
        return None

    def stop(self) -> None:
        """End the server and every process that it started."""
        process, self._process = self._process, None
        if process is None:
            return
        self.ended_by_itself = process.poll()
        group = process.pid
        # SGLang's children die with their parent, and Python's resource tracker, which is in the group too,
        # cleans up after them: so the parent first, and whatever is left after a moment.
        process.kill()
        process.wait()
        _await_end(group, self.grace_seconds)
        _signal_group(group, signal.SIGKILL)
        _await_end(group, self.grace_seconds)

    def log_tail(self, lines: int = _TAIL_LINES) -> str:
        """The end of the server's log."""
        return tail(self.log.read_text(errors="replace") if self.log.exists() else "", lines)


def tail(text: str, lines: int) -> str:
    """The last `lines` lines that say something: blank lines and requests that went well do not."""
    kept = [line for line in text.splitlines() if line.strip() and not line.endswith('HTTP/1.1" 200 OK')]
    return "\n".join(kept[-lines:])


def _signal_group(group: int, number: int) -> bool:
    """Signal a process group; False when there is none any more."""
    try:
        os.killpg(group, number)
    except (ProcessLookupError, PermissionError):
        return False
    return True


def _await_end(group: int, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _signal_group(group, 0) and time.monotonic() < deadline:
        time.sleep(0.05)

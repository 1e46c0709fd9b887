"""The cores that schedulers run on while their servers are measured.

On a host that is shared with others one core can be slower than another, for a while: two servers whose schedulers
happen to run on different ones are not compared. So before they are measured, the cores are timed, and schedulers move
to the quickest: those of all servers to the same ones (the sweep), or each when its turn comes (the ramp and
``bench.serve``). What else a server runs (HTTP, detokenizer) stays where it was.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Sequence

import psutil

from bench.results import Row

_TITLE = "sglang::scheduler"
"""What SGLang's scheduler processes call themselves, with the rank behind it."""

_ROUNDS, _ROUND_SIZE = 20, 20_000
"""A core is timed for some ten milliseconds: a scheduler's own work comes in pieces no longer than that."""


def pin(count: int, sessions: Iterable[int]) -> Row:
    """Move the schedulers of servers to the quickest cores of the moment.

    Only a scheduler's main thread is moved, which is the one that launches; threads that it starts later stay with it.

    Args:
        count: Cores for each scheduler of a server; all servers get the same ones.
        sessions: The process sessions that the servers run in.

    Returns:
        For the result file: ``cores`` and how many ``schedulers`` are on them, and what a fixed piece of work took on
        every core that this process may use: ``core_ms``, mean milliseconds by core.
    """
    took_ms = {core: time_core(core) for core in sorted(os.sched_getaffinity(0))}
    by_session = [schedulers(session) for session in sessions]
    cores = quickest(took_ms, count * max(map(len, by_session), default=1))
    pinned = 0
    for pid in (pid for pids in by_session for pid in pids):
        try:
            os.sched_setaffinity(pid, cores)
        except ProcessLookupError:  # it ended since
            continue
        pinned += 1
    return {"cores": cores, "schedulers": pinned, "core_ms": {core: round(ms, 4) for core, ms in took_ms.items()}}


def quickest(took_ms: dict[int, float], count: int) -> list[int]:
    """The cores that were quickest, at least one."""
    return sorted(sorted(took_ms, key=lambda core: (took_ms[core], core))[: max(1, count)])


def time_core(core: int) -> float:
    """Milliseconds that a fixed piece of Python takes on a core now, the mean of some rounds."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {core})
    try:
        began = time.perf_counter()
        for _ in range(_ROUNDS):
            sum(range(_ROUND_SIZE))
        return 1000 * (time.perf_counter() - began) / _ROUNDS
    finally:
        os.sched_setaffinity(0, before)


def schedulers(session: int) -> Sequence[int]:
    """The process ids of the schedulers in a session, which is that of a server."""
    return [process.pid for process in psutil.process_iter() if _is_scheduler(process, session)]


def _is_scheduler(process: psutil.Process, session: int) -> bool:
    try:
        return os.getsid(process.pid) == session and " ".join(process.cmdline()).startswith(_TITLE)
    except (psutil.Error, ProcessLookupError):
        return False

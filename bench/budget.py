"""How long things may take: GPU time is paid for by the minute, and half a measurement is worth nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field


@dataclass
class Budget:
    """Wall-clock time from now on, and what a server is expected to need of it.

    Attributes:
        seconds: Everything has to be over by then.
        startup_s: Expected start of a server on a backend not seen yet: kernels compile.
        measure_s: Expected measurement of a server before the first one was measured.
    """

    seconds: float
    startup_s: float
    measure_s: float
    clock: Callable[[], float] = time.time
    _start: float = field(init=False)
    _startups_s: dict[str, float] = field(init=False, default_factory=dict)
    _measured_s: float | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        self._start = self.clock()

    @property
    def deadline(self) -> float:
        """Unix time at which the budget is spent."""
        return self._start + self.seconds

    @property
    def left_s(self) -> float:
        """Seconds left."""
        return self.deadline - self.clock()

    def needed_s(self, backend: str, servers: int = 1) -> float:
        """Seconds that more servers on a backend, started at once, are expected to take, measurements included."""
        measure_s = self.measure_s if self._measured_s is None else self._measured_s
        return self._startups_s.get(backend, self.startup_s) + 1.1 * measure_s * servers

    def allows(self, backend: str, servers: int = 1) -> bool:
        """Whether more servers on a backend, started at once, are expected to finish in time."""
        return self.left_s >= self.needed_s(backend, servers)

    def learn(self, backend: str, startup_s: float, total_s: float, *, complete: bool, servers: int = 1) -> None:
        """Take note of what servers that were started at once took.

        Args:
            startup_s: Of the slowest one.
            complete: Whether each was measured at every concurrency.
        """
        # A backend's first server compiles, later ones don't; the longer of later ones counts.
        known = self._startups_s.get(backend)
        self._startups_s[backend] = startup_s if known is None else min(max(known, startup_s), startup_s * 1.5)
        if complete:
            self._measured_s = max(self._measured_s or 0.0, (total_s - startup_s) / servers)

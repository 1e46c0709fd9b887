"""How long things may take: GPU time is paid for by the minute, and half a measurement is worth nothing."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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

    def needed_s(self, backend: str, servers: int = 1, starts: int = 1) -> float:
        """Seconds that a group of more servers on a backend is expected to take, measurements included.

        Args:
            starts: How often one waits for servers that start, since not all start at once.
        """
        measure_s = self.measure_s if self._measured_s is None else self._measured_s
        return starts * self._startups_s.get(backend, self.startup_s) + 1.1 * measure_s * servers

    def allows(self, backend: str, servers: int = 1, starts: int = 1) -> bool:
        """Whether a group of more servers on a backend is expected to finish in time."""
        return self.left_s >= self.needed_s(backend, servers, starts)

    def learn(
        self, backend: str, startups_s: Sequence[float], total_s: float, *, complete: bool, servers: int = 1
    ) -> None:
        """Take note of what a group of servers took.

        Args:
            startups_s: Of the slowest of those that started at once, one start after another.
            complete: Whether each was measured at every concurrency.
        """
        for startup_s in startups_s:
            # A backend's first server compiles, later ones don't; the longer of later ones counts.
            known = self._startups_s.get(backend)
            self._startups_s[backend] = startup_s if known is None else min(max(known, startup_s), startup_s * 1.5)
        if complete:
            self._measured_s = max(self._measured_s or 0.0, (total_s - sum(startups_s)) / servers)

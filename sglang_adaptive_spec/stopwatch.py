"""How long something took in all, on the device where that can be told without waiting for it."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol


class Stopwatch(Protocol):
    """Adds up the time of what runs inside :meth:`measuring`."""

    @property
    def seconds(self) -> float:
        """The sum so far, of what has come to its end."""

    def measuring(self) -> AbstractContextManager[None]:
        """Measure what is run, or launched, inside."""


class HostStopwatch:
    """For a device that runs what it is told before the host goes on."""

    def __init__(self) -> None:
        self._seconds = 0.0

    @property
    def seconds(self) -> float:
        return self._seconds

    @contextmanager
    def measuring(self) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._seconds += time.perf_counter() - start

"""How long decode steps take, seen from when their results arrive: nothing is asked of the GPU."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median

from sglang_adaptive_spec.modes import Mode

_RECENT_STEPS = 64


@dataclass(slots=True)  # neither frozen nor a NamedTuple: both take longer to make, and it is made at every step
class StepTime:
    """One timed decode step.

    Attributes:
        mode: How the step ran.
        requests: Requests in its batch.
        seconds: From the result of the step before to this one's: what the step added to every request's wait.
        after: The mode of the step before. Where it differs, the time is that of a switch and all it entails.
        number: The step's number as given to :meth:`StepClock.launched`.
        context_tokens: Mean length of its requests; 0 where that is not known.
        alone: Whether nothing was launched behind it that its result had to wait for.
    """

    mode: Mode
    requests: int
    seconds: float
    after: Mode
    number: int
    context_tokens: int = 0
    alone: bool = True


@dataclass(slots=True)
class StepTimes:
    """The times of steps that are alike.

    Attributes: as of :class:`StepTime`, and the seconds of each.
    """

    mode: Mode
    after: Mode
    requests: int
    context_tokens: int
    seconds: list[float]


class StepClock:
    """Times each decode step that directly follows another one.

    Steps are launched and their results processed in the same order, with or without overlap. Between two decode
    steps in a row the engine has nothing else to do, so the time between their results is the later step's. A
    prefill in between breaks the row, and so does an idle server, which goes on with a prefill. With overlap a result
    also waits while a prefill is launched behind its step, which can take longer than the step: of how long the step
    took, that time says nothing.

    Args:
        now_seconds: A monotonic clock.
    """

    def __init__(self, now_seconds: Callable[[], float] = time.perf_counter) -> None:
        self._now_seconds = now_seconds
        # Mode, requests, number, whether it follows a decode step, context tokens.
        self._in_flight: deque[tuple[Mode, int, int, bool, int]] = deque()
        self._last_launched_decode = False
        self._last_processed: tuple[Mode, float] | None = None
        self._recent: dict[Mode, deque[float]] = {mode: deque(maxlen=_RECENT_STEPS) for mode in Mode}

    def launched(self, mode: Mode, requests: int, number: int, context_tokens: int = 0) -> None:
        """A decode step was given to the engine."""
        self._in_flight.append((mode, requests, number, self._last_launched_decode, context_tokens))
        self._last_launched_decode = True

    def interrupted(self) -> None:
        """Something else than a decode step was given to the engine."""
        self._last_launched_decode = False

    def processed(self, mode: Mode) -> StepTime | None:
        """The oldest step in flight was processed; its time, if it followed a decode step.

        Args:
            mode: The mode that its result shows.
        """
        now = self._now_seconds()
        before, self._last_processed = self._last_processed, (mode, now)
        if not self._in_flight:
            return None
        launched_mode, requests, number, follows_decode, context_tokens = self._in_flight.popleft()
        if launched_mode is not mode:
            # A result was lost on the way; better no times than another step's.
            self._in_flight.clear()
            self._last_processed = None
            return None
        if before is None or not follows_decode:
            return None
        after, at_seconds = before
        # What was launched last waits behind the last step alone.
        alone = self._last_launched_decode or bool(self._in_flight)
        timed = StepTime(mode, requests, now - at_seconds, after, number, context_tokens, alone)
        if after is mode and alone:
            self._recent[mode].append(timed.seconds)
        return timed

    def recent_seconds(self, mode: Mode) -> float | None:
        """The median of the last steps that followed one of the same mode; None without any."""
        recent = self._recent[mode]
        return median(recent) if recent else None

"""What goes wrong in the plugin itself: counted, said once, and after too much of it the end of switching."""

from __future__ import annotations

import logging
from collections import Counter, deque
from enum import Enum

logger = logging.getLogger(__name__)

MOST_FAULTS = 3
WINDOW_STEPS = 1000


class Fault(str, Enum):
    """A kind of fault, by what failed. None costs a request."""

    POLICY = "policy"  # that step speculates
    PLAIN_STEP = "plain_step"  # the step runs again, as SGLang's own
    CATCH_UP = "catch_up"  # the draft stays behind on those requests, which costs acceptance and no token
    PREPARATION = "preparation"  # somebody else changed a step after it was prepared; it runs as prepared
    TELEMETRY = "telemetry"  # metrics end, serving does not
    MEASUREMENT = "measurement"  # step times at start; those of serving take their place


_BESIDE_SERVING = {Fault.TELEMETRY, Fault.MEASUREMENT}


class Faults:
    """The account of this process's faults, and the switch that they throw.

    One fault costs one step its mode. With ``MOST_FAULTS`` of them within ``WINDOW_STEPS`` decode steps switching
    ends for good: a server on SGLang's own path is worth more than one that keeps falling back to it.
    """

    def __init__(self) -> None:
        self.counts: Counter[Fault] = Counter()
        self.spec_only = False
        self._recent_steps: deque[int] = deque(maxlen=MOST_FAULTS)

    def note(self, kind: Fault, what: str, step: int, error: BaseException | None = None) -> None:
        """Count a fault, and say so if it is the first of its kind.

        Args:
            what: What failed, for the log.
            step: The decode step being prepared or run, counted from the start of the server.
        """
        self.counts[kind] += 1
        if self.counts[kind] == 1:
            logger.error(
                "adaptive-spec: %s%s. Please report this. More faults of this kind are counted, not logged.",
                what,
                "" if kind in _BESIDE_SERVING else "; SGLang's own path took over",
                exc_info=error,
            )
        if kind in _BESIDE_SERVING or self.spec_only:
            return
        self._recent_steps.append(step)
        if len(self._recent_steps) == MOST_FAULTS and step - self._recent_steps[0] < WINDOW_STEPS:
            self.spec_only = True
            logger.error(
                "adaptive-spec: %d faults within %d decode steps: from here on SGLang speculates as it would alone. "
                "Restart the server to switch again.",
                MOST_FAULTS,
                WINDOW_STEPS,
            )

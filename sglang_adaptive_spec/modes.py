"""The two ways a decode step can run, and why one gave way to the other."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Mode(str, Enum):
    """How a decode step runs."""

    SPEC = "spec"  # SGLang's own draft, verify, draft-extend
    PLAIN = "plain"  # one target forward, one token and one KV slot a request

    # A mode equals its string, so its hash has to be the string's; and Enum's own is slow, at every count of a step.
    __hash__ = str.__hash__

    other: Mode
    """The mode that this one gives way to."""


# Not a property, which is a call at every decision.
Mode.SPEC.other, Mode.PLAIN.other = Mode.PLAIN, Mode.SPEC


class Reason(str, Enum):
    """Why a step runs in the mode it runs in."""

    FIXED = "fixed policy"
    LOAD_ROSE = "more requests run than the threshold"
    LOAD_FELL = "few enough requests run to resume"
    STEADY = "no reason to change"
    SPEC_FASTER = "speculating is faster"
    PLAIN_FASTER = "plain decode is faster"
    PROBE = "a short try of the other mode"
    PROBE_OVER = "the other mode is no faster"
    NO_DATA = "nothing measured yet"
    NO_SPEC_GRAPH = "more requests run than speculative graphs hold"
    DWELL = "the last switch is too recent"
    FORCED = "forced flip"
    KV_PRESSURE = "too few free KV slots to speculate"
    FAULT = "a fault of the plugin"


class Decision(NamedTuple):  # half a frozen dataclass's time to make
    """The mode of one decode step."""

    mode: Mode
    reason: Reason

"""What the plugin shows through SGLang's own windows: its Prometheus endpoint and its decode log line.

SGLang runs prometheus_client in multiprocess mode: the scheduler's process writes values to a mapped file, the HTTP
server's process adds the files up at a scrape. So values are written where they arise, once a second.
"""

from __future__ import annotations

import logging
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sglang_adaptive_spec.config import POLICIES, TEST_POLICIES
from sglang_adaptive_spec.modes import Mode, Reason

PUBLISH_SECONDS = 1.0
PREFIX = "sglang:adaptive_spec_"

Series = Mapping[tuple[str, ...], float]
"""Values by label values, in the order of the metric's labels."""

_MODES = tuple(mode.value for mode in Mode)


@dataclass(frozen=True)
class Metric:
    """One metric: what it is called, and how it is read from the engine's snapshot.

    Attributes:
        name: As in a scrape.
        labels: Label names on top of the ones that SGLang puts on each of its metrics.
        help: One sentence, the metric's documentation.
        read: The values in a snapshot.
    """

    name: str
    kind: Literal["counter", "gauge"]
    labels: tuple[str, ...]
    help: str
    read: Callable[[Mapping[str, Any]], Series]


def _counter(name: str, labels: tuple[str, ...], text: str, read: Callable[[Mapping[str, Any]], Series]) -> Metric:
    return Metric(f"{PREFIX}{name}_total", "counter", labels, text, read)


def _gauge(name: str, labels: tuple[str, ...], text: str, read: Callable[[Mapping[str, Any]], Series]) -> Metric:
    return Metric(f"{PREFIX}{name}", "gauge", labels, text, read)


def _one(key: str) -> Callable[[Mapping[str, Any]], Series]:
    return lambda state: {(): _number(state[key])}


def _setting(key: str) -> Callable[[Mapping[str, Any]], Series]:
    return lambda state: {(): _number(state["settings"].get(key))}


def _by(key: str) -> Callable[[Mapping[str, Any]], Series]:
    return lambda state: {(label,): _number(value) for label, value in state[key].items()}


def _which(key: str, among: tuple[str, ...]) -> Callable[[Mapping[str, Any]], Series]:
    return lambda state: {(one,): float(one == state[key]) for one in among}


def _switches(state: Mapping[str, Any]) -> Series:
    return {(s["to"], Reason(s["reason"]).name.lower()): s["count"] for s in state["switch_counts"]}


def _memory_bytes(state: Mapping[str, Any]) -> Series:
    return {(): state["plain_memory_gib"] * 2**30}


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


METRICS = (
    _gauge("mode", ("mode",), "1 for the mode of the last decode step.", _which("mode", _MODES)),
    _gauge(
        "policy",
        ("policy",),
        "1 for the policy in charge: `spec` and `plain` hold the server in that mode.",
        _which("policy", POLICIES + TEST_POLICIES),
    ),
    _gauge(
        "disable_batch_threshold",
        (),
        "Plain above this many running requests; NaN for a policy without thresholds.",
        _setting("disable_batch_threshold"),
    ),
    _gauge(
        "resume_batch_threshold",
        (),
        "Speculative again at this many; NaN for a policy without thresholds.",
        _setting("resume_batch_threshold"),
    ),
    _counter("steps", ("mode",), "Decode steps by the mode they ran in.", _by("steps")),
    _counter(
        "tokens",
        ("mode",),
        "Tokens that decode steps gave to clients; the first token of a request comes from its prefill.",
        _by("tokens"),
    ),
    _counter(
        "mode_seconds",
        ("mode",),
        "Time since the start by the mode that was current, idle time included.",
        _by("mode_seconds"),
    ),
    _gauge(
        "step_seconds",
        ("mode",),
        "Median of the last 64 steps that followed one of the same mode; NaN before the first.",
        _by("step_seconds"),
    ),
    _counter(
        "switches",
        ("to_mode", "reason"),
        "Changes of mode; in a dry run those that would have been.",
        _switches,
    ),
    _gauge("dry_run", (), "1 while every step speculates, whatever is decided.", _one("dry_run")),
    _gauge(
        "accept_length",
        (),
        "Accepted tokens a request and speculative step, the bonus token included, since the start; NaN before the "
        "first.",
        _one("accept_length"),
    ),
    _counter(
        "accepted_tokens",
        (),
        "Accepted drafts and bonus tokens of speculative steps, as SGLang counts them.",
        _one("accepted_tokens"),
    ),
    _counter(
        "verified_requests",
        (),
        "Requests in speculative steps, one a step; accepted tokens over these give the accept length of any window.",
        _one("verified_requests"),
    ),
    _counter("catch_ups", (), "Times that the draft was shown what plain steps had left for it.", _one("catch_ups")),
    _counter("catch_up_tokens", (), "Tokens that the draft saw in them.", _one("catch_up_tokens")),
    _counter("catch_up_seconds", (), "Time on the device that they took.", _one("catch_up_seconds")),
    _counter("faults", ("kind",), "Faults of the plugin, each answered by SGLang's own path.", _by("faults_by_kind")),
    _gauge(
        "disabled_by_faults",
        (),
        "1 once repeated faults ended switching: SGLang speculates as it would alone until the next start.",
        _one("spec_only"),
    ),
    _gauge(
        "plain_memory_bytes",
        (),
        "Device memory of the plain graphs, their attention backend, and what waits for the draft.",
        _memory_bytes,
    ),
)


class Telemetry:
    """Keeps this process's Prometheus metrics up with the engine, once a second and when the server falls idle.

    Args:
        snapshot: The engine's state as plain JSON types; what ``/server_info`` shows.
        labels: The labels of SGLang's own scheduler metrics.
        counter: Makes a counter, as ``prometheus_client.Counter`` does.
        gauge: Makes a gauge likewise.
        on_fault: Hears of an error, after which nothing is published any more.
        now_seconds: A monotonic clock.
    """

    def __init__(
        self,
        snapshot: Callable[[], Mapping[str, Any]],
        labels: Mapping[str, Any],
        counter: Callable[..., Any],
        gauge: Callable[..., Any],
        on_fault: Callable[[Exception], None],
        now_seconds: Callable[[], float] = time.monotonic,
    ) -> None:
        self._snapshot = snapshot
        self._labels = tuple(labels.values())
        self._on_fault = on_fault
        self._now_seconds = now_seconds
        self._due_seconds = -math.inf
        self._stale = True
        self._broken = False
        self._published: dict[tuple[str, tuple[str, ...]], float] = {}
        self._made = {
            metric.name: counter(metric.name, metric.help, [*labels, *metric.labels])
            if metric.kind == "counter"
            # As all of SGLang's gauges: of a restarted process's values and the old one's, the newer.
            else gauge(metric.name, metric.help, [*labels, *metric.labels], multiprocess_mode="mostrecent")
            for metric in METRICS
        }

    def tick(self) -> None:
        """A decode step was processed."""
        self._stale = True
        if self._now_seconds() >= self._due_seconds:
            self.publish()

    def idle(self) -> None:
        """The server has nothing to do; called over and over while it hasn't."""
        if self._stale or self._now_seconds() >= self._due_seconds:
            self.publish()

    def publish(self) -> None:
        """Write all values now."""
        if self._broken:
            return
        self._due_seconds = self._now_seconds() + PUBLISH_SECONDS
        self._stale = False
        try:
            state = self._snapshot()
            for metric in METRICS:
                self._write(metric, metric.read(state))
        except Exception as error:
            self._broken = True
            self._on_fault(error)

    def _write(self, metric: Metric, series: Series) -> None:
        for values, now in series.items():
            before = self._published.get((metric.name, values))
            if before == now:
                continue
            child = self._made[metric.name].labels(*self._labels, *values)
            if metric.kind == "gauge":
                child.set(now)
            else:
                child.inc(now - (before or 0.0))
            self._published[metric.name, values] = now


class ModeOnDecodeLine(logging.Filter):
    """Adds to SGLang's decode log line the mode of the steps since the line before.

    Args:
        start: What the line begins with.
        steps: Steps by mode since the start, kept up to date.
    """

    def __init__(self, start: str, steps: Mapping[Mode, int]) -> None:
        super().__init__()
        self._start = start
        self._steps = steps
        self._seen: Counter[Mode] = Counter()

    def filter(self, record: logging.LogRecord) -> bool:
        if isinstance(record.msg, str) and record.msg.startswith(self._start):
            spec, plain = (self._steps[mode] - self._seen[mode] for mode in (Mode.SPEC, Mode.PLAIN))
            self._seen = Counter(self._steps)
            mode = f"mixed {spec} spec/{plain} plain" if spec and plain else "plain" if plain else "spec"
            record.msg += f", mode: {mode}"
        return True

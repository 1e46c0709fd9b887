"""Speed bounds, written down before the runs that are to meet them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from bench.ramp.outcome import most_switches_a_change
from bench.results import Figure, Results, Row, by_turn

GRID = (1, 2, 4, 8, 16, 32, 64, 128, 256)
_FROM_8 = tuple(c for c in GRID if c >= 8)

MODEL_SHAPE = "llama-8b"
GPU = "H200"
RELEASE = "0.5.14"
MOST_REQUESTS = 256

Place = tuple[str, int]
"""Where a bound holds: an attention backend or a case, and requests at once."""


class AnyBound(Protocol):
    """Something that is to be reached at each of some places."""

    @property
    def group(self) -> str:
        """The piece of work it belongs to."""

    @property
    def name(self) -> str:
        """What has to be reached, in a few words."""

    @property
    def tool(self) -> str:
        """The module whose result files tell."""

    @property
    def least_repeats(self) -> int:
        """Repeats that a figure needs to count."""

    @property
    def places(self) -> tuple[Place, ...]:
        """Where it is to be reached."""

    def counts(self, results: Results) -> bool:
        """Whether a file was measured on what the bound speaks of."""

    def figure(self, results: Results, place: Place) -> Figure | None:
        """What a file says of a place; None where it says nothing."""

    def met(self, value: float) -> bool:
        """Whether a value is good enough."""


@dataclass(frozen=True)
class Bound:
    """A ratio of two modes' decode rates that is to be reached everywhere it is asked for.

    Attributes:
        group: The piece of work it belongs to.
        least: The ratio has to be at least this, or above it where ``strict``.
        by_step: Compare decode steps instead of tokens: for two modes that both speculate.
        accept_length: Simulated tokens a verify step; None where neither mode verifies.
        release: Of SGLang.
    """

    group: str
    mode: str
    reference: str
    least: float
    backends: tuple[str, ...]
    concurrencies: tuple[int, ...]
    strict: bool = False
    by_step: bool = False
    accept_length: float | None = None
    release: str = RELEASE

    tool = "bench.sweep"
    least_repeats = 2

    def met(self, value: float) -> bool:
        """Whether a ratio is good enough."""
        return value > self.least if self.strict else value >= self.least

    @property
    def places(self) -> tuple[Place, ...]:
        """Every backend at every concurrency."""
        return tuple((backend, concurrency) for backend in self.backends for concurrency in self.concurrencies)

    def counts(self, results: Results) -> bool:
        """Whether a file was measured on what the bound speaks of."""
        accept_length = results.header["settings"]["simulate_accept_length"]
        return on_the_gpu(results, self.release) and self.accept_length in (None, accept_length)

    def figure(self, results: Results, place: Place) -> Figure | None:
        """The ratio at a backend and concurrency."""
        backend, concurrency = place
        return results.ratio(backend, self.mode, self.reference, concurrency, by_step=self.by_step)

    @property
    def name(self) -> str:
        unit = ", by step" if self.by_step else ""
        accept = f", accept length {self.accept_length}" if self.accept_length else ""
        release = f", SGLang {self.release}" if self.release != RELEASE else ""
        return f"{self.mode} / {self.reference} {'>' if self.strict else '>='} {self.least}{unit}{accept}{release}"


@dataclass(frozen=True)
class EnvelopeBound(Bound):
    """A ratio of decode rates to the faster one of two references at each place.

    Attributes:
        other: The second reference.
    """

    other: str = "spec"

    @property
    def name(self) -> str:
        accept = f", accept length {self.accept_length}" if self.accept_length else ""
        return f"{self.mode} / the better of {self.reference} and {self.other} >= {self.least}{accept}"

    def figure(self, results: Results, place: Place) -> Figure | None:
        """The ratio at a backend and concurrency."""
        backend, concurrency = place
        return results.ratio_to_better(backend, self.mode, (self.reference, self.other), concurrency)


def on_the_gpu(results: Results, release: str = RELEASE) -> bool:
    """Whether a file was measured with the model shape and on the GPU that the bounds speak of."""
    settings, machine = results.header["settings"], results.header["host"]
    return (
        machine["packages"].get("sglang") == release
        and settings["model_shape"] == MODEL_SHAPE
        and settings["device"] == "cuda"
        and settings.get("tp_size", 1) == 1
        and GPU in (machine["gpu"] or "")
    )


@dataclass(frozen=True)
class HostBound:
    """Host time that the hooks may add to a decode step, on whatever machine it is measured.

    Attributes:
        cases: Of :mod:`bench.overhead.step`.
        most_us: Microseconds by batch size.
    """

    group: str
    cases: tuple[str, ...]
    most_us: float
    batch_sizes: tuple[int, ...]

    tool = "bench.overhead"
    least_repeats = 2

    @property
    def name(self) -> str:
        return f"host time added to a step <= {self.most_us:g} us"

    @property
    def places(self) -> tuple[Place, ...]:
        """Every case at every batch size."""
        return tuple((case, size) for case in self.cases for size in self.batch_sizes)

    def counts(self, results: Results) -> bool:  # noqa: ARG002  (the protocol's shape)
        """Every machine's figure counts."""
        return True

    def figure(self, results: Results, place: Place) -> Figure | None:
        """Microseconds in one case at one batch size."""
        rows = [row for row in results.of_kind("measurement") if (row["case"], row["batch_size"]) == place]
        values = [repeat["added_us"] for row in rows for repeat in row["repeats"]]
        return Figure.level(values, " us") if values else None

    def met(self, value: float) -> bool:
        """Whether it is short enough."""
        return value <= self.most_us


@dataclass(frozen=True)
class HttpBound:
    """Something to be reached through the HTTP server, on every backend."""

    group: str
    mode: str
    backends: tuple[str, ...]

    @property
    def places(self) -> tuple[Place, ...]:
        """Every backend."""
        return tuple((backend, MOST_REQUESTS) for backend in self.backends)

    def counts(self, results: Results) -> bool:
        """Whether a file was measured on what the bound speaks of."""
        return on_the_gpu(results) and results.header["settings"]["max_running_requests"] == MOST_REQUESTS


@dataclass(frozen=True)
class ServeBound(HttpBound):
    """A ratio of two modes' throughput, all requests sent at once."""

    reference: str
    least: float

    tool = "bench.serve"
    least_repeats = 2

    @property
    def name(self) -> str:
        return f"{self.mode} / {self.reference} >= {self.least}, end to end through HTTP"

    def figure(self, results: Results, place: Place) -> Figure | None:
        """The ratio on a backend."""
        rows = [r for r in results.of_kind("measurement") if (r["backend"], r["request_rate"]) == (place[0], "inf")]
        ours, theirs = (
            by_turn(
                (row for row in rows if row["mode"] == mode),
                lambda row: (run["output_tokens_per_s"] for run in row["repeats"]),
            )
            for mode in (self.mode, self.reference)
        )
        return Figure.ratio(ours, theirs) if ours and theirs else None

    def met(self, value: float) -> bool:
        """Whether a ratio is good enough."""
        return value >= self.least


@dataclass(frozen=True)
class RampBound(HttpBound):
    """What a mode is to reach over the ramp against the better one of no and constant speculation.

    Attributes:
        by_latency: Compare the mean time of a request instead of the tokens served: that of a server which keeps up
            differs even where its tokens can't.
    """

    least: float
    by_latency: bool = False

    tool = "bench.ramp"
    least_repeats = 2

    @property
    def name(self) -> str:
        what = "mean request latency" if self.by_latency else "tokens served"
        return f"{self.mode} / the better of base and spec >= {self.least}, {what} over the ramp"

    def figure(self, results: Results, place: Place) -> Figure | None:
        """The ratio on a backend; the better one is chosen after the fact."""
        rows = [row for row in results.of_kind("measurement") if row["backend"] == place[0]]
        ours, base, spec = (
            by_turn((row for row in rows if row["mode"] == mode), lambda row: (self._rate(row),))
            for mode in (self.mode, "base", "spec")
        )
        if not (ours and base and spec):
            return None
        return Figure.ratio(ours, base, spec)

    def _rate(self, row: Row) -> float:
        return 1000 / float(row["latency_ms"]["mean"]) if self.by_latency else float(row["window_tokens"])

    def met(self, value: float) -> bool:
        """Whether a ratio is good enough."""
        return value >= self.least


@dataclass(frozen=True)
class SwitchBound(HttpBound):
    """How often a mode may switch over the ramp: so many times a change of the load."""

    most: int

    tool = "bench.ramp"
    least_repeats = 1

    @property
    def name(self) -> str:
        return f"{self.mode}: at most {self.most} switch a change of the load"

    def figure(self, results: Results, place: Place) -> Figure | None:
        """The most switches that answer one change, of all runs: each one counts, whatever the others were."""
        rows = [r for r in results.of_kind("measurement") if (r["backend"], r["mode"]) == (place[0], self.mode)]
        most = max((float(most_switches_a_change(results, row)) for row in rows), default=None)
        return None if most is None else Figure(most, most, most, len(rows), " switches")

    def met(self, value: float) -> bool:
        """Whether it is seldom enough."""
        return value <= self.most


HOOKED_STEPS = ("policy-spec", "spec-step", "plain-step", "auto-spec-step", "auto-plain-step", "policy-plain")


def _one_mode_for_ever(group: str, backends: tuple[str, ...], release: str) -> tuple[Bound, Bound]:
    plain = Bound(group, "ours-plain", "base", 0.97, backends, (8, 64, 256), release=release)
    return plain, replace(plain, mode="ours-spec", reference="spec", least=0.99, by_step=True, accept_length=2.5)


BOUNDS: tuple[AnyBound, ...] = (
    # A: the main job. E: the same on other releases.
    *_one_mode_for_ever("A", ("fa3", "triton"), RELEASE),
    *_one_mode_for_ever("E", ("fa3",), "0.5.17"),
    *_one_mode_for_ever("E", ("fa3",), "0.5.23"),
    # B: the draft stays true across plain phases.
    Bound("B", "ours-threshold", "base", 0.975, ("fa3",), (64, 256)),
    # At one request the threshold of one request leaves it speculative.
    Bound("B", "ours-threshold", "upstream-zero", 1.0, ("fa3",), GRID[1:], strict=True),
    # C: as fast as the better of the two, at every load.
    Bound("C", "ours-threshold", "upstream-zero", 1.0, ("triton", "flashinfer"), GRID[1:], strict=True),
    Bound("C", "ours-plain", "base", 0.98, ("fa3", "triton", "flashinfer"), _FROM_8),
    Bound("C", "ours-spec", "spec", 0.995, ("fa3", "triton", "flashinfer"), _FROM_8, by_step=True, accept_length=2.5),
    Bound("C", "ours-spec", "spec", 0.995, ("fa3", "triton", "flashinfer"), _FROM_8, by_step=True, accept_length=1.6),
    HostBound("C", ("inactive",), 1.0, (1, 16, 64, 256)),
    HostBound("C", HOOKED_STEPS, 15.0, (1,)),
    HostBound("C", HOOKED_STEPS, 60.0, (256,)),
    ServeBound("C", "ours-plain", ("fa3", "triton"), "base", 0.97),
    ServeBound("C", "ours-threshold", ("fa3", "triton"), "base", 0.97),
    # D: no threshold to guess.
    EnvelopeBound("D", "ours-auto", "base", 0.97, ("fa3", "triton"), GRID, accept_length=2.5),
    EnvelopeBound("D", "ours-auto", "base", 0.97, ("fa3", "triton"), GRID, accept_length=1.6),
    RampBound("D", "ours-auto", ("fa3", "triton"), 0.97),
    RampBound("D", "ours-auto", ("fa3", "triton"), 0.97, by_latency=True),
    SwitchBound("D", "ours-auto", ("fa3", "triton"), 1),
)

"""Result files: JSON lines of kind header, server, measurement, numbers, cores, error, end."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from statistics import fmean, median, stdev
from typing import Any

RESULTS = Path(__file__).parent / "results"

Row = dict[str, Any]

Turn = tuple[int, int]
"""A round and a pass: what is measured in the same one is closer in time than what is not."""

Samples = Mapping[Turn, Sequence[float]]
"""What was measured, by the turn; each has at least one value."""


def append_row(path: Path, row: Row) -> None:
    """Add one row; it is on disk when this returns, whatever happens to the process."""
    # In one piece: servers that start at the same time write to the same file.
    with path.open("ab", buffering=0) as file:
        file.write(f"{json.dumps(row, default=str)}\n".encode())


def now() -> str:
    """The time in UTC, to the second."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def without_paths(text: str) -> str:
    """Text with each absolute path cut to its last part: where a machine keeps things is nobody's business."""
    return re.sub(r"(?<![\w.:/])/(?:[\w.+@=~-]+/)+(?=[\w.+@=~-])", "", text)


@dataclass(frozen=True)
class Series:
    """All repeats of one mode at one backend and concurrency in one file.

    Attributes:
        tokens_per_s: Decode tokens a second, one value a repeat.
        steps_per_s: Decode steps a second, one value a repeat.
        expected_tokens_per_s: Tokens a second that the steps would have given at the nominal accept length.
    """

    tokens_per_s: Samples
    steps_per_s: Samples
    expected_tokens_per_s: Samples


@dataclass(frozen=True)
class Figure:
    """What a bound is held against, from all repeats in one file.

    Attributes:
        value: Of all repeats, or turns.
        low: The lowest that it becomes when any one repeat (of either side), or turn, is left out.
        high: The highest that it becomes so.
        repeats: Repeats (of the side that has fewer), or turns.
        counted: Which of these.
    """

    value: float
    low: float
    high: float
    repeats: int
    unit: str = ""
    counted: str = "repeats"

    @classmethod
    def ratio(cls, ours: Samples, *theirs: Samples) -> Figure:
        """Ratio of a series to another, or to the better one of several.

        Where they have several turns in common, each turn has a ratio of medians, and the median of these counts: a
        host that is slow in one turn is so for all. With one turn in common, that alone counts; with none, all do.
        """
        common = sorted(set(ours).intersection(*theirs))
        known = [{turn: each[turn] for turn in common} if common else each for each in (ours, *theirs)]
        mine, reference = known[0], max(known[1:], key=lambda samples: median(flat(samples)))
        if len(common) > 1:
            return cls.level(turn_ratios(mine, reference), counted="turns")
        a, b = flat(mine), flat(reference)
        variants = [median(x) / median(y) for x in _leaving_one_out(a) for y in _leaving_one_out(b)]
        value = median(a) / median(b)
        return cls(value, min(value, *variants), max(value, *variants), min(len(a), len(b)))

    @classmethod
    def level(cls, values: Sequence[float], unit: str = "", counted: str = "repeats") -> Figure:
        """Median of a series of at least one value."""
        variants = [median(kept) for kept in _leaving_one_out(values)]
        value = median(values)
        return cls(value, min(value, *variants), max(value, *variants), len(values), unit, counted)

    def __str__(self) -> str:
        digits = 2 if self.unit else 4
        value, low, high = (f"{number:.{digits}f}" for number in (self.value, self.low, self.high))
        repeats = f"{self.repeats} {self.counted}" if self.repeats > 1 else "1 run"
        return f"{value}{self.unit} ({low} to {high}, {repeats})"


@dataclass(frozen=True)
class Overall:
    """A ratio over all concurrencies and turns: what two servers differ by at one of them may be chance.

    Attributes:
        ratio: The geometric mean of those of single turns.
        standard_error: Of it, relative, as if no two turns had anything in common.
        turns: How many, at all concurrencies.
    """

    ratio: float
    standard_error: float
    turns: int

    def __str__(self) -> str:
        return f"{self.ratio:.3f} ± {self.standard_error:.3f}"


def flat(samples: Samples) -> list[float]:
    """All values, whatever the turn."""
    return [value for turn in sorted(samples) for value in samples[turn]]


def turn_ratios(ours: Samples, theirs: Samples) -> list[float]:
    """The ratio of the medians in each turn that both have."""
    return [median(ours[turn]) / median(theirs[turn]) for turn in sorted(set(ours) & set(theirs))]


def by_turn(rows: Iterable[Row], values: Callable[[Row], Iterable[float]]) -> Samples:
    """What measured rows have to say, by the turn.

    Args:
        values: Of a row.
    """
    samples: dict[Turn, list[float]] = {}
    for row in rows:
        samples.setdefault((row["round"], row.get("pass", 0)), []).extend(values(row))
    return {turn: values for turn, values in samples.items() if values}


def _leaving_one_out(values: Sequence[float]) -> list[list[float]]:
    if len(values) == 1:
        return [list(values)]
    return [[v for j, v in enumerate(values) if j != i] for i in range(len(values))]


class Results:
    """One result file."""

    def __init__(self, rows: Iterable[Row], name: str = "") -> None:
        self.name = name
        self.rows = list(rows)

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read a file; a last line that was cut off is dropped."""
        *whole, cut_off = path.read_text().split("\n")
        del cut_off  # empty where the file ends with its last line
        return cls(map(json.loads, whole), path.name)

    @property
    def header(self) -> Row:
        """The file's first row."""
        if not self.rows or self.rows[0].get("kind") != "header":
            raise ValueError(f"{self.name}: the first line is no header")
        return self.rows[0]

    @property
    def tool(self) -> str | None:
        """The module that wrote this file."""
        return self.rows[0].get("tool") if self.rows else None

    @property
    def measurements(self) -> list[Row]:
        """Measured rows, except of a server that turned out to compute no numbers."""
        broken = {_server_of(r) for r in self.of_kind("numbers") if not r["finite_logprobs"]}
        return [r for r in self.of_kind("measurement") if _server_of(r) not in broken]

    def of_kind(self, kind: str) -> list[Row]:
        """Rows of one kind."""
        return [row for row in self.rows if row.get("kind") == kind]

    def backends(self) -> list[str]:
        """Attention backends with a measurement, in the order they were measured."""
        return list(dict.fromkeys(row["backend"] for row in self.measurements))

    def modes(self) -> list[str]:
        """Modes with a measurement, in the order they were measured."""
        return list(dict.fromkeys(row["mode"] for row in self.measurements))

    def concurrencies(self, backend: str) -> list[int]:
        """Concurrencies measured on a backend, ascending."""
        return sorted({row["concurrency"] for row in self.measurements if row["backend"] == backend})

    def series(self, backend: str, mode: str, concurrency: int) -> Series | None:
        """All repeats of all rounds and passes of one mode, or None where it was not measured."""
        key = (backend, mode, concurrency)
        rows = [r for r in self.measurements if (r["backend"], r["mode"], r["concurrency"]) == key]
        if not any(row["repeats"] for row in rows):
            return None
        return Series(
            tokens_per_s=by_turn(rows, lambda row: (r["tokens_per_s"] for r in row["repeats"])),
            steps_per_s=by_turn(rows, lambda row: (1000 / r["step_ms"] for r in row["repeats"])),
            expected_tokens_per_s=by_turn(
                rows, lambda row: (r.get("expected_tokens_per_s", r["tokens_per_s"]) for r in row["repeats"])
            ),
        )

    def ratio(
        self, backend: str, mode: str, reference: str, concurrency: int, *, by_step: bool = False
    ) -> Figure | None:
        """How fast a mode decodes against another, measured in this file.

        Args:
            by_step: Compare decode steps instead of tokens. That is the fair comparison of two modes that
                speculate: how many tokens a verify step accepts is drawn at random when it is simulated.
        """
        ours, theirs = (self._rates(backend, name, concurrency, by_step) for name in (mode, reference))
        return Figure.ratio(ours, theirs) if ours and theirs else None

    def overall(self, backend: str, mode: str, reference: str, *, by_step: bool = False) -> Overall | None:
        """The same over all concurrencies; None where too few turns were measured of both.

        Args: as of :meth:`ratio`.
        """
        logs: list[float] = []
        for concurrency in self.concurrencies(backend):
            ours, theirs = (self._rates(backend, name, concurrency, by_step) for name in (mode, reference))
            logs += map(math.log, turn_ratios(ours, theirs))
        return Overall(math.exp(fmean(logs)), stdev(logs) / math.sqrt(len(logs)), len(logs)) if len(logs) > 2 else None

    def _rates(self, backend: str, mode: str, concurrency: int, by_step: bool) -> Samples:
        """What :meth:`ratio` compares; empty where it was not measured."""
        series = self.series(backend, mode, concurrency)
        if series is None:
            return {}
        return series.steps_per_s if by_step else series.tokens_per_s

    def ratio_to_better(self, backend: str, mode: str, references: Sequence[str], concurrency: int) -> Figure | None:
        """How fast a mode decodes against the fastest of several; None where one was not measured in this file.

        In tokens expected at the nominal accept length: the draws of simulated acceptance are luck.
        """
        ours = self.series(backend, mode, concurrency)
        others = [self.series(backend, reference, concurrency) for reference in references]
        known = [other.expected_tokens_per_s for other in others if other is not None]
        if ours is None or len(known) < len(references):
            return None
        return Figure.ratio(ours.expected_tokens_per_s, *known)


def _server_of(row: Row) -> tuple[Any, ...]:
    return row["backend"], row["mode"], row["round"]

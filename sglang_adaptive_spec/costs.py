"""Seconds that a decode step takes, by mode, batch-size bucket and context-length class."""

from __future__ import annotations

import math
from bisect import bisect_left, insort
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from sglang_adaptive_spec.modes import Mode

BLOCK_STEPS = 8
"""Samples of one cell that are taken in together: fewer than half of them can't move the median."""

_CLIP = 1.5
"""A sample counts as at most this many medians, and no less than one over it. Not the median alone, because the
draft's catch-up makes every so many plain steps longer, and that is part of the price of plain mode."""
_MOST_CHANGE = 2.0
"""A block changes a cell as if it had shown at most this many times, or one over it, what was expected."""
_LEAST_WEIGHT = 0.25
"""Of a block, against all that came before: a cell forgets within some 30 steps."""
_LONGEST_STEP_SECONDS = 60.0
_SHORT_CONTEXT_BITS = 9
"""Contexts below 512 tokens are one class; from there on each doubling starts another."""

_OTHER_MODE_DISTANCE = math.log(1.5)

# Relative doubt about an estimate, by where it comes from.
_SERVED_DOUBT = 0.02
_AGED_DOUBT = 0.1
_AGED_AFTER_SAMPLES = 65536
_SEEDED_DOUBT = 0.05
_DERIVED_DOUBT = 0.1
_TRANSFERRED_DOUBT = 0.3
"""From another context class."""
_NEVER_SERVED_DOUBT = 0.5
"""At least, in place of the three before, for a mode of which serving has shown nothing yet."""


def _typical_tokens(context: int) -> int:
    """The middle of a context class."""
    return 3 << (_SHORT_CONTEXT_BITS + context - 2) if context else 1 << (_SHORT_CONTEXT_BITS - 1)


def _changed(seconds: float, by_seconds: float) -> float:
    """A step time that something takes so much longer, or less: no measurement of another makes it much shorter."""
    return max(seconds + by_seconds, seconds / _MOST_CHANGE)


class Estimate(NamedTuple):
    """An expected step time.

    Attributes:
        seconds: The step time.
        doubt: How far off it may be, relative; infinite where nothing near was ever measured.
        source: ``served``, ``start-up`` or ``derived`` (from neighbours, or from what the other mode shows).
    """

    seconds: float
    doubt: float
    source: str


@dataclass(slots=True)
class _Cell:
    """One bucket and context class of one mode.

    Attributes:
        seeded: Seconds measured at start-up.
        served: Seconds that serving shows, smoothed over blocks.
        blocks: Blocks taken in.
        window: Samples that wait for their block to be full.
        taken_at: Samples of all cells when the last block was taken in.
    """

    seeded: float | None = None
    served: float | None = None
    blocks: int = 0
    window: list[float] = field(default_factory=list)
    taken_at: int = 0


class StepCosts:
    """Step times by mode: measured at start-up, then corrected by what serving shows.

    A cell that was never measured is derived from its neighbours, and from the other mode where that knows more:
    verifying reads the KV cache once, as a plain step does, so a longer context adds about the same seconds to
    both. What serving adds to the start-up measurement of one cell (the host's share) it is taken to add to the
    mode's other cells, in proportion; and to those of the other mode while that has not served.

    No clock is read here and nothing is drawn: the same calls give the same answers on every rank.

    Args:
        buckets: Padded batch sizes of each mode's CUDA graphs. Where a mode has none for a size, powers of two.
    """

    def __init__(self, buckets: Mapping[Mode, Sequence[int]] | None = None) -> None:
        self.version = 0
        """Grows whenever an answer may have changed."""
        self.blocks = dict.fromkeys(Mode, 0)
        """What serving has shown of each mode, in blocks of steps."""
        self._samples = 0
        # By bucket and context class; made when its first time comes in.
        self._cells: dict[Mode, defaultdict[tuple[int, int], _Cell]] = {mode: defaultdict(_Cell) for mode in Mode}
        # What serving takes, as a multiple of what start-up measured; None while it can't be told.
        self._level: dict[Mode, float | None] = dict.fromkeys(Mode)
        self._bucket_of: dict[Mode, list[int]] = {}
        for mode in Mode:
            sizes = sorted(set((buckets or {}).get(mode, ())))
            largest = sizes[-1] if sizes else 0
            self._bucket_of[mode] = [sizes[bisect_left(sizes, requests)] for requests in range(largest + 1) if sizes]
        # Buckets measured either way, in order, by mode and context class.
        self._known: dict[Mode, dict[int, list[int]]] = {mode: {} for mode in Mode}

    def bucket(self, mode: Mode, requests: int) -> int:
        """The batch size that a step of so many requests is padded to."""
        sizes = self._bucket_of[mode]
        if requests < len(sizes):
            return sizes[requests]
        return 1 << (requests - 1).bit_length() if requests > 1 else 1

    @staticmethod
    def context_class(context_tokens: int) -> int:
        """The coarse class of a mean context length; 0 for short ones, and where it is not known."""
        return (context_tokens >> _SHORT_CONTEXT_BITS).bit_length() if context_tokens > 0 else 0

    # --- what is measured --------------------------------------------------------------------------------

    def seed(self, mode: Mode, requests: int, context_tokens: int, seconds: float) -> None:
        """Take a start-up measurement; it holds until serving shows otherwise."""
        if 0.0 < seconds < _LONGEST_STEP_SECONDS:
            key = self.bucket(mode, requests), self.context_class(context_tokens)
            self._cells[mode][key].seeded = seconds
            self._learned(mode, key)

    def observe(self, mode: Mode, requests: int, context_tokens: int, *seconds: float) -> None:
        """Take steps of a serving server. No single sample matters, whatever its value."""
        key = self.bucket(mode, requests), self.context_class(context_tokens)
        cell = self._cells[mode][key]
        for each in seconds:
            if not 0.0 < each < _LONGEST_STEP_SECONDS:  # false for NaN, too
                continue
            self._samples += 1
            cell.window.append(each)
            if len(cell.window) == BLOCK_STEPS:
                self._take_block(mode, cell)
                self._learned(mode, key)

    def _take_block(self, mode: Mode, cell: _Cell) -> None:
        window = sorted(cell.window)
        middle = (window[BLOCK_STEPS // 2 - 1] + window[BLOCK_STEPS // 2]) / 2
        low, high = middle / _CLIP, middle * _CLIP
        if window[0] < low or window[-1] > high:
            window = [min(max(s, low), high) for s in window]
        shown = sum(window) / BLOCK_STEPS
        expected = self._value(mode, cell)
        if expected is not None:
            shown = min(max(shown, expected / _MOST_CHANGE), expected * _MOST_CHANGE)
            # What was expected counts as one block.
            shown = expected + (shown - expected) * max(_LEAST_WEIGHT, 1 / (cell.blocks + 2))
        cell.served = shown
        cell.blocks += 1
        cell.taken_at = self._samples
        cell.window.clear()
        self.blocks[mode] += 1
        if cell.seeded is not None:
            ratio, level = shown / cell.seeded, self._level[mode]
            self._level[mode] = ratio if level is None else level + (ratio - level) * _LEAST_WEIGHT

    def _learned(self, mode: Mode, key: tuple[int, int]) -> None:
        self.version += 1
        bucket, context = key
        sizes = self._known[mode].setdefault(context, [])
        if bucket not in sizes:
            insort(sizes, bucket)

    def _value(self, mode: Mode, cell: _Cell) -> float | None:
        if cell.served is not None or cell.seeded is None:
            return cell.served
        # While only one mode has served, both are taken to be off by as much: their ratio is what was measured.
        level = self._level[mode] or self._level[mode.other] or 1.0
        return cell.seeded * level

    # --- what is expected --------------------------------------------------------------------------------

    def seconds(self, mode: Mode, requests: int, context_tokens: int) -> float | None:
        """The expected step time; None while the mode was never measured."""
        estimate = self.estimate(mode, requests, context_tokens)
        return estimate and estimate.seconds

    def estimate(self, mode: Mode, requests: int, context_tokens: int) -> Estimate | None:
        """The expected step time and how much to trust it; None while the mode was never measured."""
        bucket, context = self.bucket(mode, requests), self.context_class(context_tokens)
        cell = self._cells[mode].get((bucket, context))
        if cell is not None:
            if cell.served is not None:
                age = min(1.0, (self._samples - cell.taken_at) / _AGED_AFTER_SAMPLES)
                return Estimate(cell.served, _SERVED_DOUBT + (_AGED_DOUBT - _SERVED_DOUBT) * age, "served")
            if cell.seeded is not None:
                value = self._value(mode, cell)
                assert value is not None, "seeded"
                return Estimate(value, self._doubt(mode, _SEEDED_DOUBT), "start-up")
        return self._derive(mode, bucket, context)

    def _doubt(self, mode: Mode, doubt: float) -> float:
        return doubt if self.blocks[mode] else max(doubt, _NEVER_SERVED_DOUBT)

    def _derive(self, mode: Mode, bucket: int, context: int) -> Estimate | None:
        known = self._known[mode]
        if not known:
            return None
        at = self._at(mode, bucket, context)
        if at is not None:
            seconds, between = at
            return Estimate(seconds, self._doubt(mode, _DERIVED_DOUBT if between else _TRANSFERRED_DOUBT), "derived")
        home = max(known, key=lambda c: (len(known[c]), -c))
        base, inside = self._along(mode, bucket, home)
        if not inside:
            base = _changed(base, self._growth(mode.other, self._edge(mode, bucket, home), bucket, home))
        seconds = _changed(base, self._context_extra(mode, bucket, home, context))
        return Estimate(seconds, self._doubt(mode, _TRANSFERRED_DOUBT) if inside else math.inf, "derived")

    def _across(self, mode: Mode, bucket: int, context: int) -> tuple[float, bool] | None:
        """Seconds on a line over context classes, and whether one is known on either side; None below two classes.

        Attention reads the whole KV cache once a step, so a step's time grows linearly with the context.
        """
        known = []
        for each in sorted(self._known[mode]):
            seconds, inside = self._along(mode, bucket, each)
            if inside:
                known.append((_typical_tokens(each), seconds))
        if len(known) < 2:
            return None
        at = _typical_tokens(context)
        right = bisect_left(known, (at, 0.0))
        inside = 0 < right < len(known)
        # Outside, the longest line that there is: two neighbours may differ by little more than chance.
        (low, low_seconds), (high, high_seconds) = known[right - 1 : right + 1] if inside else (known[0], known[-1])
        start, start_seconds = (high, high_seconds) if right == len(known) else (low, low_seconds)
        slope = max(0.0, (high_seconds - low_seconds) / (high - low))
        return _changed(start_seconds, slope * (at - start)), inside

    def _context_extra(self, mode: Mode, bucket: int, home: int, context: int) -> float:
        """Seconds that a context class adds to what a mode's best-known class takes."""
        # The same class for both modes, or the one that knows a long context would look slow beside the other.
        nearest = min(
            self._known[Mode.SPEC].keys() | self._known[Mode.PLAIN].keys(), key=lambda c: (abs(c - context), c)
        )
        # From where this bucket is known or the nearest one to it; the other mode is as far as half as large again.
        own, others = self._edge(mode, bucket, nearest), self._edge(mode.other, bucket, nearest)
        places = [
            (abs(math.log(own / bucket)), mode, own),
            (_OTHER_MODE_DISTANCE, mode.other, bucket),
            (_OTHER_MODE_DISTANCE + abs(math.log(others / bucket)), mode.other, others),
        ]
        for _, whose, at in sorted(places):
            there, here = (self._at(whose, at, each) for each in (context, home))
            if there is not None and here is not None:
                return there[0] - here[0]
        return 0.0

    def _at(self, mode: Mode, bucket: int, context: int) -> tuple[float, bool] | None:
        """Seconds between measurements or on a line beyond them, and which; None where a mode has neither."""
        seconds, inside = self._along(mode, bucket, context)
        return (seconds, True) if inside else self._across(mode, bucket, context)

    def _growth(self, mode: Mode, start: int, bucket: int, context: int) -> float:
        """Seconds that a mode takes longer for one bucket than for another; 0 where it does not know both."""
        (there, inside), (here, also_inside) = self._along(mode, bucket, context), self._along(mode, start, context)
        return there - here if inside and also_inside else 0.0

    def _edge(self, mode: Mode, bucket: int, context: int) -> int:
        sizes = self._known[mode].get(context)
        return min(max(bucket, sizes[0]), sizes[-1]) if sizes else bucket

    def _along(self, mode: Mode, bucket: int, context: int) -> tuple[float, bool]:
        """Seconds by linear interpolation between known buckets, and whether there is one on either side."""
        sizes = self._known[mode].get(context)
        if not sizes:
            return 0.0, False
        right = bisect_left(sizes, bucket)
        if right == len(sizes):
            return self._known_seconds(mode, sizes[-1], context), False
        above = self._known_seconds(mode, sizes[right], context)
        if sizes[right] == bucket:
            return above, True
        if right == 0:
            return above, False
        below = self._known_seconds(mode, sizes[right - 1], context)
        return below + (bucket - sizes[right - 1]) / (sizes[right] - sizes[right - 1]) * (above - below), True

    def _known_seconds(self, mode: Mode, bucket: int, context: int) -> float:
        value = self._value(mode, self._cells[mode][bucket, context])
        assert value is not None, "known"
        return value

    # --- for people and files ----------------------------------------------------------------------------

    def table(self) -> list[dict[str, Any]]:
        """One row a mode, bucket and context class, as plain JSON types.

        ``requests`` is the bucket, ``context_tokens`` the shortest of its class, ``seconds`` what is expected;
        ``start_up_seconds`` and ``served_seconds`` are None where that was not measured.
        """
        return [
            {
                "mode": mode.value,
                "requests": bucket,
                "context_tokens": 1 << (_SHORT_CONTEXT_BITS + context - 1) if context else 0,
                "seconds": value,
                "start_up_seconds": cell.seeded,
                "served_seconds": cell.served,
                "served_steps": cell.blocks * BLOCK_STEPS,
            }
            for mode, cells in self._cells.items()
            for (bucket, context), cell in sorted(cells.items())
            if (value := self._value(mode, cell)) is not None
        ]

    def to_json(self) -> dict[str, Any]:
        """What the next start can take as its start-up measurement, as plain JSON types."""
        columns = ("mode", "requests", "context_tokens", "seconds")
        return {"steps": [{name: row[name] for name in columns} for row in self.table()]}

    @classmethod
    def from_json(cls, saved: Mapping[str, Any], buckets: Mapping[Mode, Sequence[int]] | None = None) -> StepCosts:
        """Costs seeded with what :meth:`to_json` gave.

        Raises:
            ValueError: ``saved`` is nothing of the kind.
        """
        costs = cls(buckets)
        try:
            for row in saved["steps"]:
                requests, context_tokens, seconds = row["requests"], row["context_tokens"], row["seconds"]
                if not (requests >= 1 and context_tokens >= 0 and 0.0 < seconds < _LONGEST_STEP_SECONDS):
                    raise ValueError(f"no step time: {row!r}")
                costs.seed(Mode(row["mode"]), requests, context_tokens, seconds)
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"no table of step times: {error!r}") from error
        return costs

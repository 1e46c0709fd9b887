"""Each speed bound with what was last measured: ``python -m bench.check [--group A]``.

Exit code 1 where a bound is missed, was never measured, or hangs on a single repeat.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bounds import BOUNDS, AnyBound, Place
from bench.host import tree_digest
from bench.results import RESULTS, Figure, Results


@dataclass(frozen=True)
class Verdict:
    """One bound at one place.

    Attributes:
        figure: What was measured last, or None.
        source: The file it is from.
    """

    bound: AnyBound
    place: Place
    figure: Figure | None = None
    source: Results | None = None

    @property
    def word(self) -> str:
        """``ok``, ``MISSED``, ``never`` measured, or ``UNSETTLED``: leaving one repeat out would decide otherwise.

        One hiccup of the host can make a figure look good as well as bad.
        """
        if self.figure is None:
            return "never"
        verdicts = {self.bound.met(value) for value in (self.figure.value, self.figure.low, self.figure.high)}
        if len(verdicts) > 1:
            return "UNSETTLED"
        return "ok" if verdicts.pop() else "MISSED"

    def line(self, digest: str | None) -> str:
        """The verdict for a reader.

        Args:
            digest: The plugin's as it is now, to tell a figure of an older one.
        """
        where, number = self.place
        if self.figure is None or self.source is None:
            return f"  {self.word:<9} {where:<10} {number:>4}"
        head = self.source.header
        of = head["host"]
        age = "" if of["plugin_digest"] == digest else ", another plugin than the present one"
        when = f"{head['started']}, {self.source.name}, plugin at {of['commit']}{age}"
        return f"  {self.word:<9} {where:<10} {number:>4}  {self.figure}  {when}"


def judge(bounds: Iterable[AnyBound], files: Sequence[Results]) -> Iterator[Verdict]:
    """A verdict for each bound and place.

    Both sides of a ratio are from one file: figures of different sessions don't compare.
    """
    newest_first = sorted(files, key=lambda results: str(results.rows[0].get("started")), reverse=True)
    for bound in bounds:
        usable = [results for results in newest_first if results.tool == bound.tool and bound.counts(results)]
        for place in bound.places:
            yield _judge_one(bound, place, usable)


def _judge_one(bound: AnyBound, place: Place, files: Iterable[Results]) -> Verdict:
    for results in files:
        figure = bound.figure(results, place)
        if figure is not None and figure.repeats >= bound.least_repeats:
            return Verdict(bound, place, figure, results)
    return Verdict(bound, place)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.check", description=__doc__)
    parser.add_argument("--group", "--issue", action="append", metavar="X", help="only bounds of this group (A to E)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the result files are")
    args = parser.parse_args(argv)
    bounds = [b for b in BOUNDS if not args.group or b.group in args.group]
    if not bounds:
        parser.error(f"no bound of group {', '.join(args.group)}")
    files = [results for results in map(Results.read, sorted(args.results.glob("*.jsonl"))) if results.rows]
    digest = tree_digest()
    verdicts = list(judge(bounds, files))
    for bound in bounds:
        print(f"{bound.group}: {bound.name}")
        for verdict in verdicts:
            if verdict.bound is bound:
                print(verdict.line(digest))
    words = Counter(verdict.word for verdict in verdicts)
    told = {"ok": "met", "MISSED": "missed", "UNSETTLED": "unsettled", "never": "never measured"}
    print("\n" + ", ".join(f"{words[word]} {meaning}" for word, meaning in told.items()))
    return 0 if words["ok"] == len(verdicts) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Each speed bound with its last measured ratio: ``python -m bench.check [--group A]``.

Exit code 1 where a bound is missed, was never measured, or hangs on a single repeat.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from bench.bounds import BOUNDS, GPU, MODEL_SHAPE, Bound
from bench.host import tree_digest
from bench.results import RESULTS, Ratio, Results


@dataclass(frozen=True)
class Verdict:
    """One bound at one backend and concurrency.

    Attributes:
        ratio: What was measured last, or None.
        source: The file it is from.
    """

    bound: Bound
    backend: str
    concurrency: int
    ratio: Ratio | None = None
    source: Results | None = None

    @property
    def word(self) -> str:
        """``ok``, ``MISSED``, ``never`` measured, or ``UNSETTLED``: leaving one repeat out would decide otherwise.

        One hiccup of the host can make a ratio look good as well as bad.
        """
        if self.ratio is None:
            return "never"
        verdicts = {self.bound.met(value) for value in (self.ratio.low, self.ratio.value, self.ratio.high)}
        if len(verdicts) > 1:
            return "UNSETTLED"
        return "ok" if verdicts.pop() else "MISSED"

    def line(self, digest: str | None) -> str:
        """The verdict for a reader.

        Args:
            digest: The plugin's as it is now, to tell a figure of an older one.
        """
        where = f"{self.backend:<10} {self.concurrency:>4}"
        if self.ratio is None or self.source is None:
            return f"  {self.word:<9} {where}"
        head = self.source.header
        of = head["host"]
        age = "" if of["plugin_digest"] == digest else ", another plugin than the present one"
        when = f"{head['started']}, {self.source.name}, plugin at {of['commit']}{age}"
        return f"  {self.word:<9} {where}  {self.ratio}  {when}"


def counts(results: Results, bound: Bound) -> bool:
    """Whether a file was measured on what a bound speaks of."""
    settings, machine = results.header["settings"], results.header["host"]
    accept = settings["simulate_accept_length"]
    return (
        settings["model_shape"] == MODEL_SHAPE
        and GPU in (machine["gpu"] or "")
        and settings["device"] == "cuda"
        and bound.accept_length in (None, accept)
    )


def judge(bounds: Iterable[Bound], files: Sequence[Results]) -> Iterator[Verdict]:
    """A verdict for each bound, backend and concurrency.

    Both sides of a ratio are from one file: figures of different sessions don't compare.
    """
    newest_first = sorted(files, key=lambda results: results.header["started"], reverse=True)
    for bound in bounds:
        usable = [results for results in newest_first if counts(results, bound)]
        for backend in bound.backends:
            for concurrency in bound.concurrencies:
                yield _judge_one(bound, backend, concurrency, usable)


def _judge_one(bound: Bound, backend: str, concurrency: int, files: Iterable[Results]) -> Verdict:
    for results in files:
        ratio = results.ratio(backend, bound.mode, bound.reference, concurrency, by_step=bound.by_step)
        if ratio is not None and ratio.repeats >= 2:
            return Verdict(bound, backend, concurrency, ratio, results)
    return Verdict(bound, backend, concurrency)


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.check", description=__doc__)
    parser.add_argument("--group", "--issue", action="append", metavar="X", help="only bounds of this group (A, B, C)")
    parser.add_argument("--results", type=Path, default=RESULTS, metavar="DIR", help="where the result files are")
    args = parser.parse_args(argv)
    bounds = [b for b in BOUNDS if not args.group or b.group in args.group]
    if not bounds:
        parser.error(f"no bound of group {', '.join(args.group)}")
    files = [r for r in map(Results.read, sorted(args.results.glob("*.jsonl"))) if r.is_sweep]
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

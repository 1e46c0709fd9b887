"""Host time that the plugin's hooks add to a decode step, in microseconds.

Each figure is the shortest of many rounds with the hooks less the shortest without: what else runs on the machine
only ever makes a round longer.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from bench import host
from bench.child import ROOT
from bench.results import RESULTS, Results, Row, append_row, now

HERE = Path(__file__).parent


class Options:
    """A pytest plugin that hands the command line to the measurement."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args = args

    @pytest.fixture(scope="session")
    def device(self) -> str:
        return str(self._args.device)

    @pytest.fixture(scope="session")
    def rounds(self) -> int:
        return int(self._args.rounds)

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        # The outer loop is the repeat: all of a case's repeats in a row would share what disturbs them.
        metafunc.parametrize("batch_size", self._args.batch_sizes)
        metafunc.parametrize("repeat", range(self._args.repeats))

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        items.sort(key=lambda item: item.callspec.params["repeat"])  # type: ignore[attr-defined]


def parse(argv: list[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.overhead", description=__doc__)
    sizes = lambda text: [int(part) for part in text.split(",")]  # noqa: E731
    parser.add_argument("--batch-sizes", type=sizes, default=[1, 16, 64, 256], metavar="N,M")
    parser.add_argument("--rounds", type=int, default=160, metavar="N", help="of 64 steps each, in a repeat")
    parser.add_argument("--repeats", type=int, default=5, metavar="N")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help="where the batch's tensors are")
    parser.add_argument("--out", type=Path, default=RESULTS / "cpu-overhead.jsonl", help="result file, written anew")
    return parser.parse_args(argv)


def measurements(benchmarks: Iterable[Mapping[str, Any]]) -> list[Row]:
    """Result rows from pytest-benchmark's: one a case and batch size, with every repeat.

    Args:
        benchmarks: The list of that name in its JSON.
    """
    shortest: dict[tuple[str, int], dict[int, dict[str, float]]] = defaultdict(lambda: defaultdict(dict))
    for one in benchmarks:
        asked = one["params"]
        shortest[asked["name"], asked["batch_size"]][asked["repeat"]][asked["side"]] = 1e6 * one["stats"]["min"]
    rows = []
    for (case, batch_size), repeats in shortest.items():
        values = [
            {
                "added_us": round(sides["hooked"] - sides.get("bare", 0.0), 3),
                **{f"{side}_us": round(us, 3) for side, us in sides.items()},
            }
            for _, sides in sorted(repeats.items())
        ]
        added_us = median(value["added_us"] for value in values)
        rows.append({"case": case, "batch_size": batch_size, "added_us": round(added_us, 2), "repeats": values})
    return rows


def markdown(results: Results) -> str:
    """What was measured, as a table."""
    head = results.header
    packages = head["host"]["packages"]
    rows = results.of_kind("measurement")
    sizes = sorted({row["batch_size"] for row in rows})
    lines = [
        f"# Host time added to a decode step, {head['started']}",
        "",
        (
            f"{head['host']['cpu']}; Python {head['host']['python']}; SGLang {packages['sglang']}, torch "
            f"{packages['torch']}; tensors on {head['settings']['device']}; plugin at {head['host']['commit']}. "
            f"Microseconds, median of {head['settings']['repeats']} repeats."
        ),
        "",
        "| case | " + " | ".join(f"batch {size}" for size in sizes) + " |",
        "| --- |" + " ---: |" * len(sizes),
    ]
    for case in dict.fromkeys(row["case"] for row in rows):
        cells = {row["batch_size"]: f"{row['added_us']:.1f}" for row in rows if row["case"] == case}
        lines.append(f"| {case} | " + " | ".join(cells.get(size, "") for size in sizes) + " |")
    return "\n".join(lines) + "\n"


def main(argv: list[str]) -> int:
    args = parse(argv)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = now()
    with tempfile.TemporaryDirectory(prefix="bench-") as work:
        raw = Path(work) / "benchmark.json"
        code = pytest.main(
            [
                str(HERE / "test_steps.py"),
                *("-c", str(ROOT / "pyproject.toml"), "-o", "addopts=", "-o", "timeout=0", "-p", "no:cacheprovider"),
                *("-q", "--no-header", "--benchmark-json", str(raw), "--benchmark-quiet", "-W", "ignore"),
            ],
            plugins=[Options(args)],
        )
        if code:
            return int(code)
        benchmarks = json.loads(raw.read_text())["benchmarks"]
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.unlink(missing_ok=True)
    append_row(
        args.out,
        {
            "kind": "header",
            "tool": "bench.overhead",
            "started": started,
            "command": " ".join(["python -m bench.overhead", *argv]),
            "settings": {name: value for name, value in vars(args).items() if name != "out"},
            "host": host.facts(),
        },
    )
    for row in measurements(benchmarks):
        append_row(args.out, {"kind": "measurement", **row})
    append_row(args.out, {"kind": "end", "at": now(), "failures": 0})
    table = markdown(Results.read(args.out))
    args.out.with_suffix(".md").write_text(table)
    print(f"\n{table}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

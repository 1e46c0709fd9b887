"""bench.overhead takes a decode step through the installed SGLang's own objects."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from bench.bounds import HOOKED_STEPS
from bench.child import ROOT
from bench.overhead.__main__ import measurements
from bench.results import Results

WRAPPED_ON_THE_WAY = (*HOOKED_STEPS, "plain-step-whole", "policy-plain-whole", "plain-prefill")


def test_every_case_runs_in_its_mode(tmp_path: Path) -> None:
    out = tmp_path / "overhead.jsonl"
    options = ["--rounds", "2", "--repeats", "2", "--batch-sizes", "3", "--out", str(out)]
    command = [sys.executable, "-m", "bench.overhead", *options]
    # Beside other tests pytest-benchmark would measure nothing.
    alone = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_XDIST")}
    done = subprocess.run(command, cwd=ROOT, env=alone, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]
    results = Results.read(out)
    added_us = {row["case"]: row["added_us"] for row in results.of_kind("measurement")}
    assert results.tool == "bench.overhead"
    assert added_us.keys() == {"inactive", "no-speculation", *WRAPPED_ON_THE_WAY, "controller"}
    # On a busy machine no bound would hold; but who is on the way takes time.
    assert all(added_us[case] > 1 for case in WRAPPED_ON_THE_WAY)
    assert "| plain-step |" in done.stdout


def test_a_repeat_is_the_difference_of_its_two_sides() -> None:
    def one(side: str, repeat: int, seconds: float) -> dict[str, object]:
        asked = {"name": "spec-step", "batch_size": 16, "repeat": repeat, "side": side}
        return {"params": asked, "stats": {"min": seconds}}

    rows = measurements([one("bare", 0, 2e-6), one("bare", 1, 3e-6), one("hooked", 1, 9e-6), one("hooked", 0, 6e-6)])
    assert [(row["case"], row["batch_size"], row["added_us"]) for row in rows] == [("spec-step", 16, 5.0)]
    assert [repeat["added_us"] for repeat in rows[0]["repeats"]] == [4.0, 6.0]

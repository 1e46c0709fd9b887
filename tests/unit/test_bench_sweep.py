"""What the sweep starts, in which order, and when it stops."""

from __future__ import annotations

import os
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import host, models, sweep
from bench.budget import Budget
from bench.child import log_tail, run_module
from bench.decode_log import GraphUse, LogReader, graph_use
from bench.host import digest
from bench.measure import enough, expected_tokens, percentile
from bench.modes import MODES


def test_order_rotates_between_rounds() -> None:
    servers = list(sweep.plan(["fa3", "triton"], ["a", "b", "c"], rounds=2))
    assert servers[:3] == [(0, "fa3", "a"), (0, "fa3", "b"), (0, "fa3", "c")]
    assert servers[6:9] == [(1, "fa3", "b"), (1, "fa3", "c"), (1, "fa3", "a")]
    assert len(servers) == len(set(servers)) == 12


def test_defaults_follow_the_device() -> None:
    gpu, cpu = sweep.parse([]), sweep.parse(["--device", "cpu"])
    assert (gpu.model_shape, gpu.simulate_accept_length) == ("llama-8b", 2.5)
    assert gpu.attention_backends == ["fa3", "triton", "flashinfer"]
    assert (cpu.model_shape, cpu.simulate_accept_length) == ("tiny", None)
    assert sweep.parse(["--simulate-accept-length", "0"]).simulate_accept_length is None


@pytest.mark.parametrize(
    "argv", [["--modes", "base,fast"], ["--concurrencies", "0"], ["--output-tokens", "1"], ["--repeats", "0"]], ids=str
)
def test_nonsense_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        sweep.parse(argv)


def test_existing_results_are_not_overwritten(tmp_path: Path) -> None:
    out = tmp_path / "r.jsonl"
    out.write_text("{}\n")
    assert sweep.main(["--device", "cpu", "--modes", "base", "--out", str(out)]) == 2
    assert out.read_text() == "{}\n"


def test_header_names_no_folder() -> None:
    argv = ["--modes", "base", "--out", "/somewhere/on/this/machine/r.jsonl"]
    text = str(sweep.header(sweep.parse(argv), argv))
    assert "somewhere" not in text
    assert "--out r.jsonl" in text


@pytest.mark.parametrize("shape", models.SHAPES.values(), ids=list(models.SHAPES))
def test_models_are_written(shape: models.Shape, tmp_path: Path) -> None:
    target, draft = models.write_pair(tmp_path, shape)
    assert (target / "config.json").exists()
    assert '"LlamaForCausalLMEagle3"' in (draft / "config.json").read_text()


class Clock:
    now = 1000.0

    def __call__(self) -> float:
        return self.now


def test_budget_starts_no_server_that_cannot_finish() -> None:
    clock = Clock()
    budget = Budget(seconds=300, startup_s=120, measure_s=50, clock=clock)
    assert budget.deadline == 1300
    assert budget.allows("fa3")
    clock.now += 120
    assert budget.allows("fa3")  # 180 s left, 175 s needed
    clock.now += 10
    assert not budget.allows("fa3")
    budget.learn("fa3", startup_s=110, total_s=130, complete=True)
    assert budget.allows("fa3")  # 170 s left, 132 s needed
    assert budget.needed_s("fa3") == pytest.approx(110 + 22)
    # The second server on a backend finds its kernels compiled.
    budget.learn("fa3", startup_s=40, total_s=62, complete=True)
    assert budget.needed_s("fa3") == pytest.approx(60 + 24.2)
    # Another backend compiles anew.
    assert budget.needed_s("triton") == pytest.approx(120 + 24.2)


def test_an_incomplete_measurement_teaches_no_duration() -> None:
    budget = Budget(seconds=300, startup_s=120, measure_s=50, clock=Clock())
    budget.learn("fa3", startup_s=110, total_s=111, complete=False)
    assert budget.needed_s("fa3") == pytest.approx(110 + 55)


LOG = """\
[2026] Prefill batch, #new-seq: 8, #running-req: 0, cuda graph: False
[2026] Decode batch, #running-req: 8, #token: 2088, token usage: 0.01, cuda graph: True, gen throughput (token/s): 1.00
[2026] Decode batch [7], #running-req: 8, #token: 9, accept len: 2.50, cuda graph: False, gen throughput (token/s): 1
[2026] Decode batch, #running-req: 64, #token: 2088, token usage: 0.01, cuda graph: True, gen throughput (token/s): 1.00
"""


def test_decode_log_proves_graphs() -> None:
    assert graph_use(LOG, 8) == GraphUse(replayed=1, eager=1)
    assert not graph_use(LOG, 8).proven
    assert graph_use(LOG, 64).proven
    assert not graph_use(LOG, 256).proven


def test_log_is_read_from_where_it_was_left(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("a\n")
    log = LogReader(path)
    assert log.added() == "a\n"
    with path.open("a") as file:
        file.write("b\n")
    assert log.added() == "b\n"
    assert log.added() == ""


def test_log_tail_has_no_progress_bars(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text(
        'Capturing:  10%|# | 1/36 [00:01<00:05, 2.00it/s]\rCapturing: 20%| 2.00it/s]\n  File "/a/b/c.py"\n\n'
    )
    assert log_tail(log) == ['  File "c.py"']
    assert log_tail(tmp_path / "none") == []


def child_module(tmp_path: Path, code: str) -> dict[str, str]:
    (tmp_path / "bench_test_child.py").write_text(code)
    return {**os.environ, "PYTHONPATH": str(tmp_path)}


def test_child_gets_its_exit_code_and_log(tmp_path: Path) -> None:
    env = child_module(tmp_path, "import sys; print(sys.argv[1]); sys.exit(3)")
    log = tmp_path / "log"
    assert run_module("bench_test_child", ["hello"], env, log, timeout_s=60) == 3
    assert log.read_text() == "hello\n"


def test_child_ends_at_the_deadline(tmp_path: Path) -> None:
    env = child_module(tmp_path, "import time; time.sleep(300)")
    start = time.monotonic()
    assert run_module("bench_test_child", [], env, tmp_path / "log", timeout_s=0.5) is None
    assert time.monotonic() - start < 60


def test_child_takes_all_it_started_along(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(300)'])\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(300)\n"
    )
    monkeypatch.setattr("bench.child._TERM_GRACE_S", 0.5)
    env, log = child_module(tmp_path, code), tmp_path / "log"

    def interrupt() -> None:
        if log.read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run_module("bench_test_child", [], env, log, timeout_s=120, watch=interrupt)
    grandchild = int(log.read_text())
    end = time.monotonic() + 30
    while _runs(grandchild) and time.monotonic() < end:
        time.sleep(0.05)
    assert not _runs(grandchild)


def _runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_installed_plugin_is_seen_past_the_working_tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("sglang_adaptive_spec", "sglang_adaptive_spec/patches"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(f"name = '{name}'\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert host.installed_digest() == digest([tmp_path])
    assert host.installed_digest() != host.tree_digest()


def test_digest_is_of_contents(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}.py").write_text("x = 1\n")
    assert digest([tmp_path / "a"]) == digest([tmp_path / "b"])
    (tmp_path / "b" / "b.py").write_text("x = 2\n")
    assert digest([tmp_path / "a"]) != digest([tmp_path / "b"])


def test_percentile() -> None:
    values = [float(v) for v in range(1, 101)]
    assert percentile(values, 50) == 51
    assert percentile(values, 99) == 100
    assert percentile([3.0], 99) == 3.0


def output(verified: int = 0, plain: int = 0) -> dict[str, Any]:
    return {"meta_info": {"spec_verify_ct": verified, "adaptive_spec_plain_steps": plain}}


@pytest.mark.parametrize(
    ("mode", "accept_length", "outputs", "tokens"),
    [
        ("base", 2.5, [output(), output()], 254),
        ("spec", 2.5, [output(verified=50), output(verified=52)], 255),
        ("spec", None, [output(verified=50)], 127),
        ("ours-auto", 2.5, [output(verified=10, plain=102)], 127),
        ("ours-plain", 2.5, [output(plain=127)], 127),
        # Its tier of no draft is verified, too, and gives one token.
        ("upstream-zero", 2.5, [output(verified=127)], 127),
    ],
)
def test_expected_tokens_are_those_of_the_nominal_accept_length(
    mode: str, accept_length: float | None, outputs: list[dict[str, Any]], tokens: float
) -> None:
    task = SimpleNamespace(mode=MODES[mode], accept_length=accept_length, output_tokens=128)
    assert expected_tokens(task, outputs) == tokens  # type: ignore[arg-type]


@pytest.mark.parametrize(("run_seconds", "repeats"), [(0.1, 8), (0.5, 6), (1.0, 3), (9.0, 2)])
def test_short_runs_are_repeated_more_often(run_seconds: float, repeats: int) -> None:
    task = SimpleNamespace(repeats=2, least_seconds=3.0)
    made: list[dict[str, float]] = []
    while not enough(task, made):  # type: ignore[arg-type]
        made.append({"one_token_s": run_seconds / 4, "full_s": run_seconds * 3 / 4})
    assert len(made) == repeats

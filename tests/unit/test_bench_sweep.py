"""What the sweep starts, in which order, and when it stops."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from bench import host, models, order, sweep
from bench.budget import Budget
from bench.child import Child, end, environment, log_tail, run_module
from bench.decode_log import GraphUse, LogReader, graph_use
from bench.host import digest
from bench.measure import (
    EXIT_NOT_PROVEN,
    Bench,
    ProofError,
    cuda_graph_sizes,
    enough,
    expected_tokens,
    obey,
    percentile,
    server_row,
)
from bench.modes import MODES, Served
from bench.results import Results, append_row


def test_order_rotates_between_rounds() -> None:
    found = list(order.plan(["fa3", "triton"], ["a", "b", "c"], rounds=2, at_once=1))
    assert found[:3] == [(0, "fa3", ["a"]), (0, "fa3", ["b"]), (0, "fa3", ["c"])]
    assert found[6:9] == [(1, "fa3", ["b"]), (1, "fa3", ["c"]), (1, "fa3", ["a"])]
    assert len(found) == 12


def test_a_ratios_two_sides_share_a_group_in_every_round() -> None:
    modes = ["base", "ours-plain", "spec", "ours-spec", "ours-auto"]
    assert list(order.plan(["fa3"], modes, rounds=3, at_once=2)) == [
        (0, "fa3", ["base", "ours-plain"]),
        (0, "fa3", ["spec", "ours-spec"]),
        (0, "fa3", ["ours-auto"]),
        (1, "fa3", ["ours-spec", "spec"]),
        (1, "fa3", ["ours-auto"]),
        (1, "fa3", ["ours-plain", "base"]),
        (2, "fa3", ["ours-auto"]),
        (2, "fa3", ["base", "ours-plain"]),
        (2, "fa3", ["spec", "ours-spec"]),
    ]


@pytest.mark.parametrize(
    ("group", "expected"),
    [
        ("base,ours-auto,spec", [["base", "spec"], ["ours-auto"]]),
        ("ours-auto,ours-auto,spec", [["spec"], ["ours-auto"], ["ours-auto"]]),
        ("ours-auto", [["ours-auto"]]),
        ("base,spec", [["base", "spec"]]),
    ],
)
def test_a_server_that_measures_itself_starts_when_the_others_are_up(group: str, expected: list[list[str]]) -> None:
    found = order.starts([{"mode": mode} for mode in group.split(",")])
    assert [[labels["mode"] for labels in together] for together in found] == expected


def test_each_concurrency_and_each_pass_begins_one_server_later() -> None:
    assert list(order.turns(2, [1, 4, 8], ["a", "b", "c"])) == [
        *((0, 1, server) for server in "abc"),
        *((0, 4, server) for server in "bca"),
        *((0, 8, server) for server in "cab"),
        *((1, 1, server) for server in "bca"),
        *((1, 4, server) for server in "cab"),
        *((1, 8, server) for server in "abc"),
    ]
    assert list(order.turns(1, [1, 4], ["a"])) == [(0, 1, "a"), (0, 4, "a")]
    assert not list(order.turns(1, [1], []))


def test_servers_that_share_a_gpu_take_what_they_need() -> None:
    alone, shared = (
        sweep.engine_arguments(sweep.parse(["--mem-fraction", "0.7"]), "fa3", most=256, shared=shared)
        for shared in (False, True)
    )
    assert "max_total_tokens" not in alone
    assert alone["mem_fraction_static"] == 0.7
    # SGLang admits a prompt only where there is room for all its tokens, a page and what a step reserves.
    assert shared["max_total_tokens"] >= 256 * (256 + 128 + 16 + 2 * 8)
    assert shared["mem_fraction_static"] == 0.99
    assert shared["sleep_on_idle"]
    assert "sleep_on_idle" not in alone


def test_defaults_follow_the_device() -> None:
    gpu, cpu = sweep.parse([]), sweep.parse(["--device", "cpu"])
    assert (gpu.model_shape, gpu.simulate_accept_length) == ("llama-8b", 2.5)
    assert gpu.attention_backends == ["fa3", "triton", "flashinfer"]
    assert (cpu.model_shape, cpu.simulate_accept_length) == ("tiny", None)
    assert sweep.parse(["--simulate-accept-length", "0"]).simulate_accept_length is None


@pytest.mark.parametrize(
    "argv",
    [
        ["--modes", "base,fast"],
        ["--concurrencies", "0"],
        ["--output-tokens", "1"],
        ["--repeats", "0"],
        ["--passes", "0"],
        ["--servers-at-once", "0"],
        ["--servers-at-once", "9"],  # ports
        ["--modes", "base,base"],
        ["--modes", ","],
        ["--attention-backends", "fa3,fa3"],
        ["--tp-size", "2"],  # the default accept length is 2.5
        ["--servers-at-once", "2", "--tp-size", "2"],
    ],
    ids=str,
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
    budget.learn("fa3", startups_s=[110], total_s=130, complete=True)
    assert budget.allows("fa3")  # 170 s left, 132 s needed
    assert budget.needed_s("fa3") == pytest.approx(110 + 22)
    # The second server on a backend finds its kernels compiled.
    budget.learn("fa3", startups_s=[40], total_s=62, complete=True)
    assert budget.needed_s("fa3") == pytest.approx(60 + 24.2)
    # Another backend compiles anew.
    assert budget.needed_s("triton") == pytest.approx(120 + 24.2)


def test_servers_at_once_start_together_and_are_measured_one_after_the_other() -> None:
    budget = Budget(seconds=300, startup_s=120, measure_s=50, clock=Clock())
    assert budget.needed_s("fa3", servers=3) == pytest.approx(120 + 3 * 55)
    assert budget.allows("fa3", servers=3)
    assert not budget.allows("fa3", servers=4)
    budget.learn("fa3", startups_s=[60], total_s=150, complete=True, servers=3)
    assert budget.needed_s("fa3", servers=2) == pytest.approx(60 + 2 * 33)


def test_starts_that_follow_each_other_are_waited_for_one_by_one() -> None:
    budget = Budget(seconds=410, startup_s=120, measure_s=50, clock=Clock())
    assert budget.needed_s("fa3", servers=3, starts=2) == pytest.approx(2 * 120 + 3 * 55)
    assert budget.allows("fa3", servers=3, starts=2)
    assert not budget.allows("fa3", servers=3, starts=3)
    # Only the first of them compiles.
    budget.learn("fa3", startups_s=[110, 40], total_s=240, complete=True, servers=3)
    assert budget.needed_s("fa3", servers=3, starts=2) == pytest.approx(2 * 60 + 3 * 33)


def test_an_incomplete_measurement_teaches_no_duration() -> None:
    budget = Budget(seconds=300, startup_s=120, measure_s=50, clock=Clock())
    budget.learn("fa3", startups_s=[110], total_s=111, complete=False)
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


def test_children_take_lines_and_end_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import signal, sys\n"
        "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
        "for line in sys.stdin:\n"
        "    if line == 'leave\\n': sys.exit(3)\n"
        "    print(line.strip(), flush=True)\n"
        "while True: signal.pause()\n"
    )
    monkeypatch.setattr("bench.child._TERM_GRACE_S", 3.0)
    env = child_module(tmp_path, code)
    logs = [tmp_path / name for name in ("0", "1", "2")]
    children = [Child("bench_test_child", [], env, log) for log in logs]
    for child in children:
        child.send("8")
        child.send("numbers")
    while any(log.read_text() != "8\nnumbers\n" for log in logs):
        time.sleep(0.05)
    assert children[0].poll() is None
    children[0].send("leave")
    while children[0].poll() is None:
        time.sleep(0.05)
    children[0].send("too late")
    start = time.monotonic()
    end(children)
    assert time.monotonic() - start < 5.0  # one after the other: 6
    assert [child.poll() for child in children] == [3, -signal.SIGKILL, -signal.SIGKILL]


def test_servers_are_gone_when_the_sweep_is_ended(tmp_path: Path) -> None:
    (tmp_path / "stub").mkdir()
    stub = "import os, time\nfrom bench import child\nprint(os.getpid(), flush=True)\ntime.sleep(300)\n"
    (tmp_path / "stub" / "bench_stub.py").write_text(stub)
    code = (
        "import sys\n"
        "from bench import sweep\n"
        "real = sweep.Child\n"
        "sweep.Child = lambda module, *rest: real('bench_stub', *rest)\n"
        "sys.exit(sweep.main(sys.argv[1:]))\n"
    )
    argv = ["--device", "cpu", "--modes", "base,spec", "--servers-at-once", "2", "--out", str(tmp_path / "r.jsonl")]
    env = environment({**os.environ, "PYTHONPATH": str(tmp_path / "stub"), "TMPDIR": str(tmp_path)})
    parent = subprocess.Popen([sys.executable, "-c", code, *argv], env=env, stdout=subprocess.DEVNULL)

    def pids() -> list[int]:
        return [int(log.read_text()) for log in tmp_path.glob("bench-*/*.log") if log.read_text().endswith("\n")]

    try:
        until = time.monotonic() + 60
        while len(servers := pids()) < 2 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(servers) == 2
        parent.terminate()
        assert parent.wait(60) == 143
    finally:
        parent.kill()
        parent.wait()
    assert not any(map(_runs, servers))


class Stub:
    """A server's process that answers at once.

    Attributes:
        asked: Mode and command, of all of them, in turn.
        loading: Modes that never come up, in a process that goes on.
        started: Mode, and the modes that were up by then, of all of them, in turn.
        dies_at: The mode and command at which one ends without an answer.
        never_up: Modes that end before they are up.
    """

    asked: list[tuple[str, str]]
    started: list[tuple[str, list[str]]]
    dies_at: tuple[str, str] | None = None
    loading: tuple[str, ...] = ()
    never_up: tuple[str, ...] = ()
    seconds = 0.0
    session = 77

    def __init__(self, module: str, arguments: list[str], env: dict[str, str], log: Path) -> None:
        task = json.loads(Path(arguments[0]).read_text())
        self.labels, self.out, self.code = task["labels"], Path(task["results"]), None
        log.write_text("its log\n")
        self.started.append((self.labels["mode"], [row["mode"] for row in Results.read(self.out).of_kind("server")]))
        if self.labels["mode"] in self.never_up:
            self.code: int | None = 1
        elif self.labels["mode"] not in self.loading:
            self.write("server", startup_s=1.0)

    def write(self, kind: str, **values: Any) -> None:
        append_row(self.out, {"kind": kind, **self.labels, **values})

    def send(self, line: str) -> None:
        command = (self.labels["mode"], line)
        self.asked.append(command)
        time.sleep(self.seconds)
        if command == self.dies_at:
            self.code = -9
        elif line == "numbers":
            self.write("numbers", finite_logprobs=True)
        else:
            concurrency, pass_number = map(int, line.split())
            turn = {"concurrency": concurrency, "pass": pass_number}
            repeat = {"tokens_per_s": 5.0, "step_ms": 1.0}
            self.write("measurement", **turn, tokens_per_s=5.0, repeats=[repeat])

    def close(self) -> None:
        self.code = 0 if self.code is None else self.code

    def poll(self) -> int | None:
        return self.code


@pytest.fixture
def stub(monkeypatch: pytest.MonkeyPatch) -> type[Stub]:
    class Fresh(Stub):
        asked: list[tuple[str, str]] = []
        started: list[tuple[str, list[str]]] = []

    monkeypatch.setattr(sweep, "Child", Fresh)
    monkeypatch.setattr(sweep, "end", lambda children: None)
    return Fresh


def swept(tmp_path: Path, *argv: str) -> tuple[int, Results]:
    out = tmp_path / "r.jsonl"
    code = sweep.main(["--device", "cpu", "--out", str(out), *argv])
    return code, Results.read(out)


def test_servers_take_turns(stub: type[Stub], tmp_path: Path) -> None:
    argv = ("--modes", "base,spec,upstream-zero", "--servers-at-once", "2", "--concurrencies", "1,4")
    code, results = swept(tmp_path, *argv)
    assert code == 0
    assert stub.asked == [
        ("base", "1 0"), ("spec", "1 0"), ("spec", "4 0"), ("base", "4 0"), ("base", "numbers"), ("spec", "numbers"),
        *(("upstream-zero", command) for command in ("1 0", "4 0", "numbers")),
    ]  # fmt: skip
    assert results.header["settings"]["servers_at_once"] == 2
    assert len(results.measurements) == 6


@pytest.mark.parametrize(("found", "code"), [(2, 0), (1, 1)])
def test_schedulers_get_new_cores_before_each_concurrency_the_same_for_all(
    stub: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: int, code: int
) -> None:
    """One that can't be found is no silent matter: it was asked for."""
    pinned: list[tuple[int, list[int]]] = []

    def pin(count: int, sessions: list[int]) -> dict[str, Any]:
        pinned.append((count, sessions))
        return {"cores": [0], "schedulers": found}

    monkeypatch.setattr(sweep.cores, "pin", pin)
    argv = ("--modes", "base,spec", "--servers-at-once", "2", "--concurrencies", "1,4", "--pin-schedulers", "2")
    assert swept(tmp_path, *argv, "--passes", "2")[0] == code
    assert pinned == [(2, [77, 77])] * 4
    rows = Results.read(tmp_path / "r.jsonl").of_kind("cores")
    assert [(row["pass"], row["concurrency"]) for row in rows] == [(0, 1), (0, 4), (1, 1), (1, 4)]


def test_passes_alternate_the_repeats_of_the_servers(stub: type[Stub], tmp_path: Path) -> None:
    argv = ("--modes", "base,spec", "--servers-at-once", "2", "--concurrencies", "1,4", "--passes", "2")
    code, results = swept(tmp_path, *argv)
    assert code == 0
    assert stub.asked == [
        ("base", "1 0"), ("spec", "1 0"), ("spec", "4 0"), ("base", "4 0"),
        ("spec", "1 1"), ("base", "1 1"), ("base", "4 1"), ("spec", "4 1"),
        ("base", "numbers"), ("spec", "numbers"),
    ]  # fmt: skip
    ratio = results.ratio("cpu", "spec", "base", 4)
    assert ratio is not None
    assert ratio.repeats == 2


def test_nothing_loads_while_a_server_measures_itself(
    stub: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "plugin_is_installed", lambda: True)
    argv = ("--modes", "ours-auto,base,spec", "--servers-at-once", "3", "--concurrencies", "1")
    assert swept(tmp_path, *argv)[0] == 0
    assert stub.started[-1] == ("ours-auto", ["base", "spec"])
    assert [mode for mode, _ in stub.asked[:3]] == ["base", "spec", "ours-auto"]


def test_a_server_that_was_to_start_later_is_not_forgotten(
    stub: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "plugin_is_installed", lambda: True)
    stub.loading = ("spec",)
    argv = ("--modes", "base,spec,ours-auto", "--servers-at-once", "3", "--concurrencies", "1")
    times = ("--startup-seconds", "0.1", "--measure-seconds", "0.1", "--budget-seconds", "16")
    code, results = swept(tmp_path, *argv, *times)
    assert code == 1
    assert not stub.asked
    errors = {row["mode"]: row["error"] for row in results.of_kind("error")}
    assert errors == {
        "ours-auto": "not started: out of time",
        **dict.fromkeys(("base", "spec"), "the server's process: ended at the deadline"),
    }
    assert results.rows[-1]["failures"] == 3


def test_the_others_go_on_when_a_server_dies(stub: type[Stub], tmp_path: Path) -> None:
    stub.dies_at, stub.never_up = ("spec", "1 0"), ("upstream-zero",)
    argv = ("--modes", "base,spec,upstream-zero", "--servers-at-once", "3", "--concurrencies", "1,4")
    code, results = swept(tmp_path, *argv)
    assert code == 1
    assert stub.asked == [("base", "1 0"), ("spec", "1 0"), ("base", "4 0"), ("base", "numbers")]
    errors = {row["mode"]: row for row in results.of_kind("error")}
    assert errors["spec"]["error"] == "the server's process: exit code -9"
    assert errors["upstream-zero"]["error"] == "the server's process: exit code 1"
    assert errors["spec"]["log_tail"] == ["its log"]
    assert errors.keys() == {"spec", "upstream-zero"}


def test_a_concurrency_is_left_out_where_a_mode_makes_no_sense(
    stub: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "plugin_is_installed", lambda: True)
    modes = ("--modes", "ours-threshold,base")
    (tmp_path / "alone").mkdir()
    assert swept(tmp_path / "alone", *modes, "--concurrencies", "1")[0] == 1
    assert stub.asked == [("base", "1 0"), ("base", "numbers")]
    stub.asked.clear()
    assert swept(tmp_path, *modes, "--servers-at-once", "2", "--concurrencies", "1,2")[0] == 0
    assert stub.asked[:3] == [("base", "1 0"), ("base", "2 0"), ("ours-threshold", "2 0")]


def test_no_turn_begins_that_can_not_end_in_time(stub: type[Stub], tmp_path: Path) -> None:
    stub.seconds = 0.3
    argv = ("--modes", "base,spec", "--servers-at-once", "2", "--concurrencies", "1,2,1000", "--passes", "2")
    times = ("--startup-seconds", "1", "--measure-seconds", "1", "--budget-seconds", "35")
    code, results = swept(tmp_path, *argv, *times)
    assert code == 1
    assert [command for _, command in stub.asked] == ["1 0", "1 0", "2 0", "2 0"]
    for row in results.of_kind("error"):
        assert (row["error"], row["out_of_time"]) == ("out of time before concurrency [1000] in pass 1 of 2", True)
    assert len(results.of_kind("error")) == results.rows[-1]["failures"] == 2


def test_a_turn_takes_no_longer_than_fewer_requests_did_each() -> None:
    server = sweep.Server({}, [1, 4, 8], Path(), Any, Any)  # type: ignore[arg-type]
    assert server.most_s(4) == 0.0
    server.took_s = {1: 2.0}
    assert server.most_s(4) == 8.0
    server.took_s = {1: 2.0, 4: 3.0, 8: 4.0}
    assert [server.most_s(concurrency) for concurrency in (1, 4, 8)] == [2.0, 3.0, 4.0]


def test_a_group_that_can_not_finish_is_not_started(stub: type[Stub], tmp_path: Path) -> None:
    argv = ("--modes", "base,spec,ours-spec", "--servers-at-once", "2", "--concurrencies", "1", "--rounds", "1")
    times = ("--startup-seconds", "20", "--measure-seconds", "20", "--budget-seconds", "75")
    code, results = swept(tmp_path, *argv, *times)
    assert code == 1
    assert stub.asked == [("ours-spec", "1 0"), ("ours-spec", "numbers")]
    errors = [(row["mode"], row["error"]) for row in results.of_kind("error")]
    assert errors == [(mode, "not started: out of time") for mode in ("base", "spec")]


def test_a_group_needs_the_time_of_each_of_its_starts(
    stub: type[Stub], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "plugin_is_installed", lambda: True)
    argv = ("--servers-at-once", "2", "--concurrencies", "1", "--startup-seconds", "20", "--measure-seconds", "1")
    for modes, started in (("base,ours-auto", 0), ("base,spec", 2)):
        (tmp_path / modes).mkdir()
        swept(tmp_path / modes, *argv, "--modes", modes, "--budget-seconds", "50")
        assert len(stub.started) == started


def test_a_server_does_what_its_input_says() -> None:
    rows: list[tuple[str, dict[str, Any]]] = []

    def concurrency(asked: int, pass_number: int) -> dict[str, Any]:
        if asked == 4:
            raise ProofError("too few")
        return {"warm_up_s": None if pass_number else 1.0}

    bench: Any = SimpleNamespace(concurrency=concurrency, finite_logprobs=lambda: True)

    def write(kind: str, values: dict[str, Any]) -> None:
        rows.append((kind, values))

    assert obey(["1 0\n", "1 1\n", "numbers\n"], bench, write) == 0
    assert rows == [
        ("measurement", {"concurrency": 1, "pass": 0, "warm_up_s": 1.0}),
        ("measurement", {"concurrency": 1, "pass": 1, "warm_up_s": None}),
        ("numbers", {"finite_logprobs": True}),
    ]
    assert obey(["4 1\n", "8 0\n"], bench, write) == EXIT_NOT_PROVEN
    assert rows[3:] == [
        ("error", {"concurrency": 4, "pass": 1, "error": "not measured: too few"}),
        ("measurement", {"concurrency": 8, "pass": 0, "warm_up_s": 1.0}),
    ]
    bench.finite_logprobs = lambda: False
    assert obey(["numbers\n"], bench, write) == EXIT_NOT_PROVEN


def test_only_the_first_pass_warms_up_and_no_prompts_come_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "log").write_text("")
    runs: list[int] = []
    repeat = {"tokens_per_s": 5.0, "step_ms": 1.0, "one_token_s": 0.1, "full_s": 0.4}
    task: Any = SimpleNamespace(
        repeats=2, least_seconds=1.5, output_tokens=8, graphs_required=False, latency=True, log=tmp_path / "log"
    )
    monkeypatch.setattr(Bench, "_prompts", lambda _, __, repeat: runs.append(repeat))
    monkeypatch.setattr(Bench, "_generate", lambda *_: (1.0, []))
    monkeypatch.setattr(Bench, "_streamed", lambda *_: {})
    monkeypatch.setattr(Bench, "_repeat", lambda _, __, number: runs.append(number) or repeat)
    bench = Bench(task, engine=None)
    rows = [bench.concurrency(4, pass_number) for pass_number in (0, 1)]
    assert runs == [-1, 0, 1, 2, -2, 8, 9, 10]
    assert [row["warm_up_s"] for row in rows] == [1.0, None]
    assert ["streamed" in row for row in rows] == [True, False]


def test_a_server_that_shares_the_gpu_says_nothing_of_its_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measure.gpu_memory_used_mib", lambda: 1000)
    memory = {"weight": 15.0, "kvcache": 12.0, "token_capacity": 100, "graph": 2.0}
    alone, shared = (
        server_row(Served({"memory_usage": memory}), 40.0, shares_gpu=shares_gpu) for shares_gpu in (False, True)
    )
    assert (alone["gpu_memory_used_mib"], alone["memory_gb"]) == (1000, memory)
    assert shared["gpu_memory_used_mib"] is None
    assert shared["memory_gb"] == {"kvcache": 12.0, "token_capacity": 100}


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


@pytest.mark.parametrize(("disabled", "sizes"), [(False, [1, 2]), (True, None)])
def test_a_server_without_graphs_has_no_sizes(disabled: bool, sizes: list[int] | None) -> None:
    config = SimpleNamespace(decode=SimpleNamespace(bs=[1, 2]))
    assert cuda_graph_sizes({"cuda_graph_config": config, "disable_cuda_graph": disabled}) == sizes

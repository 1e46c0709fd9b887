"""Servers measured through HTTP: who starts when, whose turn it is, and what goes wrong; with stand-ins for SGLang."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import requests

from bench import serve
from bench.budget import Budget
from bench.modes import BenchMode
from bench.ramp import __main__ as ramp
from bench.ramp.__main__ import parse, ramp_modes
from bench.ramp.client import Answer, Moment, Recording, Switch
from bench.results import Results, Row
from bench.server import Server
from bench.serving import Labels, Measurement, NotProvenError

STAND_IN = """
import json, os, sys, time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

folder = Path(os.environ["STAND_IN_FOLDER"])
plugin = json.loads(os.environ.get("SGLANG_ADAPTIVE_SPEC_CONFIG") or "null")
algorithm = "EAGLE3" if "--speculative-algorithm" in sys.argv else None
name = plugin["policy"] if plugin else "spec" if algorithm else "base"
up = sorted(path.stem for path in folder.glob("*.up"))
(folder / f"{name}.json").write_text(json.dumps({"pid": os.getpid(), "arguments": sys.argv[1:], "up": up}))
if (folder / f"{name}.broken").exists():
    print("it broke", flush=True)
    sys.exit(3)
state = {"speculative_algorithm": algorithm, "memory_usage": {"weight": 15, "kvcache": 2, "token_capacity": 9}}
if plugin:
    state["adaptive_spec"] = {"policy": plugin["policy"], "faults": 0, "steps": {"plain": 0, "spec": 0}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self):
        (folder / f"{name}.up").touch()
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"internal_states": [state]}).encode())

    def do_POST(self):
        with (folder / f"{name}.posts").open("a") as posts:
            posts.write(self.path + "\\n")
        self.send_response(200)
        self.end_headers()


time.sleep(0.2)
HTTPServer(("127.0.0.1", int(sys.argv[sys.argv.index("--port") + 1])), Handler).serve_forever()
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the stand-ins say how they were started, and are told to break."""
    pytest.importorskip("tokenizers")
    for name in ("folder", "work", "path/sglang"):
        (tmp_path / name).mkdir(parents=True)
    (tmp_path / "path/sglang/__init__.py").touch()
    (tmp_path / "path/sglang/launch_server.py").write_text(STAND_IN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    monkeypatch.setenv("STAND_IN_FOLDER", str(tmp_path / "folder"))
    monkeypatch.setattr("bench.serving._WATCH_S", 0.02)
    for name in ("sglang", "sglang.bench_serving"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    return tmp_path / "folder"


def measurement(tmp_path: Path, *argv: str, warm_up_s: float = 1.0, pass_s: float = 1.0) -> Measurement:
    args = parse(["--device", "cpu", "--out", str(tmp_path / "r.jsonl"), *argv])
    modes = ramp_modes(args.threshold)
    return Measurement(args, [modes[name] for name in args.modes], warm_up_s, pass_s, tmp_path / "work")


def rows(measurement: Measurement, kind: str) -> list[Row]:
    return Results.read(measurement.args.out).of_kind(kind)


class Load:
    """Writes down what it was asked for, in turn, and which servers were there at that time."""

    def __init__(self, measurement: Measurement) -> None:
        self.measurement = measurement
        self.done: list[tuple[str, Any]] = []
        self.urls: dict[str, str] = {}
        self.beside: list[int] = []

    def run(self) -> None:
        self.measurement.run(self.warm_up, self.measure)

    def warm_up(self, server: Server) -> None:
        self.done.append((server.name, "warm-up"))
        self.urls[server.name] = server.url

    def measure(self, mode: BenchMode, server: Server, labels: Labels) -> None:
        assert requests.get(server.url, timeout=20).ok
        assert server.name == mode.name == labels["mode"]
        self.done.append((mode.name, labels["pass"]))
        self.beside.append(sum(map(answers, self.urls.values())) - 1)
        self.measurement.write(labels, "measurement", {})


def answers(url: str) -> bool:
    try:
        return requests.get(url, timeout=20).ok
    except requests.ConnectionError:
        return False


def started(folder: Path, name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / f"{name}.json").read_text())
    return found


def value_of(flag: str, arguments: list[str]) -> str | None:
    return arguments[arguments.index(flag) + 1] if flag in arguments else None


def runs(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_one_server_at_once_is_gone_before_the_next_one_starts(folder: Path, tmp_path: Path) -> None:
    load = Load(measurement(tmp_path, "--modes", "base,spec", "--passes", "2", "--rounds", "2"))
    load.run()
    base = [("base", "warm-up"), ("base", 0), ("base", 1)]
    spec = [("spec", "warm-up"), ("spec", 0), ("spec", 1)]
    assert load.done == [*base, *spec, *spec, *base]
    assert set(load.beside) == {0}
    assert [row["round"] for row in rows(load.measurement, "server")] == [0, 0, 1, 1]
    assert "--max-total-tokens" not in started(folder, "base")["arguments"]


def test_garbage_is_frozen_once_a_server_is_warm_and_before_it_is_measured(folder: Path, tmp_path: Path) -> None:
    load = Load(measurement(tmp_path, "--modes", "base", "--passes", "2"))
    posted: list[str] = []

    def measure(mode: BenchMode, server: Server, labels: Labels) -> None:
        posted.append((folder / "base.posts").read_text())

    load.measurement.run(load.warm_up, measure)
    assert posted == ["/freeze_gc\n", "/freeze_gc\n"]


@pytest.mark.parametrize("found", [1, 0])
def test_a_scheduler_is_pinned_before_each_turn_or_its_server_not_measured(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, found: int
) -> None:
    argv = ("--modes", "base,spec", "--servers-at-once", "2", "--passes", "2", "--pin-schedulers", "2")
    load, asked = Load(measurement(tmp_path, *argv)), []

    def pin(count: int, sessions: list[int]) -> Row:
        asked.append((count, sessions))
        return {"cores": [0, 1], "schedulers": found}

    monkeypatch.setattr("bench.cores.pin", pin)
    load.run()
    pids = [started(folder, name)["pid"] for name in ("base", "spec")]
    turns = [*pids, *reversed(pids)] if found else pids
    assert asked == [(2, [pid]) for pid in turns]
    assert len(rows(load.measurement, "cores")) == len(turns)
    assert len(rows(load.measurement, "measurement")) == (4 if found else 0)
    assert len(rows(load.measurement, "error")) == (0 if found else 2)


def test_prefills_have_graphs_in_every_mode_unless_none_are_asked_for(tmp_path: Path) -> None:
    pytest.importorskip("tokenizers")
    (tmp_path / "work").mkdir()
    argv = ["--device", "cuda", "--model-shape", "tiny", "--modes", "base"]
    for sizes, backend in (([], "breakable"), (["--prefill-graph-sizes", ""], "disabled")):
        arguments = measurement(tmp_path, *argv, *sizes)._arguments(ramp_modes(1)["base"])
        assert value_of("--cuda-graph-backend-prefill", arguments) == backend
        assert ("--cuda-graph-bs-prefill" in arguments) is (not sizes)


def test_servers_that_share_a_gpu_take_turns_and_each_is_warmed_up_once(folder: Path, tmp_path: Path) -> None:
    argv = (
        "--modes",
        "base,ours-auto,spec",
        "--servers-at-once",
        "3",
        "--passes",
        "2",
        "--logs",
        str(tmp_path / "logs"),
    )
    load = Load(measurement(tmp_path, *argv))
    load.run()
    assert load.measurement.failures == 0
    assert load.done == [
        ("base", "warm-up"), ("base", 0), ("spec", "warm-up"), ("spec", 0), ("ours-auto", "warm-up"), ("ours-auto", 0),
        ("spec", 1), ("ours-auto", 1), ("base", 1),
    ]  # fmt: skip
    assert load.beside[-3:] == [2, 2, 2]
    assert [(row["mode"], row["pass"]) for row in rows(load.measurement, "measurement")] == [
        done for done in load.done if done[1] != "warm-up"
    ]
    # It measures its own steps when it starts: the others are up by then, and started together.
    assert [started(folder, name)["up"] for name in ("base", "spec", "auto")] == [[], [], ["base", "spec"]]
    assert not any(runs(started(folder, name)["pid"]) for name in ("base", "spec", "auto"))
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == [
        "0-base.log",
        "0-ours-auto.log",
        "0-spec.log",
    ]


def test_servers_that_share_a_gpu_take_what_they_need(folder: Path, tmp_path: Path) -> None:
    argv = ("--max-running-requests", "100", "--input-tokens", "128", "--output-tokens", "256", "--mem-fraction", "0.7")
    of_both = [measurement(tmp_path, "--device", "cuda", *argv, "--servers-at-once", at_once) for at_once in "13"]
    alone, shared = (each._arguments(each.modes["base"]) for each in of_both)
    flags = ("--mem-fraction-static", "--max-total-tokens")
    assert [value_of(flag, alone) for flag in flags] == ["0.7", None]
    # SGLang admits a prompt only where there is room for all its tokens, a page and what a step reserves.
    assert [value_of(flag, shared) for flag in flags] == ["0.99", str(100 * (128 + 256 + 64))]
    assert "--sleep-on-idle" in shared
    assert "--sleep-on-idle" not in alone


def test_a_server_that_shares_the_gpu_says_nothing_of_its_memory(folder: Path, tmp_path: Path) -> None:
    memory = {}
    for at_once in ("1", "2"):
        (tmp_path / at_once / "work").mkdir(parents=True)
        load = Load(measurement(tmp_path / at_once, "--modes", "base", "--servers-at-once", at_once))
        load.run()
        memory[at_once] = rows(load.measurement, "server")[0]["memory_gb"]
    assert memory == {
        "1": {"weight": 15, "kvcache": 2, "token_capacity": 9},
        "2": {"kvcache": 2, "token_capacity": 9},
    }


def test_the_others_are_measured_when_one_does_not_start(folder: Path, tmp_path: Path) -> None:
    (folder / "spec.broken").touch()
    load = Load(measurement(tmp_path, "--modes", "spec,base,ours-auto", "--servers-at-once", "3", "--passes", "2"))
    load.run()
    passes = [done for done in load.done if done[1] != "warm-up"]
    assert passes == [("base", 0), ("ours-auto", 0), ("base", 1), ("ours-auto", 1)]
    [error] = rows(load.measurement, "error")
    assert (error["mode"], error["error"]) == ("spec", "ServerError: The spec server did not get ready.")
    assert error["log_tail"][-1] == "it broke"
    assert load.measurement.failures == 1


@pytest.mark.parametrize(
    ("failure", "told"),
    [(NotProvenError("not as asked"), "NotProvenError: not as asked"), (asyncio.TimeoutError(), "TimeoutError: ")],
)
@pytest.mark.parametrize("fails_at", ["warm-up", 0, 1])
def test_the_others_are_measured_when_one_fails(
    folder: Path, tmp_path: Path, failure: Exception, told: str, fails_at: object
) -> None:
    class Failing(Load):
        def warm_up(self, server: Server) -> None:
            super().warm_up(server)
            if (server.name, fails_at) == ("base", "warm-up"):
                raise failure

        def measure(self, mode: BenchMode, server: Server, labels: Labels) -> None:
            super().measure(mode, server, labels)
            if (mode.name, labels["pass"]) == ("base", fails_at):
                raise failure

    load = Failing(measurement(tmp_path, "--modes", "base,spec", "--servers-at-once", "2", "--passes", "2"))
    load.run()
    [error] = rows(load.measurement, "error")
    assert (error["mode"], error["pass"], error["error"]) == ("base", int(fails_at == 1), told)
    # What it may still be at would disturb the others.
    assert [mode for mode, what in load.done if what == 1] == (["spec"] if fails_at != 1 else ["spec", "base"])
    assert load.beside[-1] == int(fails_at == 1)


@pytest.mark.parametrize(
    ("last", "left_out"),
    [
        (("spec", 1), {"base": "out of time before pass 2 of 3", "spec": "out of time before pass 3 of 3"}),
        # One that was not measured yet will take as long as the other did.
        (("base", 0), {"base": "out of time before pass 2 of 3", "spec": "out of time before pass 1 of 3"}),
    ],
)
def test_no_pass_begins_that_can_not_end_in_time(
    folder: Path, tmp_path: Path, last: tuple[str, int], left_out: dict[str, str]
) -> None:
    now = time.time()

    class Slow(Load):
        def measure(self, mode: BenchMode, server: Server, labels: Labels) -> None:
            super().measure(mode, server, labels)
            time.sleep(0.2)
            if (mode.name, labels["pass"]) == last:
                nonlocal now
                now = load.measurement.budget.deadline - 0.1

    load = Slow(measurement(tmp_path, "--modes", "base,spec", "--servers-at-once", "2", "--passes", "3"))
    load.measurement.budget = Budget(1000.0, startup_s=10.0, measure_s=10.0, clock=lambda: now)
    load.run()
    assert load.done[-1] == last
    kept = [(row["mode"], row["pass"]) for row in rows(load.measurement, "measurement")]
    assert kept == [done for done in load.done if done[1] != "warm-up"]
    assert {row["mode"]: row["error"] for row in rows(load.measurement, "error")} == left_out


def test_a_server_is_waited_for_as_long_as_there_is_time(folder: Path, tmp_path: Path) -> None:
    now = time.time()

    def clock() -> float:
        nonlocal now
        if (folder / "base.up").exists():
            now += 1000.0
        return now

    load = Load(measurement(tmp_path, "--modes", "base,ours-auto", "--servers-at-once", "2"))
    load.measurement.budget = Budget(1000.0, startup_s=10.0, measure_s=10.0, clock=clock)
    load.run()
    assert not load.done
    assert not (folder / "auto.json").exists()
    assert {row["mode"]: row["error"] for row in rows(load.measurement, "error")} == {
        "base": "out of time before pass 1 of 1",
        "ours-auto": "not started: out of time",
    }


def test_a_group_that_can_not_finish_is_not_started(folder: Path, tmp_path: Path) -> None:
    argv = ("--modes", "base,spec,ours-plain", "--servers-at-once", "2", "--passes", "2", "--startup-seconds", "10")
    # Two servers: a start of 10 s, and for each its warm-up and two passes. Alone it fits.
    for seconds, expected in (("110", {"base", "spec"}), ("140", set())):
        (tmp_path / seconds / "work").mkdir(parents=True)
        of = measurement(tmp_path / seconds, *argv, "--budget-seconds", seconds, warm_up_s=5.0, pass_s=20.0)
        Load(of).run()
        errors = {row["mode"]: row["error"] for row in rows(of, "error")}
        assert errors == dict.fromkeys(expected, "not started: out of time")


def test_a_group_teaches_what_a_server_takes(folder: Path, tmp_path: Path) -> None:
    class Noting(Budget):
        def learn(
            self, backend: str, startups_s: Sequence[float], total_s: float, *, complete: bool, servers: int = 1
        ) -> None:
            super().learn(backend, startups_s, total_s, complete=complete, servers=servers)
            learned.append((len(startups_s), complete, servers))

    learned: list[tuple[int, bool, int]] = []
    load = Load(measurement(tmp_path, "--modes", "base,spec,ours-auto", "--servers-at-once", "3", "--rounds", "2"))
    load.measurement.budget = Noting(10_000.0, startup_s=10.0, measure_s=500.0)
    load.run()
    assert learned == [(2, True, 3)] * 2
    assert load.measurement.budget.needed_s("cpu", servers=3) < 500
    # Half a measurement says nothing.
    (folder / "spec.broken").touch()
    load.run()
    assert learned[2:] == [(2, False, 3)] * 2


def test_all_servers_are_gone_when_the_tool_is_ended(folder: Path, tmp_path: Path) -> None:
    class Ended(Load):
        def measure(self, mode: BenchMode, server: Server, labels: Labels) -> None:
            raise SystemExit(143)

    load = Ended(measurement(tmp_path, "--modes", "base,spec", "--servers-at-once", "2"))
    with pytest.raises(SystemExit):
        load.run()
    assert not any(runs(started(folder, name)["pid"]) for name in ("base", "spec"))


def test_servers_of_a_group_get_ports_of_their_own(folder: Path, tmp_path: Path) -> None:
    Load(measurement(tmp_path, "--modes", "base,spec", "--servers-at-once", "2")).run()
    base, spec = (int(value_of("--port", started(folder, name)["arguments"]) or 0) for name in ("base", "spec"))
    assert abs(base - spec) > 1000


@pytest.mark.parametrize(
    "argv",
    [
        ["--passes", "0"],
        ["--rounds", "0"],
        ["--servers-at-once", "0"],
        ["--servers-at-once", "9"],
        ["--modes", "base,base"],
        ["--modes", ","],
    ],
    ids=str,
)
def test_nonsense_is_refused(argv: list[str]) -> None:
    with pytest.raises(SystemExit):
        parse(argv)


def test_each_pass_of_the_ramp_has_rows_of_its_own(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    warm: list[str] = []
    sent: list[Any] = []

    def send(url: str, trace: Any, drain_s: float) -> Recording:
        sent.append((url, trace))
        at_s = 1.5 + len(sent) % 2
        answer = Answer(0.5, 0.0, (at_s, at_s + 0.1), (0.1,), at_s + 0.1)
        return Recording([answer], [Moment(0.0, 0, 0)], [Switch(at_s, "spec", "plain", "load", 1)])

    monkeypatch.setattr("bench.ramp.load.send", send)
    monkeypatch.setattr(ramp, "warm_up", lambda url, *_: warm.append(url))
    out = tmp_path / "r.jsonl"
    argv = ["--device", "cpu", "--modes", "base,spec", "--servers-at-once", "2", "--passes", "2", "--phases", "2s@3/s"]
    assert ramp.main([*argv, "--out", str(out)]) == 0
    urls = [url for url, _ in sent]
    assert (warm, urls) == ([urls[0], urls[1]], [urls[0], urls[1], urls[1], urls[0]])
    assert all(trace == sent[0][1] for _, trace in sent)
    results = Results.read(out)
    turns = [("base", 0), ("spec", 0), ("spec", 1), ("base", 1)]
    for kind in ("second", "switch", "measurement"):
        assert list(dict.fromkeys((row["mode"], row["pass"]) for row in results.of_kind(kind))) == turns
    assert results.header["settings"].items() >= {"passes": 2, "servers_at_once": 2}.items()
    assert "Measured in turns, one group of servers after the other: base, spec." in capsys.readouterr().out


def test_no_pass_of_bench_serve_has_the_prompts_of_another(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: dict[str, list[int]] = {}
    result = dict.fromkeys(serve._KEPT.values(), 5.0)

    def run(self: serve.Client, rate: float, prompts: int, seed: int) -> dict[str, Any]:
        seeds.setdefault(self._url, []).append(seed)
        return result

    monkeypatch.setattr(serve.Client, "run", run)
    argv = ["--device", "cpu", "--modes", "base,spec", "--servers-at-once", "2", "--passes", "2", "--repeats", "3"]
    assert serve.main([*argv, "--seed", "7", "--out", str(tmp_path / "r.jsonl")]) == 0
    # The first one is the warm-up's.
    assert list(seeds.values()) == [[7, 8, 9, 10, 11, 12, 13]] * 2
    [line] = [line for line in (tmp_path / "r.md").read_text().splitlines() if "| spec |" in line]
    assert line == "| inf | spec | 5 | 1.000 |  |  | 6 |"

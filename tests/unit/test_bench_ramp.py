"""The ramp: its arrivals, its figures, its bounds. The load itself runs against a server only."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import aiohttp
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer as HttpServer
from hypothesis import given
from hypothesis import strategies as st

from bench import check, models
from bench.bounds import RampBound, ServeBound, SwitchBound
from bench.ramp import report
from bench.ramp.__main__ import PHASES, parse, ramp_modes
from bench.ramp.client import Answer, Moment, Recording, Switch, Watcher, warm_up
from bench.ramp.outcome import complaints, most_switches_a_change, seconds, summary
from bench.ramp.trace import Phase, Request, arrivals, boundaries, make_trace, parse_phases, rises_and_falls
from bench.results import Results, append_row
from bench.serving import flags
from sglang_adaptive_spec.modes import Mode, Reason

HEADER: dict[str, Any] = {
    "kind": "header",
    "tool": "bench.ramp",
    "started": "2026-01-01T00:00:00+00:00",
    "command": "python -m bench.ramp",
    "settings": {
        "attention_backend": "fa3",
        "device": "cuda",
        "input_tokens": 8,
        "max_running_requests": 256,
        "model": None,
        "model_shape": "llama-8b",
        "output_tokens": 4,
        "phases": "2s@1/s,2s@3/s",
        "rate_scale": 1.0,
        "seed": 1,
        "simulate_accept_length": 2.5,
        "threshold": 32,
        "time_scale": 1.0,
    },
    "host": {
        "gpu": "NVIDIA H200",
        "cpu": "some CPU",
        "commit": "abc",
        "plugin_digest": "d1",
        "packages": {"sglang": "0.5.14", "torch": "2.11.0"},
    },
}


def test_phases_are_read_and_scaled() -> None:
    assert parse_phases("8s@2/s,4s@2-50/s") == (Phase(8, 2, 2), Phase(4, 2, 50))
    assert parse_phases("8s@2/s", time_scale=0.5, rate_scale=3) == (Phase(4, 6, 6),)
    assert boundaries(parse_phases("8s@2/s,4s@2-50/s")) == [0, 8, 12]
    for wrong in ("", "8@2/s", "8s@2", "0s@2/s", "8s@2/s;4s@1/s"):
        with pytest.raises(ValueError, match="phase"):
            parse_phases(wrong)


RATES = st.floats(0, 50)
PHASE = st.builds(Phase, st.floats(0.5, 20), RATES, RATES)


@given(st.lists(PHASE, min_size=1, max_size=5), st.integers(0, 1000))
def test_arrivals_are_ordered_and_lie_in_phases_that_have_any(phases: list[Phase], seed: int) -> None:
    times = list(arrivals(phases, random.Random(seed)))
    edges = boundaries(phases)
    assert all(a <= b for a, b in pairwise(times))
    assert all(-1e-6 <= t <= edges[-1] + 1e-6 for t in times)
    silent = [(a, b) for (a, b), phase in zip(pairwise(edges), phases, strict=True) if not phase.expected_requests]
    assert not [t for t in times for a, b in silent if a + 1e-6 < t < b - 1e-6]


def test_arrivals_follow_the_rate() -> None:
    times = list(arrivals(parse_phases("100s@2/s,100s@2-40/s,100s@40/s"), random.Random(3)))
    counts = [sum(a <= t < b for t in times) for a, b in ((0, 100), (100, 150), (150, 200), (200, 300))]
    for count, expected in zip(counts, (200, 575, 1525, 4000), strict=True):
        assert abs(count - expected) < 4 * expected**0.5


def test_every_mode_gets_the_same_trace() -> None:
    phases = parse_phases("5s@4/s")
    one, other = (make_trace(phases, seed=7, input_tokens=6, output_tokens=9, vocab=50) for _ in range(2))
    assert one == other
    assert one != make_trace(phases, seed=8, input_tokens=6, output_tokens=9, vocab=50)
    assert all(len(r.prompt) == 6 and 5 <= r.output_tokens <= 9 and 2 <= min(r.prompt) < 50 for r in one)


def test_command_line_and_modes() -> None:
    args = parse(["--modes", "base,ours-auto", "--threshold", "12"])
    assert args.modes == ["base", "ours-auto"]
    assert (args.attention_backend, args.model_shape, args.simulate_accept_length) == ("fa3", "llama-8b", 2.5)
    assert sum(phase.seconds for phase in parse_phases(PHASES)) == 45
    assert ramp_modes(12)["ours-threshold"].plugin == {"policy": "threshold", "disable_batch_threshold": 12}
    real = parse(["--model-path", "m", "--draft-path", "d", "--device", "cpu"])
    assert (real.simulate_accept_length, real.model_shape, real.attention_backend) == (None, None, "cpu")
    for wrong in (["--modes", "x"], ["--phases", "x"], ["--model-path", "m"], ["--phases", "1s@0.1/s"]):
        with pytest.raises(SystemExit):
            parse(wrong)


def test_arguments_become_flags() -> None:
    arguments = {"a_b": 1, "on": True, "off": False, "none": None, "sizes": [1, 2]}
    assert flags(arguments) == ["--a-b", "1", "--on", "--sizes", "1", "2"]


PHASES_OF_TWO = parse_phases("2s@1/s,2s@3/s")
RECORDING = Recording(
    answers=[
        Answer(0.0, 0.001, (0.5, 1.0, 1.5), (0.5, 0.5), 1.5),
        Answer(3.0, 0.002, (3.2, 3.9, 4.5), (0.7, 0.6), 4.5),  # its last token comes too late
    ],
    moments=[
        Moment(0.0, 0, 0, "spec", 10, 20, 1),
        Moment(3.0, 2, 1, "plain", 12, 24, 2, catch_ups=3, catch_up_s=0.04, waited=7),
        Moment(5.0, 0, 0, "spec", 16, 26, 4),
    ],
    switches=[
        Switch(2.5, "spec", "plain", "load", 2),
        Switch(4.4, "plain", "spec", "load", 1),
        Switch(4.6, "spec", "plain", "load", 1),
    ],
)


def test_summary_is_the_area_under_the_curves() -> None:
    row = summary(RECORDING, PHASES_OF_TWO)
    assert (row["tokens"], row["window_tokens"], row["window_s"], row["drained_s"]) == (6, 5, 4.0, 4.5)
    assert row["ttft_ms"] == {"mean": 350.0, "p50": 500.0, "p99": 500.0}
    assert row["itl_ms"]["mean"] == 575.0
    assert row["latency_ms"]["mean"] == 1500.0
    assert row["plain_step_share"] == 0.5
    # What follows the last phase belongs to it.
    assert (row["switches"], row["switches_by_phase"]) == (3, [0, 3])


def switch(at_s: float, after: Mode, reason: Reason) -> Switch:
    return Switch(at_s, after.other.value, after.value, reason.value, 4)


def test_a_probe_of_no_use_is_no_switch() -> None:
    switches = [
        switch(0.5, Mode.PLAIN, Reason.PROBE),
        switch(0.6, Mode.SPEC, Reason.PROBE_OVER),
        switch(1.0, Mode.PLAIN, Reason.PLAIN_FASTER),
        switch(2.1, Mode.SPEC, Reason.PROBE),
        switch(2.2, Mode.PLAIN, Reason.PROBE_OVER),
        switch(3.0, Mode.SPEC, Reason.PROBE),  # found to be faster: it stays
    ]
    row = summary(replace(RECORDING, switches=switches), PHASES_OF_TWO)
    assert (row["switches"], row["switches_by_phase"], row["probes"]) == (2, [1, 1], 2)


def switch_row(at_s: float, after: Mode, reason: Reason, mode: str, pass_number: int = 0) -> dict[str, Any]:
    labels = {"mode": mode, "backend": "fa3", "round": 0, "pass": pass_number}
    return {"kind": "switch", **labels, **asdict(switch(at_s, after, reason))}


PLAIN, SPEC = (Mode.PLAIN, Reason.PLAIN_FASTER), (Mode.SPEC, Reason.SPEC_FASTER)


@pytest.mark.parametrize(
    ("switches", "most"),
    [
        ([], 0),
        # The rush from 2 to 4 s is at its fullest when it is over: both are right, and each has a change to answer.
        ([(4.3, *PLAIN), (5.5, *SPEC)], 1),
        ([(2.1, *PLAIN), (4.3, *SPEC)], 1),
        # To and fro, though nothing has changed between.
        ([(0.2, *PLAIN), (0.4, *SPEC), (2.1, *PLAIN)], 2),
        ([(2.1, *PLAIN), (2.3, *SPEC)], 2),
        ([(2.1, *PLAIN), (2.5, *SPEC), (3.0, *PLAIN)], 3),
        ([(2.1, *PLAIN), (4.3, *SPEC), (4.8, *PLAIN), (5.5, *SPEC)], 3),
        # Two to plain for one rise, whatever fell between; two to spec for one fall.
        ([(2.1, *PLAIN), (5.0, *PLAIN)], 2),
        ([(4.3, *SPEC), (7.0, *SPEC)], 2),
        # The load rises from 6 s on, gradually.
        ([(2.1, *PLAIN), (4.3, *SPEC), (7.0, *PLAIN)], 1),
        # A try of no use is none.
        ([(2.1, Mode.PLAIN, Reason.PROBE), (2.2, Mode.SPEC, Reason.PROBE_OVER), (3.0, *PLAIN)], 1),
    ],
)
def test_a_switch_answers_a_change_of_the_load_in_its_direction(switches: list[Any], most: int) -> None:
    phases = {"phases": "20s@1/s,20s@30/s,20s@1/s,20s@1-20/s", "time_scale": 0.1}
    header = HEADER | {"settings": HEADER["settings"] | phases}
    of_another = [
        switch_row(at_s, *PLAIN, "ours-auto") | other
        for other in ({"pass": 1}, {"round": 1}, {"backend": "triton"}, {"mode": "ours-threshold"})
        for at_s in (2.1, 2.2, 2.3, 2.4)
    ]
    rows = [switch_row(*each, "ours-auto") for each in switches]
    results = Results([header, *rows, *of_another])
    assert most_switches_a_change(results, {"mode": "ours-auto", "backend": "fa3", "round": 0, "pass": 0}) == most


def test_a_load_rises_and_falls() -> None:
    assert rises_and_falls(parse_phases("5s@3/s,5s@3-70/s,5s@70/s,5s@70-5/s,5s@5/s,5s@80/s,5s@5/s,5s@60-2/s")) == (
        [0, 5, 25, 35],
        [15, 30, 35],
    )


def test_series_has_a_row_a_second() -> None:
    rows = list(seconds(RECORDING, PHASES_OF_TWO))
    assert [row["tokens"] for row in rows] == [1, 2, 0, 2, 1]
    assert [row["arrived"] for row in rows] == [1, 0, 0, 1, 0]
    assert [row["offered_per_s"] for row in rows] == [1, 1, 3, 3, 0]
    assert [row["server_mode"] for row in rows] == ["spec", "spec", "plain", "plain", "spec"]
    assert rows[2]["since_start"] == {
        "plain_steps": 12,
        "spec_steps": 24,
        "catch_ups": 3,
        "catch_up_s": 0.04,
        "waited": 7,
    }
    assert rows[3]["ttft_ms"] == 200.0
    assert rows[3]["itl_ms"] == 700.0


def test_a_server_without_the_plugin_counts_nothing() -> None:
    rows = seconds(replace(RECORDING, moments=[Moment(0.0, 0, 0)]), PHASES_OF_TWO)
    assert {row["since_start"] for row in rows} == {None}


def test_failed_requests_are_told() -> None:
    failed = Answer(0.0, 0.0, (), (), 0.0, "Traceback\n  ConnectionError: gone")
    assert complaints([failed, failed, *RECORDING.answers]) == ["2 requests: ConnectionError: gone"]


def rows_of(
    mode: str, tokens: int, latency: float, switches: int = 0, backend: str = "fa3", pass_number: int = 0
) -> list[dict[str, Any]]:
    labels = {"mode": mode, "backend": backend, "round": 0, "pass": pass_number}
    row = summary(RECORDING, PHASES_OF_TWO) | {"window_tokens": tokens, "switches": switches}
    row["latency_ms"] = row["latency_ms"] | {"mean": latency}
    series = [{"kind": "second", **labels, **second} for second in seconds(RECORDING, PHASES_OF_TWO)]
    changes = [switch_row(2.5, *PLAIN, mode, pass_number) for _ in range(switches)]
    return [*series, *changes, {"kind": "measurement", **labels, **row}]


def ramp(ours: int, latency: float, switches: int) -> Results:
    rows = [HEADER, *rows_of("base", 100, 50), *rows_of("spec", 90, 40), *rows_of("ours-auto", ours, latency, switches)]
    return Results(rows, "ramp.jsonl")


def passes(*of_auto: tuple[int, float, int]) -> Results:
    """Tokens, latency and switches of the policy in each pass."""
    rows = [HEADER]
    for number, (tokens, latency, switches) in enumerate(of_auto):
        rows += rows_of("base", 100, 50, pass_number=number) + rows_of("spec", 90, 40, pass_number=number)
        rows += rows_of("ours-auto", tokens, latency, switches, pass_number=number)
    return Results(rows, "ramp.jsonl")


def twice(ours: int, latency: float, switches: int) -> Results:
    return passes((ours, latency, switches), (ours, latency, switches))


@pytest.mark.parametrize(
    ("bound", "results", "word"),
    [
        (RampBound("D", "ours-auto", ("fa3",), 0.97), twice(98, 99, 9), "ok"),
        (RampBound("D", "ours-auto", ("fa3",), 0.97), twice(96, 1, 0), "MISSED"),
        # Each is compared with the one that is better in that respect.
        (RampBound("D", "ours-auto", ("fa3",), 0.97, by_latency=True), twice(1, 41, 9), "ok"),
        (RampBound("D", "ours-auto", ("fa3",), 0.97, by_latency=True), twice(100, 42, 0), "MISSED"),
        (RampBound("D", "ours-auto", ("triton",), 0.97), twice(100, 40, 0), "never"),
        (SwitchBound("D", "ours-auto", ("fa3",), 1), twice(1, 99, 1), "ok"),
        (SwitchBound("D", "ours-auto", ("fa3",), 1), twice(100, 40, 2), "MISSED"),
    ],
)
def test_bounds(bound: Any, results: Results, word: str) -> None:
    assert [verdict.word for verdict in check.judge([bound], [results])] == [word]


def test_a_ramp_run_once_settles_no_bound_but_that_of_switches() -> None:
    for bound, word in (
        (RampBound("D", "ours-auto", ("fa3",), 0.97), "never"),
        (SwitchBound("D", "ours-auto", ("fa3",), 1), "ok"),
    ):
        assert [verdict.word for verdict in check.judge([bound], [ramp(98, 41, 1)])] == [word]


@pytest.mark.parametrize(
    ("bound", "results", "word", "text"),
    [
        (
            RampBound("D", "ours-auto", ("fa3",), 0.97),
            passes((98, 41, 0), (99, 41, 0)),
            "ok",
            "0.9850 (0.9800 to 0.9900",
        ),
        # With the other pass alone it would not be met.
        (RampBound("D", "ours-auto", ("fa3",), 0.97), passes((96, 41, 0), (99, 41, 0)), "UNSETTLED", "2 turns"),
        # Of the switches the most, in whichever pass.
        (SwitchBound("D", "ours-auto", ("fa3",), 1), passes((98, 41, 1), (98, 41, 0)), "ok", "1.00 switches (1.00 to"),
        (SwitchBound("D", "ours-auto", ("fa3",), 1), passes((98, 41, 0), (98, 41, 2)), "MISSED", "2.00, 2 repeats)"),
    ],
)
def test_bounds_over_several_passes(bound: Any, results: Results, word: str, text: str) -> None:
    [verdict] = check.judge([bound], [results])
    assert verdict.word == word
    assert text in str(verdict.figure)


def test_serving_bound() -> None:
    def measured(mode: str, *rates: float) -> dict[str, Any]:
        runs = [{"output_tokens_per_s": rate} for rate in rates]
        row = {"kind": "measurement", "backend": "fa3", "mode": mode, "round": 0, "request_rate": "inf"}
        return row | {"repeats": runs}

    bound = ServeBound("C", "ours-plain", ("fa3",), "base", 0.97)
    for ours, word in (((98, 98, 97), "ok"), ((90, 91, 92), "MISSED"), ((100,), "never")):
        rows = [HEADER | {"tool": "bench.serve"}, measured("base", 100, 100, 99), measured("ours-plain", *ours)]
        assert [verdict.word for verdict in check.judge([bound], [Results(rows)])] == [word]


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("matplotlib")
    error = {"kind": "error", "mode": "spec", "round": 0, "error": "it broke"}
    for row in [*ramp(98, 41, 1).rows, error]:
        append_row(tmp_path / "r.jsonl", row)
    report.write(tmp_path / "r.jsonl")
    table = capsys.readouterr().out
    assert "| ours-auto | 98 | 350 / 500 / 500 |" in table
    assert "It kept up." in table
    assert "- spec: it broke" in table
    assert (tmp_path / "r.png").stat().st_size > 10_000


def test_report_of_several_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = passes((98, 41000, 1), (90, 43000, 3)).rows
    rows[0] = HEADER | {"settings": HEADER["settings"] | {"modes": ["base", "spec", "ours-auto"], "servers_at_once": 3}}
    late = next(row for row in rows if row["kind"] == "measurement" and row["mode"] == "spec")
    late["sent_late_ms"] = {"mean": 1, "p50": 1, "p99": 250}
    rows.append({"kind": "error", "mode": "spec", "round": 0, "pass": 2, "error": "it broke"})
    results = Results(rows)
    table = report.markdown(results)
    [line] = [line for line in table.splitlines() if line.startswith("| ours-auto")]
    assert line.startswith("| ours-auto | 94 | 350 / 500 / 500 |")
    assert "| 42.00 / " in line
    assert line.endswith("| 50% | 2 (3) | 0 | 2 |")
    assert "spec 250, " in table
    assert "did not keep up" in table
    assert "- spec, pass 3: it broke" in table
    assert "Measured in turns, one group of servers after the other: base, spec, ours-auto." in table
    # The plot's curves are those of one pass, and so are its vertical lines.
    for kind, of_first in (("second", 5), ("switch", 1)):
        assert len(report._of_first_run(Results(rows), kind, "ours-auto")) == of_first


def test_each_token_of_dummy_weights_has_a_word(tmp_path: Path) -> None:
    tokenizers = pytest.importorskip("tokenizers")
    shape = models.SHAPES["tiny"]
    models.write_tokenizer(tmp_path, shape)
    tokenizer = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == shape.vocab_size
    assert tokenizer.decode([0, 17, 511]) == "t0 t17 t511"
    assert tokenizer.encode("t17 something").ids == [17, 0]


def test_the_warm_up_goes_through_every_power_of_two(monkeypatch: pytest.MonkeyPatch) -> None:
    sent: list[list[int]] = []

    def send(url: str, trace: Sequence[Request], drain_s: float) -> Recording:
        sent.append([request.output_tokens for request in trace])
        return Recording([], [], [])

    monkeypatch.setattr("bench.ramp.client.send", send)
    warm_up("http://server", most_requests=24, input_tokens=8, vocab=100)
    assert [len(burst) for burst in sent] == [1, 2, 4, 8, 16, 24, 1]
    assert sent[-1][0] > sent[0][0], "the last one is alone for longer"


def test_what_a_server_did_before_the_trace_is_no_switch_of_it() -> None:
    # It counts from a second before its first arrival, and the pass before ended a tenth of one before that.
    now, start = time.time(), time.perf_counter() - 1.0
    switches = [switched(step=40, at=now - 60, to="plain"), switched(step=50, at=now - 0.1, to="spec")]
    counts = {"switches": 2, "catch_ups": 1, "catch_up_seconds": 0.1, "deferred_prompts": 0}
    plugin = {"mode": "spec", "steps": {"plain": 10, "spec": 40}, "last_switches": switches, **counts}
    load = {"num_running_reqs": 0, "num_waiting_reqs": 0}

    async def info(_: web.Request) -> web.Response:
        return web.json_response({"internal_states": [{"adaptive_spec": plugin}]})

    async def loads(_: web.Request) -> web.Response:
        return web.json_response({"loads": [load]})

    async def watch() -> Watcher:
        app = web.Application()
        app.add_routes([web.get("/server_info", info), web.get("/v1/loads", loads)])
        async with HttpServer(app) as server, aiohttp.ClientSession(server.make_url("/")) as session:
            watcher = Watcher(session, start)
            await watcher.poll()
            for later in (switched(step=55, at=now + 0.2, to="plain"), switched(step=70, at=now + 0.5, to="spec")):
                switches.append(later)
                await watcher.poll()
            return watcher

    watcher = asyncio.run(watch())
    assert [(switch.before, switch.after) for switch in watcher.switches] == [("spec", "plain"), ("plain", "spec")]
    assert [round(switch.at_s - 1.0, 1) for switch in watcher.switches] == [0.2, 0.5]
    assert len(watcher.moments) == 3


def switched(step: int, at: float, to: str) -> dict[str, Any]:
    before = Mode(to).other.value
    return {"step": step, "at_seconds": at, "from": before, "to": to, "reason": "load", "running_requests": 3}

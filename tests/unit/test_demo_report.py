"""What the demo makes of the server's counters."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from rich.console import Console

from bench.demo.live import Moment, line, sparkline
from bench.demo.load import Answer, Phase, TokenMeter
from bench.demo.report import Outcome, complaints, phase_rows, plot, sample_at, table
from bench.demo.watch import (
    Band,
    Sample,
    Switch,
    Watcher,
    WatchError,
    accept_length,
    bands,
    plain_share,
)

START = Sample(
    at=100.0,
    mode="spec",
    running=0,
    spec_steps=0,
    plain_steps=0,
    spec_tokens=0,
    plain_tokens=0,
    verified=0,
    switches=0,
)
QUIET = replace(START, at=110.0, running=2, spec_steps=50, spec_tokens=250, verified=100)
BUSY = replace(QUIET, at=120.0, mode="plain", running=20, plain_steps=150, plain_tokens=3000, switches=1)
END = replace(BUSY, at=130.0, mode="spec", running=0, spec_steps=100, spec_tokens=490, verified=200, switches=2)
UP = Switch(step=50, at=111.0, before="spec", after="plain", reason="load", running=20)
DOWN = Switch(step=200, at=121.0, before="plain", after="spec", reason="load", running=6)

OUTCOME = Outcome(
    trace=(Phase("quiet", 2, 10.0), Phase("busy", 20, 10.0), Phase("quiet", 2, 10.0)),
    boundaries=(100.0, 110.0, 120.0, 130.0),
    samples=(START, QUIET, BUSY, END),
    switches=(UP, DOWN),
    answers=(Answer(0, 0, 5, None, 1.0), Answer(1, 1, 5, None, 1.0), Answer(0, 2, 5, None, 1.0)),
    meter=TokenMeter([(105.0, 250), (115.0, 3000), (125.0, 240)]),
    threshold=8,
    resume=6,
)


def test_accept_length_is_over_speculative_steps_alone() -> None:
    assert accept_length(START, QUIET) == 2.5
    assert accept_length(QUIET, BUSY) is None
    assert accept_length(START, END) == 2.45


def test_plain_share() -> None:
    assert plain_share(START, QUIET) == 0.0
    assert plain_share(QUIET, BUSY) == 1.0
    assert plain_share(START, END) == 0.6
    assert plain_share(START, START) is None


def test_bands_are_cut_at_the_switches() -> None:
    assert bands([DOWN, UP], "spec", 100.0, 130.0) == [
        Band(100.0, 111.0, "spec"),
        Band(111.0, 121.0, "plain"),
        Band(121.0, 130.0, "spec"),
    ]
    assert bands([], "plain", 0.0, 1.0) == [Band(0.0, 1.0, "plain")]
    # A switch from before the time shown says only what the mode was.
    assert bands([UP], "spec", 120.0, 130.0) == [Band(120.0, 130.0, "plain")]


def test_sample_at() -> None:
    samples = OUTCOME.samples
    assert sample_at(samples, 99.0) is START
    assert sample_at(samples, 110.0) is QUIET
    assert sample_at(samples, 129.0) is BUSY


def test_a_row_for_each_phase() -> None:
    quiet, busy, last = phase_rows(OUTCOME)
    assert (quiet.plain_share, quiet.accept_length, quiet.tokens_per_second) == (0.0, 2.5, 25.0)
    assert (busy.plain_share, busy.accept_length, busy.tokens_per_second) == (1.0, None, 300.0)
    assert (busy.to_plain, busy.to_spec, last.to_plain, last.to_spec) == (1, 0, 0, 1)
    assert [row.requests for row in (quiet, busy, last)] == [1, 1, 1]


def test_the_table_fits_a_narrow_terminal() -> None:
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(OUTCOME))
    assert "…" not in capture.get()
    assert "accept" in capture.get()


def test_success_needs_both_switches_and_right_answers() -> None:
    assert complaints(OUTCOME) == []
    assert "never switched" in complaints(replace(OUTCOME, switches=()))[0]
    assert "never came back" in complaints(replace(OUTCOME, switches=(UP,)))[0]
    assert "No request" in complaints(replace(OUTCOME, answers=()))[0]
    wrong = replace(OUTCOME, answers=(*OUTCOME.answers, Answer(3, 1, 5, 4, 1.0)))
    assert "1 of 4 answers differ" in complaints(wrong)[0]
    assert "prompt 3, from token 4" in complaints(wrong)[0]
    assert "1 of 4 answers differ" in complaints(replace(wrong, on_gpu=True))[0]
    many = replace(wrong, answers=OUTCOME.answers * 3 + wrong.answers[-1:])
    assert "1 of 10 answers differ" in complaints(many)[0]
    assert complaints(replace(many, on_gpu=True)) == []
    faulty = replace(OUTCOME, samples=(START, replace(END, faults=2)))
    assert "2 faults" in complaints(faulty)[0]


def test_the_plot_is_a_picture(tmp_path: Path) -> None:
    path = tmp_path / "made" / "demo.png"
    plot(OUTCOME, path, "title")
    assert path.read_bytes().startswith(b"\x89PNG")


def test_sparkline() -> None:
    assert sparkline([]) == ""
    assert sparkline([0.0, None, 10.0]) == "▁ █"
    assert sparkline([0.0, 0.0]) == "▁▁"


def test_a_line_has_all_that_the_panel_has() -> None:
    moment = Moment(3.2, "busy", "plain", 20, 567.8, None, 12, 0, 1)
    assert " ".join(line(moment).split()) == (
        "3 s busy mode plain batch 20 568 tokens/s accept length - answers 12 (0 wrong) switches 1"
    )


STATE = {
    "mode": "plain",
    "steps": {"spec": 50, "plain": 150},
    "tokens": {"spec": 240, "plain": 3000},
    "accepted_tokens": 250,
    "verified_requests": 100,
    "switches": 1,
    "faults": 0,
    "last_switches": [
        {
            "step": 50,
            "from": "spec",
            "to": "plain",
            "reason": "load",
            "running_requests": 20,
            "at_seconds": 111.0,
        }
    ],
}


def _watcher(state: dict[str, object]) -> Watcher:
    def handle(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/server_info":
            return httpx.Response(200, json={"internal_states": [state]})
        return httpx.Response(200, json={"loads": [{"num_running_reqs": 20}]})

    transport = httpx.MockTransport(handle)
    return Watcher(httpx.AsyncClient(base_url="http://server", transport=transport))


def test_the_watcher_reads_what_the_plugin_shows() -> None:
    watcher = _watcher({"adaptive_spec": STATE})

    async def twice() -> None:
        await watcher.poll()
        await watcher.poll()

    asyncio.run(twice())
    assert [replace(sample, at=BUSY.at) for sample in watcher.samples] == [BUSY, BUSY]
    assert watcher.switches == [UP]  # once, however often it is reported


def test_a_server_without_the_plugin_is_an_error() -> None:
    with pytest.raises(WatchError, match="without the plugin"):
        asyncio.run(_watcher({}).poll())

"""What the live view draws, and the loop that feeds it."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from typing import Any

import pytest
from rich.console import Console

from sglang_adaptive_spec.top import run as command
from sglang_adaptive_spec.top.__main__ import main
from sglang_adaptive_spec.top.errors import NotAllowed, ServerGone, TopError
from sglang_adaptive_spec.top.history import History
from sglang_adaptive_spec.top.sampler import Sample
from sglang_adaptive_spec.top.screen import Screen, describe, duration, mode_strip, value_strip
from tests.unit.top_samples import SWITCH, THRESHOLD, sample, steady


def history_of(*samples: Sample) -> History:
    history = History(keep_seconds=300)
    for one in samples:
        history.add(one)
    return history


def drawn(history: History, *, columns: int = 100, silent_seconds: float = 0.0, url: str = "http://box:30000") -> str:
    console = Console(file=io.StringIO(), width=columns, color_system=None, legacy_windows=False)
    console.print(Screen(history, url, 60.0, 1.0, silent_seconds))
    text: str = console.file.getvalue()  # type: ignore[attr-defined]
    assert max(map(len, text.splitlines())) <= columns
    return text


def test_a_frame_says_the_mode_and_why() -> None:
    first = steady(1000.0, plain=False)
    text = drawn(history_of(first, steady(1002.0, plain=True, since=first)))
    assert "http://box:30000  SGLang 0.5.14" in text
    assert "plain above 64 running, spec again at 48" in text
    assert "PLAIN  for 12 s: more requests run than the threshold (65 running, step 100)" in text
    assert "100 %" in text
    assert "12.3 ms" in text
    assert "catch-ups     2 (48 tokens)" in text
    assert "3 sizes, 0.41 GiB" in text


def test_a_dry_run_says_what_would_run() -> None:
    dry = {"mode": "spec", "dry_run": True, "decided_mode": "plain", "steps": {"spec": 100, "plain": 0}}
    first = sample(1000.0, **dry, dry_run_steps={"spec": 90, "plain": 10})
    dry["steps"] = {"spec": 120, "plain": 0}
    text = drawn(history_of(first, sample(1002.0, **dry, dry_run_steps={"spec": 95, "plain": 25})))
    assert "dry run of: plain above 64 running, spec again at 48" in text
    assert "SPEC  in a dry run; else plain for 12 s: more requests run than the threshold" in text
    assert any(line.split()[:4] == ["plain", "wanted", "75", "%"] for line in text.splitlines()), text


def test_the_last_switches_come_newest_first() -> None:
    back = {**SWITCH, "from": "plain", "to": "spec", "reason": "few enough requests run to resume", "at_seconds": 999.0}
    text = drawn(history_of(sample(1000.0, last_switches=[SWITCH, back])))
    assert text.index("plain → spec") < text.index("spec → plain")


@pytest.mark.parametrize("columns", [40, 59, 80, 200])
def test_a_frame_fits_its_terminal(columns: int) -> None:
    first = steady(1000.0, plain=False)
    text = drawn(history_of(first, steady(1030.0, plain=True, since=first)), columns=columns)
    for name in ("plain steps", "tokens/s", "accept length"):
        assert name in text


def test_a_frame_without_a_second_sample_or_a_switch_has_dashes() -> None:
    text = drawn(history_of(sample(1000.0, last_switches=[], switches=0)))
    assert "since the start: no switch yet" in text
    assert any(line.split()[:2] == ["tokens/s", "-"] for line in text.splitlines())


def test_a_silent_server_and_a_thrown_kill_switch_are_said() -> None:
    text = drawn(history_of(sample(1000.0, mode="spec", spec_only=True, faults=3)), silent_seconds=4.2)
    assert "no answer for 4 s" in text
    assert "until the next start: repeated faults of the plugin" in text


def test_strips_read_without_colours() -> None:
    first = steady(1000.0, plain=False)
    second = steady(1001.0, plain=False, since=first)
    slots = history_of(first, second, steady(1002.0, plain=True, since=second)).slots(4, 1.0)
    assert mode_strip(slots).plain[:3] == " ▁█"
    assert value_strip([0.0, 1.0, None, 2.0]).plain == "▁▅ █"
    assert value_strip([]).plain == ""


def test_settings_and_times_read_as_said_aloud() -> None:
    assert describe(THRESHOLD) == "plain above 64 running, spec again at 48"
    assert describe({"policy": "spec"}) == "always spec"
    assert describe({"policy": "auto"}) == "policy auto"
    assert [duration(s) for s in (-1, 59, 61, 300, 3700)] == ["0 s", "59 s", "1 min 1 s", "5 min", "1 h 1 min"]


class Scripted:
    """A sampler that says, or raises, one thing after the other."""

    url = "http://box:30000"

    def __init__(self, *script: Sample | TopError) -> None:
        self._script = iter(script)

    def sample(self) -> Sample:
        said = next(self._script)
        if isinstance(said, TopError):
            raise said
        return said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(command.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(command.time, "sleep", lambda seconds: now.__setitem__(0, now[0] + seconds))
    return now


def test_a_server_silent_for_a_while_is_waited_for_and_then_given_up(clock: list[float]) -> None:
    gone = ServerGone("gone")
    looks = command.look(Scripted(sample(1000.0), gone, sample(1002.0), *[gone] * 99), History(60), 1.0)  # type: ignore[arg-type]
    assert [next(looks) for _ in range(3)] == [0.0, 1.0, 0.0]
    with pytest.raises(ServerGone):
        list(looks)
    assert clock[0] == pytest.approx(2 + command.GIVE_UP_SECONDS, abs=1)


def test_a_server_that_was_never_there_or_changed_its_mind_ends_it_at_once(clock: list[float]) -> None:
    with pytest.raises(ServerGone):
        next(command.look(Scripted(ServerGone("gone")), History(60), 1.0))  # type: ignore[arg-type]
    looks = command.look(Scripted(sample(1000.0), NotAllowed("key")), History(60), 1.0)  # type: ignore[arg-type]
    next(looks)
    with pytest.raises(NotAllowed):
        next(looks)


def scripted(monkeypatch: pytest.MonkeyPatch, *script: Sample | TopError) -> None:
    monkeypatch.setattr(command, "Sampler", lambda url, key: Scripted(*script))
    monkeypatch.setattr(command.time, "sleep", lambda seconds: None)


def test_once_prints_a_frame_or_json(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    first = steady(1000.0, plain=False)
    for options in ([], ["--json"]):
        scripted(monkeypatch, first, steady(1001.0, plain=True, since=first))
        command.run(["box:30000", "--once", *options])
    frame, _, told = capsys.readouterr().out.partition("{")
    assert "PLAIN" in frame
    assert json.loads("{" + told)["tokens_per_second"] == pytest.approx(400)


def test_json_is_a_line_a_look(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    scripted(monkeypatch, sample(1000.0), sample(1001.0), NotAllowed("key"))
    with pytest.raises(NotAllowed):
        command.run(["box:30000", "--json"])
    assert [json.loads(line)["at_seconds"] for line in capsys.readouterr().out.splitlines()] == [1000.0, 1001.0]


@pytest.mark.parametrize("arguments", [[], ["box"], ["box", "--once", "--interval", "0"], ["box", "--interval", "x"]])
def test_wrong_options_and_no_terminal_are_usage_errors(arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        command.run(arguments)
    assert ended.value.code == 2


def test_an_error_is_one_line_and_its_exit_code(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    scripted(monkeypatch, ServerGone("No answer from http://box:30000."))
    monkeypatch.setattr(sys, "argv", ["top", "box:30000", "--once"])
    assert main() == os.EX_UNAVAILABLE
    assert capsys.readouterr().err == "sglang-adaptive-spec top: No answer from http://box:30000.\n"


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    keys: list[Any] = []

    def made(url: str, key: str | None) -> Scripted:
        keys.append(key)
        return Scripted(ServerGone("gone"))

    monkeypatch.setattr(command, "Sampler", made)
    monkeypatch.setenv(command.KEY_VARIABLE, "from the environment")
    for options in ([], ["--api-key", "given"]):
        with pytest.raises(ServerGone):
            command.run(["box", "--once", *options])
    assert keys == ["from the environment", "given"]


def test_without_its_libraries_it_says_what_to_install() -> None:
    code = (
        "import sys; sys.modules['rich'] = None; sys.argv = ['top', 'box'];"
        "from sglang_adaptive_spec.top.__main__ import main; sys.exit(main())"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == os.EX_UNAVAILABLE
    assert done.stderr.count("\n") == 1
    assert "pip install httpx prometheus-client rich" in done.stderr


def test_it_needs_neither_torch_nor_sglang() -> None:
    code = "import sys, sglang_adaptive_spec.top.run; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert not {"torch", "sglang"} & set(done.stdout.split())

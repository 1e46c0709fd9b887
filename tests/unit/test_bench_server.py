"""The demo's handling of server processes, with stand-ins for SGLang."""

from __future__ import annotations

import os
import socket
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from bench.demo.options import parse
from bench.server import Server, ServerError, free_port, server_arguments, server_environment, tail
from bench.sharing import MOST_SERVERS_AT_ONCE, ports
from sglang_adaptive_spec import __version__


def _server(tmp_path: Path, program: str) -> Server:
    server = Server("test", [], os.environ, tmp_path / "log")
    server._command = [sys.executable, "-c", program]
    return server


def _alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_children_end_with_the_server(tmp_path: Path) -> None:
    child = tmp_path / "child"
    program = f"""
import subprocess, sys, time
from pathlib import Path
started = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path({str(child)!r}).write_text(str(started.pid))
time.sleep(60)
"""
    server = _server(tmp_path, program)
    server.grace_seconds = 0.2

    def interrupted() -> int:
        with suppress(KeyboardInterrupt), server:
            deadline = time.monotonic() + 20
            while not (child.exists() and child.read_text()) and time.monotonic() < deadline:
                time.sleep(0.05)
            assert _alive(int(child.read_text()))
            raise KeyboardInterrupt
        return int(child.read_text())

    assert not _alive(interrupted())


def test_a_server_has_the_installed_plugin_and_not_the_working_tree_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "sglang_adaptive_spec").mkdir()
    (tmp_path / "sglang_adaptive_spec" / "__init__.py").touch()
    with _server(tmp_path, "import sglang_adaptive_spec as plugin; print(plugin.__version__)") as server:
        server.wait(20)
        assert server.log_tail().splitlines()[-1:] == [__version__]


def test_a_server_that_ends_early_is_reported_with_its_log(tmp_path: Path) -> None:
    with _server(tmp_path, "print('what went wrong'); raise SystemExit(3)") as server:
        with pytest.raises(ServerError, match="did not get ready"):
            server.wait_until_healthy(20)
        assert "what went wrong" in server.log_tail()
    assert server.ended_by_itself == 3


def test_a_server_that_never_gets_ready_is_reported(tmp_path: Path) -> None:
    with (
        _server(tmp_path, "import time; time.sleep(60)") as server,
        pytest.raises(ServerError, match="not ready after 1 s"),
    ):
        server.wait_until_healthy(0.6)


def test_sglang_can_add_to_the_port() -> None:
    assert 20_000 <= free_port() < 32_000


def test_servers_that_start_together_get_ports_that_none_of_the_others_takes() -> None:
    chosen = [set(ports(number)) for number in range(MOST_SERVERS_AT_ONCE)]
    near = [{port + more for port in own for more in (0, 100, 1000)} for own in chosen]
    far = [{port + 10_000 for port in own} for own in chosen]
    for taken in ([*near], [*chosen, *far]):
        assert len(set().union(*taken)) == sum(map(len, taken)), "some port is in two of them"
    assert max(set().union(*near)) < 32_768, "from there on the system hands them out"


def test_a_port_is_free_and_of_those_asked_for() -> None:
    among = ports(3)
    with socket.socket() as other:
        other.bind(("127.0.0.1", free_port(among)))
        found = {free_port(among) for _ in range(50)}
        assert found <= set(among) - {other.getsockname()[1]}
        with pytest.raises(ServerError, match="No free port"):
            free_port(range(other.getsockname()[1], other.getsockname()[1] + 1))


def test_only_the_adaptive_server_gets_speculation_and_plugin() -> None:
    inherited = {"SGLANG_ADAPTIVE_SPEC": "1", "SGLANG_ADAPTIVE_SPEC_CONFIG": "{}", "HOME": "/home"}
    reference = server_environment(inherited, with_plugin=False, on_gpu=True)
    assert not [name for name in reference if name.startswith("SGLANG_ADAPTIVE_SPEC")]
    assert reference["HOME"] == "/home"
    assert server_environment({}, with_plugin=True, on_gpu=False)["SGLANG_ADAPTIVE_SPEC"] == "1"
    plain = server_arguments(Path("t"), None, threshold=8, on_gpu=False, extra=["--page-size", "16"])
    assert not [argument for argument in plain if "speculative" in argument]
    assert plain[-2:] == ["--page-size", "16"]
    adaptive = server_arguments(Path("t"), Path("d"), threshold=8, on_gpu=True)
    assert adaptive[adaptive.index("--speculative-disable-batch-threshold") + 1] == "8"
    assert adaptive[adaptive.index("--attention-backend") + 1] == "triton"
    assert [arguments[arguments.index("--dtype") + 1] for arguments in (plain, adaptive)] == ["float32", "bfloat16"]


def test_the_tail_leaves_out_polling() -> None:
    log = 'one\n\ntwo\nINFO: "GET /server_info HTTP/1.1" 200 OK\nthree\n'
    assert tail(log, 2) == "two\nthree"


@pytest.fixture
def models(tmp_path: Path) -> list[str]:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    return [
        "--model-path",
        str(tmp_path / "target"),
        "--draft-path",
        str(tmp_path / "draft"),
        "--device",
        "cpu",
    ]


def test_options(models: list[str]) -> None:
    options = parse([*models, "--threshold", "8", "--", "--page-size", "16"])
    assert options.resume == 6
    assert options.server_args == ("--page-size", "16")
    assert not options.on_gpu


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--high", "8"], "not above --threshold"),
        (["--low", "7"], "never bring speculation back"),
        (["--bursts", "0"], "start at 1"),
        (["--seconds", "0"], "more than 0"),
        (["--draft-path", "nowhere"], "no draft model"),
    ],
)
def test_options_that_could_not_show_a_switch_are_refused(
    models: list[str], arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        parse([*models, *arguments])
    assert message in capsys.readouterr().err

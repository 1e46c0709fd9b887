"""Every command of the README and the pages in docs/ does what the page says."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
import time
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from sglang_adaptive_spec.config import CONFIG_VARIABLE, Settings
from tests.engine.documented.launcher import LAUNCH, Launcher, environment, launch_command, on_a_terminal
from tests.engine.serving import Server
from tests.models.prompts import heldout_prompts
from tests.pages import PAGES, ROOT, Command, commands
from tests.promql import vectors

pytestmark = pytest.mark.engine

COMMANDS = [command for page in PAGES for command in commands(page)]
HERE = "localhost:30000"  # where the pages' server is
TOP = ["python", "-m", "sglang_adaptive_spec.top"]
SECONDS = 60


def of_kind(*starts: list[str]) -> pytest.MarkDecorator:
    """The commands that start with one of these words, as a parameter."""
    chosen = [command for command in COMMANDS if any(command.call[: len(start)] == start for start in starts)]
    tried.update(chosen)
    return pytest.mark.parametrize("command", chosen, ids=str)


tried: set[Command] = set()


def shell(text: str) -> str:
    """Run a command as a user's shell would; what it prints."""
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", text],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=SECONDS,
        cwd=ROOT,
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def server(launcher: Launcher) -> Server:
    """What the quick start's command starts, after some work."""
    server = launcher(launch_command("docs/quick-start.md"))
    server.generate(heldout_prompts(1, seed=41)[0], max_new_tokens=30)
    return server


def there(command: Command, server: Server) -> str:
    """A command with the server's real address."""
    assert HERE in command.text
    return command.text.replace(HERE, server.process.url.removeprefix("http://"))


@of_kind(LAUNCH)
def test_a_launch_command_starts_a_server_that_speculates(launcher: Launcher, command: Command) -> None:
    server = launcher(command)
    server.generate(heldout_prompts(1, seed=42)[0], max_new_tokens=20, ignore_eos=True)
    assert server.state()["steps"]["spec"] > 0
    assert re.search(r"adaptive-spec .* on SGLang .*: auto, step times of \d+ batch sizes measured in", server.log)


@of_kind(["curl"])
def test_a_request_is_answered_as_the_page_says(server: Server, command: Command) -> None:
    printed = shell(there(command, server))
    if "-d" not in command.call:
        assert "adaptive_spec" in printed or '"verified_requests"' in printed
        return
    assert printed == "[true]"
    asked = json.loads(command.call[command.call.index("-d") + 1])["server_args"]["adaptive_spec"]
    assert asked.items() <= server.state()["settings"].items()


def test_the_dashboards_queries_find_their_series(server: Server) -> None:
    assert server.use(policy="threshold", disable_batch_threshold=2)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda prompt: server.generate(prompt, max_new_tokens=80), heldout_prompts(4, seed=43)))
    time.sleep(1.5)  # published once a second
    scraped: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            scraped.setdefault(sample.name, set()).update(sample.labels)
    panels = json.loads((ROOT / "docs/grafana-dashboard.json").read_text())["panels"]
    for query in (target["expr"] for panel in panels for target in panel.get("targets", ())):
        for name, labels in vectors(query):
            if name != "sglang:adaptive_spec_faults_total":  # of which there are none
                # `instance` is put on by Prometheus; ranks are not on what SGLang's HTTP process counts.
                assert labels - {"instance", "tp_rank", "pp_rank"} <= scraped[name], name


@of_kind(TOP)
def test_the_live_view_shows_the_server(server: Server, command: Command) -> None:
    if "--once" in command.call:
        printed = shell(there(command, server))
        assert json.loads(printed)["mode"] if "--json" in command.call else "tokens/s" in printed
        return
    code, written = on_a_terminal([sys.executable, *there(command, server).split()[1:]], seconds=4)
    assert code == 0, written
    assert "tokens/s" in written


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The project as `pip install .` builds it."""
    source, built = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in ("sglang_adaptive_spec", "patches"):
        shutil.copytree(ROOT / name, source / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    pip("wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(built), str(source))
    [wheel] = built.iterdir()
    return wheel


def pip(*arguments: str) -> None:
    call = [sys.executable, "-m", "pip", "--disable-pip-version-check", *arguments]
    done = subprocess.run(call, capture_output=True, text=True, timeout=SECONDS)
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.fixture(scope="session")
def scratch(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an empty environment."""
    folder = tmp_path_factory.mktemp("scratch")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(folder)], check=True)
    return folder / "bin" / "python"


def installed(python: Path) -> dict[str, list[str]]:
    code = (
        "import json, importlib.metadata as m;"
        "print(json.dumps({'plugins': [e.value for e in m.entry_points(group='sglang.srt.plugins')],"
        "'extras': [e for d in m.distributions() for e in d.metadata.get_all('Provides-Extra') or ()]}))"
    )
    done = subprocess.run([str(python), "-c", code], capture_output=True, text=True, check=True)
    found: dict[str, list[str]] = json.loads(done.stdout)
    return found


@of_kind(["pip", "install"], ["pip", "uninstall"])
def test_pip_installs_and_uninstalls(wheel: Path, scratch: Path, command: Command) -> None:
    present = str(wheel)
    if command.call[1] == "uninstall":
        pip("--python", str(scratch), "install", "--no-deps", present)
        pip("--python", str(scratch), *command.call[1:])
        assert installed(scratch) == {"plugins": [], "extras": []}
        return
    [what] = command.call[2:]
    assert what.startswith(".")
    # Without its dependencies: the tests need no index. The extra has to be one that exists.
    pip("--python", str(scratch), "install", "--no-deps", "--force-reinstall", present + what[1:])
    found = installed(scratch)
    assert found["plugins"] == ["sglang_adaptive_spec.plugin:register"]
    assert set(re.findall(r"\w+", what)) <= set(found["extras"])


def test_the_wheel_has_every_module_and_lock(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    wanted = {path.relative_to(ROOT) for path in (ROOT / "sglang_adaptive_spec").rglob("*.py")}
    wanted |= {path.relative_to(ROOT) for path in (ROOT / "sglang_adaptive_spec").rglob("*.json")}
    wanted |= {Path("sglang_adaptive_spec") / path.relative_to(ROOT) for path in (ROOT / "patches").rglob("*.py")}
    assert {str(path) for path in wanted} - names == set()


@of_kind(["export"], ["unset"])
def test_variables_are_set_to_what_the_plugin_reads(command: Command) -> None:
    names = [word.partition("=")[0] for word in command.call[1:]]
    printed = shell(f'{command.text}\nfor name in {" ".join(names)}; do echo "$name=${{!name-}}"; done')
    values = dict(line.split("=", 1) for line in printed.splitlines())
    if command.call[0] == "unset":
        assert set(values.values()) == {""}
    else:
        assert values["SGLANG_ADAPTIVE_SPEC"] == "1"
        assert Settings.from_mapping(json.loads(values[CONFIG_VARIABLE]))


@of_kind(["python", "-m", "sglang_adaptive_spec.doctor"])
def test_the_doctor_finds_this_machine_healthy(command: Command) -> None:
    assert "wrapt" in shell(command.text)


@of_kind(["make"])
def test_make_has_the_target(command: Command) -> None:
    """What these do is what runs this test (`make test`), or takes many minutes."""
    done = subprocess.run(["make", "-n", *command.call[1:]], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_every_command_is_tried() -> None:
    assert [str(command) for command in COMMANDS if command not in tried] == [], "say above how to try these"

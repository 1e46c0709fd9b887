"""Each lock file against the wheel of its release, and against copies of it that were changed."""

import ast
import copy
import logging
import re
import shutil
import zipfile
from importlib.metadata import version
from pathlib import Path

import pytest

from sglang_adaptive_spec.activate import DRIFT_VARIABLE, check_lock
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.releases import families, flashinfer_workspace, lock
from sglang_adaptive_spec.releases.digest import describe_function
from sglang_adaptive_spec.releases.source import Source

from .wheels import source, wheel

INSTALLED = version("sglang")
RELEASES = lock.locked_releases()

pytestmark = pytest.mark.timeout(900)  # the first run downloads the wheels


@pytest.fixture(scope="module", params=RELEASES)
def release(request) -> str:
    """One release after the other: what is parsed of one is a hundred megabytes."""
    return request.param


def test_the_installed_sglang_is_the_locked_one():
    assert check_lock(INSTALLED) == {}


def test_what_a_lock_describes_is_in_the_wheel(release):
    assert lock.drifted(lock.read_lock(release), source(release)) == {}


def test_a_lock_file_is_what_its_command_writes(release):
    """So it covers what is patched, relied on and read, no more and no less, and its adapter is the one that fits."""
    assert lock.make_lock(source(release)).to_json(release) == lock.lock_path(release).read_text()


def test_every_patch_that_has_to_be_there_has_a_target(release):
    locked = lock.read_lock(release)
    adapter = families.load_adapter(locked.adapter)
    for patch in adapter.patches:
        assert patch.placed(locked.targets.get) or not patch.required


def test_flashinfers_workspace_is_of_the_size_that_is_reckoned_with(release):
    backend = "sglang.srt.layers.attention.flashinfer_backend:FlashInferAttnBackend.__init__"
    body = source(release).function(backend)
    words = {node.value for node in ast.walk(body) if isinstance(node, ast.Constant)}
    architectures = {word for word in words if re.fullmatch(r"[A-Z]\w+For[A-Z]\w+", str(word))}
    assert architectures == set(flashinfer_workspace.FIXED_FOR)
    sizes = re.findall(r"SGLANG_FLASHINFER_WORKSPACE_SIZE\.set\((\d+) \* 1024 \* 1024\)", ast.unparse(body))
    mib = flashinfer_workspace.MIB
    assert [int(size) * mib for size in sizes] == [
        flashinfer_workspace.FIXED_BYTES,
        flashinfer_workspace.DETERMINISTIC_BYTES,
    ]
    with zipfile.ZipFile(wheel(release)) as archive:
        variables = archive.read("sglang/srt/environ.py").decode()
    default = flashinfer_workspace.DEFAULT_BYTES // mib
    assert f"{flashinfer_workspace.WORKSPACE_VARIABLE} = EnvInt({default} * 1024 * 1024)" in variables


# --- drift -----------------------------------------------------------------------------------------------

TARGETS = {
    release: next(name for name in lock.read_lock(release).functions if "prepare_for_decode" in name)
    for release in RELEASES
}
"""A wrapped function of each release."""
# Which releases the tests of the comparison itself take: it is the same for all.
of_few_releases = pytest.mark.parametrize(
    "release", list(dict.fromkeys([RELEASES[0], INSTALLED, RELEASES[-1]])), indirect=True
)


def test_any_changed_line_of_any_locked_function_shows_and_no_docstring_or_comment_does(release):
    for name, locked in lock.read_lock(release).functions.items():
        node = source(release).function(name)
        assert describe_function(with_first(node, '"""Says something else."""')) == locked, name
        changed = describe_function(with_first(node, "changed = True"))
        assert changed.parameters == locked.parameters
        assert changed.digest != locked.digest, name


def with_first(node, line: str):
    """A copy of a function with a line in front of all others; it takes a docstring's place."""
    copied = copy.copy(node)
    rest = node.body[1:] if ast.get_docstring(node) is not None else node.body
    copied.body = [*ast.parse(line).body, *rest]
    return copied


@pytest.fixture(scope="module")
def unpacked(release, tmp_path_factory) -> tuple[str, Path]:
    """A release, and what its lock speaks of, unpacked to be changed."""
    root = tmp_path_factory.mktemp("unpacked")
    locked = lock.read_lock(release)
    names = [*locked.functions, *locked.targets, *locked.attributes]
    paths = {name.partition(":")[0].replace(".", "/") for name in names}
    with zipfile.ZipFile(wheel(release)) as archive:
        wanted = {f"{path}{end}" for path in paths for end in (".py", "/__init__.py")} | {"sglang/__init__.py"}
        archive.extractall(root, wanted & set(archive.namelist()))
    return release, root


@pytest.fixture
def copied(unpacked, tmp_path) -> tuple[str, str, Path]:
    """A release, the name of a wrapped function of it, and the file to change it in."""
    release, root = unpacked
    shutil.copytree(root, tmp_path, dirs_exist_ok=True)
    function = TARGETS[release]
    return release, function, tmp_path.joinpath(*function.partition(":")[0].split(".")).with_suffix(".py")


def insert_line(function: str, path: Path, line: str) -> None:
    """Put a line in front of the function's first statement."""
    text = path.read_text()
    name = function.rpartition(":")[2].rpartition(".")[2]
    node = [n for n in ast.walk(ast.parse(text)) if getattr(n, "name", "") == name][-1]
    first, lines = node.body[0], text.splitlines()
    lines.insert(first.lineno - 1, " " * first.col_offset + line)
    path.write_text("\n".join(lines))


def root_of(function: str, path: Path) -> Path:
    return path.parents[function.partition(":")[0].count(".")]


def wheel_of(root: Path) -> Path:
    """A wheel of what is in a folder."""
    made = root / "sglang-1-py3-none-any.whl"
    with zipfile.ZipFile(made, "w") as archive:
        for path in root.rglob("*.py"):
            archive.write(path, path.relative_to(root))
    return made


@of_few_releases
def test_an_unchanged_copy_passes(copied):
    release, function, path = copied
    assert check_lock(release, root_of(function, path)) == {}


@of_few_releases
@pytest.mark.parametrize("line", ['"""Says more than before."""', "# one more comment"])
def test_a_docstring_or_comment_is_no_drift(copied, line):
    release, function, path = copied
    insert_line(function, path, line)
    assert check_lock(release, wheel_of(root_of(function, path))) == {}


def test_a_wheel_with_one_changed_line_is_refused_by_name(copied):
    release, function, path = copied
    insert_line(function, path, "changed = True")
    with pytest.raises(Refusal) as caught:
        check_lock(release, wheel_of(root_of(function, path)))
    assert f"{function} (body)" in caught.value.what
    assert f"SGLang {release}" in caught.value.what
    assert f"set {DRIFT_VARIABLE}={function}" in caught.value.remedy


@of_few_releases
def test_a_changed_body_may_be_allowed_and_is_told(copied, monkeypatch, caplog):
    release, function, path = copied
    insert_line(function, path, "changed = True")
    monkeypatch.setenv(DRIFT_VARIABLE, function)
    with caplog.at_level(logging.WARNING, "sglang_adaptive_spec.activate"):
        assert check_lock(release, root_of(function, path)) == {function: "body"}
    assert function in caplog.text


@of_few_releases
def test_a_changed_parameter_is_refused_even_if_allowed(copied, monkeypatch):
    release, function, path = copied
    name = function.rpartition(":")[2].rpartition(".")[2]
    changed, count = re.subn(rf"(def {name}\([^)]*)\)", r"\1, extra=None)", path.read_text())
    assert count
    path.write_text(changed)
    monkeypatch.setenv(DRIFT_VARIABLE, function)
    with pytest.raises(Refusal) as caught:
        check_lock(release, root_of(function, path))
    assert f"{function} (parameters)" in caught.value.what
    assert DRIFT_VARIABLE not in caught.value.remedy


@of_few_releases
def test_what_is_gone_is_refused_even_if_allowed(copied, monkeypatch):
    release, function, path = copied
    path.unlink()
    gone = lock.drifted(lock.read_lock(release), Source(root_of(function, path)))
    monkeypatch.setenv(DRIFT_VARIABLE, ",".join(gone))
    with pytest.raises(Refusal) as caught:
        check_lock(release, root_of(function, path))
    assert f"{function} (gone)" in caught.value.what

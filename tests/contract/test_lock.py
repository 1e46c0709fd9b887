"""The lock file against the installed SGLang, and against copies of it that were changed."""

import ast
import logging
import re
import shutil
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
from sglang_adaptive_spec.patches import PATCHES

from sglang_adaptive_spec.activate import DRIFT_VARIABLE, check_lock, locked_functions
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.releases import lock

INSTALLED = version("sglang")
ROOT = Path(find_spec("sglang").submodule_search_locations[0]).parent

MODULE = "sglang.srt.speculative.eagle_info_v2"
FUNCTION = f"{MODULE}:EagleDraftInputV2Mixin.prepare_for_decode"


def test_the_installed_sglang_is_the_locked_one():
    check_lock(INSTALLED)


def test_the_lock_covers_what_is_patched_and_relied_on_and_nothing_else():
    assert set(lock.read_lock(INSTALLED)) == set(locked_functions(INSTALLED))


def test_the_lock_file_is_what_its_command_writes(tmp_path, monkeypatch):
    committed = lock.lock_path(INSTALLED).read_text()
    monkeypatch.setattr(lock, "_LOCKS", tmp_path)
    assert lock.write_lock(INSTALLED, ROOT, locked_functions(INSTALLED)).read_text() == committed


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target.rpartition(":")[2])
def test_a_patched_function_is_written_where_its_patch_says(patch):
    assert patch.source in lock.read_lock(INSTALLED)
    # A name imported from elsewhere is assigned by an import in the target's module.
    if patch.defined_in:
        source = ROOT.joinpath(*patch.module.split(".")).with_suffix(".py").read_text()
        defined_in, _, name = patch.defined_in.partition(":")
        imports = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ImportFrom)]
        assert any(node.module == defined_in and name in [a.name for a in node.names] for node in imports)


# --- drift -----------------------------------------------------------------------------------------------


@pytest.fixture
def copy(tmp_path, monkeypatch) -> Path:
    """A copy of one module to change, and a lock that covers this module alone."""
    path = tmp_path.joinpath(*MODULE.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True)
    shutil.copy(ROOT.joinpath(*MODULE.split(".")).with_suffix(".py"), path)
    locked = {name: entry for name, entry in lock.read_lock(INSTALLED).items() if name.startswith(f"{MODULE}:")}
    assert FUNCTION in locked
    monkeypatch.setattr(lock, "read_lock", lambda release: locked)
    return path


def insert_line(path: Path, line: str) -> None:
    """Put a line in front of the first statement of FUNCTION."""
    source = path.read_text()
    node = next(n for n in ast.walk(ast.parse(source)) if getattr(n, "name", "") == "prepare_for_decode")
    first, lines = node.body[0], source.splitlines()
    lines.insert(first.lineno - 1, " " * first.col_offset + line)
    path.write_text("\n".join(lines))


def add_parameter(path: Path) -> None:
    changed, count = re.subn(r"(def prepare_for_decode\([^)]*)\)", r"\1, extra=None)", path.read_text())
    assert count == 1
    path.write_text(changed)


def check(path: Path) -> None:
    check_lock(INSTALLED, root=path.parents[MODULE.count(".")])


def test_an_unchanged_copy_passes(copy):
    check(copy)


@pytest.mark.parametrize("line", ['"""Says more than before."""', "# one more comment"])
def test_a_docstring_or_comment_is_no_drift(copy, line):
    insert_line(copy, line)
    check(copy)


def test_one_changed_line_is_refused_by_name(copy):
    insert_line(copy, "batch.changed = True")
    with pytest.raises(Refusal) as caught:
        check(copy)
    assert f"{FUNCTION} (body)" in caught.value.what
    assert f"SGLang {INSTALLED}" in caught.value.what
    assert f"set {DRIFT_VARIABLE}={FUNCTION}" in caught.value.remedy


def test_a_changed_body_may_be_allowed_and_is_told(copy, monkeypatch, caplog):
    insert_line(copy, "batch.changed = True")
    monkeypatch.setenv(DRIFT_VARIABLE, FUNCTION)
    with caplog.at_level(logging.WARNING, "sglang_adaptive_spec.activate"):
        check(copy)
    assert FUNCTION in caplog.text


def test_a_changed_parameter_is_refused_even_if_allowed(copy, monkeypatch):
    add_parameter(copy)
    monkeypatch.setenv(DRIFT_VARIABLE, FUNCTION)
    with pytest.raises(Refusal) as caught:
        check(copy)
    assert f"{FUNCTION} (parameters)" in caught.value.what


def test_a_function_that_is_gone_is_refused_even_if_allowed(copy, monkeypatch):
    copy.unlink()
    monkeypatch.setenv(DRIFT_VARIABLE, FUNCTION)
    with pytest.raises(Refusal) as caught:
        check(copy)
    assert f"{FUNCTION} (gone)" in caught.value.what

import json
import textwrap

import pytest

from sglang_adaptive_spec.releases import lock
from sglang_adaptive_spec.releases.lock import FunctionLock, describe, drifted

NAME = "engine.worker:Worker.forward"

BASE = '''
class Worker:
    def forward(self, batch, publish=None):
        """Run a batch."""
        if batch.empty:
            return None
        return self.run(batch, width=4)
'''


def lock_of(tmp_path, source: str, name: str = NAME) -> FunctionLock | None:
    module = tmp_path.joinpath(*name.partition(":")[0].split(".")).with_suffix(".py")
    module.parent.mkdir(parents=True, exist_ok=True)
    module.write_text(textwrap.dedent(source))
    return describe(tmp_path, [name])[name]


@pytest.fixture
def change(tmp_path):
    """How the lock sees BASE after replacing some text: "same", or what drifted."""

    def compare(old: str, new: str) -> str:
        assert old in BASE
        before = {NAME: lock_of(tmp_path, BASE)}
        return drifted(before, {NAME: lock_of(tmp_path, BASE.replace(old, new))}).get(NAME, "same")

    return compare


# --- what does not count ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""Run a batch."""', '"""Run a batch, at last."""'),
        ('"""Run a batch."""\n', "# no docstring\n"),
        ("if batch.empty:", "if batch.empty:  # nothing to do"),
        ("if batch.empty:", "if (batch.empty):"),
        ("self.run(batch, width=4)", "self.run(\n            batch,\n            width=4,\n        )"),
        ("class Worker:", "import os\n\n\nclass Other:\n    def forward(self): ...\n\n\nclass Worker:"),
        ("class Worker:", 'class Worker:\n    """Works."""\n\n    def other(self): ...\n'),
        ("publish=None", "publish = None"),
    ],
    ids=["docstring", "no docstring", "comment", "parentheses", "lines", "position", "sibling", "blanks"],
)
def test_docstrings_comments_formatting_and_position_do_not_count(change, old, new):
    assert change(old, new) == "same"


# --- what counts -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("width=4", "width=5"),
        ("width=4", "width=4.0"),
        ("width=4", 'width="4"'),
        ("width=4", "4"),
        ("return None", "return"),
        ("return None", "pass"),
        ("self.run(", "self.walk("),
        ("publish=None", "publish=False"),
        ("    def forward(", "    @staticmethod\n    def forward("),
        ("if batch.empty:", "batch.count += 1\n        if batch.empty:"),
        ("if batch.empty:", "if not batch.empty:"),
    ],
)
def test_one_changed_line_is_a_changed_body(change, old, new):
    assert change(old, new) == "body"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("batch, publish=None", "publish=None, batch=None"),
        ("publish=None", "on_publish=None"),
        ("publish=None", "publish=None, extra=None"),
        (", publish=None", ""),
        ("batch, publish=None", "batch, *, publish=None"),
        ("publish=None", "*publish"),
        ("publish=None", "**publish"),
        ("publish=None", "publish"),
        ("batch, publish", "batch, /, publish"),
        ("    def f", "    async def f"),
    ],
)
def test_a_changed_parameter_is_a_changed_parameter(change, old, new):
    assert change(old, new) == "parameters"


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("def forward", "def forward_batch"),
        ("class Worker", "class WorkerV2"),
        ("    def forward(self, batch, publish=None):", "    class forward:\n      def __call__(self):"),
    ],
)
def test_what_can_not_be_found_is_gone(change, old, new):
    assert change(old, new) == "gone"


def test_a_missing_module_is_gone(tmp_path):
    assert describe(tmp_path, ["engine.absent:f"]) == {"engine.absent:f": None}


# --- finding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["engine.tools:plain", "engine.tools:decorated", "engine.tools:waits", "engine.tools:outer.inner"]
)
def test_functions_are_found_at_any_depth(tmp_path, name):
    source = """
    def plain(a): ...

    @cache(size=1)
    def decorated(a): ...

    async def waits(a): ...

    def outer(b):
        def inner(a): ...
        return inner
    """
    assert lock_of(tmp_path, source, name).parameters[-1] == "a"


def test_a_package_is_read_from_its_init_file(tmp_path):
    (tmp_path / "engine").mkdir()
    (tmp_path / "engine" / "__init__.py").write_text("def f(a, /, b, *rest, c, d=1, **more): ...")
    found = describe(tmp_path, ["engine:f"])["engine:f"]
    assert found.parameters == ("a", "/", "b", "*rest", "c", "d=", "**more")


def test_the_last_definition_of_a_name_is_the_one_that_holds(tmp_path):
    assert lock_of(tmp_path, "def f(a): ...\ndef f(b): ...", "engine.tools:f").parameters == ("b",)


def test_a_docstring_of_a_nested_function_does_not_count(tmp_path):
    with_text = lock_of(tmp_path, 'def f():\n    def g():\n        """Text."""\n        return 1\n    return g', "e:f")
    without = lock_of(tmp_path, "def f():\n    def g():\n        return 1\n    return g", "e:f")
    assert with_text == without


def test_the_digest_is_the_same_under_every_python(tmp_path):
    """Pinned: a lock made under one version of Python has to hold under the others."""
    source = '''
    @retry(times=3)
    def f(a: int, *, b: str = "x") -> dict[str, int]:
        """Text."""
        with open(f"{a}-{b!r}") as file:
            rows = [line for line in file if line]
        match rows:
            case []:
                return {}
        return {"rows": len(rows), **({} if b else {"b": 1})}
    '''
    assert lock_of(tmp_path, source, "e:f").digest == "6b8ccdf54ad29b8e83772b5cd8c670da"


# --- files -----------------------------------------------------------------------------------------------


@pytest.fixture
def locks(tmp_path, monkeypatch):
    folder = tmp_path / "locks"
    folder.mkdir()
    monkeypatch.setattr(lock, "_LOCKS", folder)
    return folder


def test_a_written_lock_reads_back_equal_to_its_source(tmp_path, locks):
    described = {NAME: lock_of(tmp_path, BASE)}
    path = lock.write_lock("1.2.3", tmp_path, [NAME, NAME])
    assert path == locks / "1.2.3.json"
    assert lock.read_lock("1.2.3") == described
    assert drifted(lock.read_lock("1.2.3"), described) == {}


def test_a_lock_file_is_stable_text(tmp_path, locks):
    lock_of(tmp_path, BASE)
    lock_of(tmp_path, "def a(): ...\ndef b(): ...", "engine.tools:a")
    names = ["engine.tools:b", NAME, "engine.tools:a"]
    first = lock.write_lock("1", tmp_path, names).read_text()
    assert lock.write_lock("1", tmp_path, reversed(names)).read_text() == first
    assert list(json.loads(first)["functions"]) == sorted(names)


def test_a_lock_is_not_written_without_one_of_its_functions(tmp_path, locks):
    lock_of(tmp_path, BASE)
    with pytest.raises(LookupError, match=r"not in SGLang 1: engine.worker:Worker.gone"):
        lock.write_lock("1", tmp_path, [NAME, "engine.worker:Worker.gone"])
    assert not lock.lock_path("1").exists()


def test_locked_releases_come_oldest_first(locks):
    for name in ("0.5.14", "0.5.9", "0.10.0"):
        (locks / f"{name}.json").touch()
    assert lock.locked_releases() == ("0.5.9", "0.5.14", "0.10.0")


def test_every_kind_of_drift_is_told_apart():
    before = {name: FunctionLock(("a",), "1") for name in ("same", "body", "parameters", "gone", "absent")}
    now = {
        "same": FunctionLock(("a",), "1"),
        "body": FunctionLock(("a",), "2"),
        "parameters": FunctionLock(("b",), "2"),
        "gone": None,
    }
    assert drifted(before, now) == {"body": "body", "parameters": "parameters", "gone": "gone", "absent": "gone"}

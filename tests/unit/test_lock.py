import json
import textwrap

import pytest

from sglang_adaptive_spec.patching import Patch
from sglang_adaptive_spec.releases import families, lock
from sglang_adaptive_spec.releases.digest import FunctionLock
from sglang_adaptive_spec.releases.lock import Lock, describe, drifted
from sglang_adaptive_spec.releases.source import Source

NAME = "sglang.worker:Worker.forward"

BASE = '''
class Worker:
    def forward(self, batch, publish=None):
        """Run a batch."""
        if batch.empty:
            return None
        return self.run(batch, width=4)
'''


def source_of(tmp_path, text: str, module: str = "sglang.worker") -> Source:
    path = tmp_path.joinpath(*module.split(".")).with_suffix(".py")
    path.parent.mkdir(parents=True, exist_ok=True)
    (tmp_path / "sglang" / "__init__.py").touch()
    path.write_text(textwrap.dedent(text))
    return Source(tmp_path)


def lock_of(tmp_path, text: str, name: str = NAME) -> FunctionLock | None:
    return describe(source_of(tmp_path, text, name.partition(":")[0]), [name])[name]


@pytest.fixture
def change(tmp_path):
    """How the lock sees BASE after replacing some text: "same", or what drifted."""

    def compare(old: str, new: str) -> str:
        assert old in BASE
        before = Lock("Adapter", {NAME: lock_of(tmp_path, BASE)})
        return drifted(before, source_of(tmp_path, BASE.replace(old, new))).get(NAME, "same")

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
    assert describe(source_of(tmp_path, BASE), ["sglang.absent:f"]) == {"sglang.absent:f": None}


# --- finding ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["sglang.tools:plain", "sglang.tools:decorated", "sglang.tools:waits", "sglang.tools:outer.inner"]
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
    (tmp_path / "sglang").mkdir()
    (tmp_path / "sglang" / "__init__.py").write_text("def f(a, /, b, *rest, c, d=1, **more): ...")
    found = describe(Source(tmp_path), ["sglang:f"])["sglang:f"]
    assert found.parameters == ("a", "/", "b", "*rest", "c", "d=", "**more")


def test_the_last_definition_of_a_name_is_the_one_that_holds(tmp_path):
    assert lock_of(tmp_path, "def f(a): ...\ndef f(b): ...", "sglang.tools:f").parameters == ("b",)


def test_a_docstring_of_a_nested_function_does_not_count(tmp_path):
    with_text = lock_of(
        tmp_path, 'def f():\n    def g():\n        """Text."""\n        return 1\n    return g', "sglang.e:f"
    )
    without = lock_of(tmp_path, "def f():\n    def g():\n        return 1\n    return g", "sglang.e:f")
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
    assert lock_of(tmp_path, source, "sglang.e:f").digest == "6b8ccdf54ad29b8e83772b5cd8c670da"


# --- files -----------------------------------------------------------------------------------------------


class Adapter:
    """An adapter for BASE and an import of it."""

    patches = (
        Patch("sglang.gone:forward", None, "", "", "", other_targets=("sglang.user:forward",)),
        Patch("sglang.gone:extra", None, "", "", "", required=False),
    )
    relies_on = (NAME,)
    reads = ("sglang.worker:Worker",)


@pytest.fixture
def locks(tmp_path, monkeypatch):
    folder = tmp_path / "locks"
    folder.mkdir()
    monkeypatch.setattr(lock, "_LOCKS", folder)
    monkeypatch.setattr(families, "ADAPTERS", {"Adapter": __name__})
    return folder


@pytest.fixture
def source(tmp_path):
    source_of(tmp_path, "def forward(batch): ...", "sglang.maker")
    source_of(tmp_path, "from sglang.maker import forward", "sglang.user")
    return source_of(tmp_path, BASE)


def test_a_written_lock_reads_back_and_holds_for_its_source(source, locks):
    path = lock.write_lock("1.2.3", source)
    assert path == locks / "1.2.3.json"
    read = lock.read_lock("1.2.3")
    assert read == lock.make_lock(source)
    assert read.adapter == "Adapter"
    assert read.targets == {"sglang.user:forward": "sglang.maker:forward"}
    assert set(read.functions) == {NAME, "sglang.maker:forward"}
    assert read.attributes == ("sglang.worker:Worker",)
    assert drifted(read, source) == {}


def test_a_lock_file_is_stable_text(source, locks):
    text = lock.write_lock("1", source).read_text()
    assert lock.read_lock("1").to_json("1") == text
    assert list(json.loads(text)["functions"]) == ["sglang.maker:forward", NAME]


@pytest.mark.parametrize(
    ("name", "missing"),
    [("reads", "sglang.worker:Worker.count"), ("relies_on", "sglang.worker:Worker.gone")],
)
def test_a_lock_is_not_written_without_something_it_needs(source, locks, monkeypatch, name, missing):
    monkeypatch.setattr(Adapter, name, (missing,))
    with pytest.raises(LookupError, match=f"the closest, Adapter, misses {missing}"):
        lock.write_lock("1", source)
    assert not lock.lock_path("1").exists()


def test_a_lock_is_not_written_without_a_wrapped_function(tmp_path, locks):
    with pytest.raises(LookupError, match=r"misses sglang\.gone:forward"):
        lock.write_lock("1", source_of(tmp_path, BASE))


def test_the_command_says_on_one_line_why_there_is_no_lock(tmp_path, locks, capsys):
    source_of(tmp_path, BASE)
    assert lock.main(["1", str(tmp_path)]) == 1
    assert capsys.readouterr().err.startswith("no lock for SGLang 1: no adapter serves it; the closest, Adapter,")
    assert lock.main([]) == 2


def test_locked_releases_come_oldest_first(locks):
    for name in ("0.5.14", "0.5.9", "0.10.0", "0.5.13.post1", "0.5.13"):
        (locks / f"{name}.json").touch()
    assert lock.locked_releases() == ("0.5.9", "0.5.13", "0.5.13.post1", "0.5.14", "0.10.0")


def test_a_name_that_is_imported_from_elsewhere_now_is_drift(tmp_path, source, locks):
    lock.write_lock("1", source)
    source_of(tmp_path, "def forward(other): ...", "sglang.other")
    moved = source_of(tmp_path, "from sglang.other import forward", "sglang.user")
    assert drifted(lock.read_lock("1"), moved) == {"sglang.user:forward": "gone"}


def test_an_attribute_that_is_gone_is_drift(tmp_path):
    held = source_of(tmp_path, "class Worker:\n    count: int")
    assert drifted(Lock("Adapter", {}, {}, ("sglang.worker:Worker.count",)), held) == {}
    assert drifted(Lock("Adapter", {}, {}, ("sglang.worker:Worker.size",)), held) == {
        "sglang.worker:Worker.size": "gone"
    }

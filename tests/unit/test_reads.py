"""What is read of SGLang is declared, so that a lock can say when it is gone."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from sglang_adaptive_spec.releases import families
from sglang_adaptive_spec.releases.reads import attributes, either, found

ROOT = Path(__file__).parents[2]
OURS = ROOT / "sglang_adaptive_spec"
KNOWS_SGLANG = [
    path
    for folder, pattern in (
        (ROOT / "patches", "*.py"),
        (OURS / "releases", "*_0_5_*.py"),
        (OURS / "releases", "flashinfer_workspace.py"),
        (OURS / "releases", "keys_only.py"),
        (OURS / "releases", "step_bench.py"),
    )
    for path in folder.glob(pattern)
]


def _words(text: str) -> set[str]:
    return set(text.split())


# Of Python's and torch's own objects.
ELSEWHERE = {*dir(str), *dir(dict), *dir(object)} | _words(
    "__dict__ __module__ addFilter all any clamp clone cpu cumsum device dtype enter_context exception expand flatten "
    "hexdigest info is_cuda itemsize max min modules name parameters record record_stream shape sum to to_dict "
    "tolist unsqueeze warning"
)
MODULES = _words("copy hashlib importlib inspect json logging np os time torch wrapt")
# Read with a default, or only where they are there.
OPTIONAL = _words(
    "attn_dp_size capture_aux_hidden_states decode_attention_backend_str draft_owns_attention draft_tp_context "
    "layers_to_capture parallel_layout prefill_attention_backend_str"
)
# Of a torch or SGLang object whose owner says it in a property of its own.
PASSED_THROUGH = _words("architectures bs draft_vocab_size features graph max_bs override page_size tp_rank")


def read_names(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            if ast.unparse(node).partition(".")[0] not in MODULES:
                yield node.attr
        elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith("swapped"):
            yield from (keyword.arg for keyword in node.keywords if keyword.arg)


def own_names() -> set[str]:
    nodes = [node for path in OURS.rglob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    nodes += [node for path in (ROOT / "patches").glob("*.py") for node in ast.walk(ast.parse(path.read_text()))]
    defined = {node.name for node in nodes if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    bound = {node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    return defined | bound | {node.attr for node in nodes if _is_own_attribute(node)}


def _is_own_attribute(node: ast.AST) -> bool:
    return isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"


def test_every_attribute_of_sglang_that_is_read_is_declared():
    adapters = [families.load_adapter(name) for name in families.ADAPTERS]
    entries = [entry for adapter in adapters for entry in (*adapter.reads, *adapter.relies_on)]
    entries += [target for a in adapters for patch in a.patches for target in (patch.target, *patch.other_targets)]
    declared = {place.rpartition(":")[2].rpartition(".")[2] for entry in entries for place in entry.split(" or ")}
    known = declared | own_names() | ELSEWHERE | OPTIONAL | PASSED_THROUGH
    undeclared = {f"{path.name}: {name}" for path in KNOWS_SGLANG for name in read_names(path) if name not in known}
    assert undeclared == set(), "declare them in the adapter's reads, see releases/reads.py"


@pytest.mark.parametrize("name", families.ADAPTERS)
def test_no_need_is_declared_twice(name):
    adapter = families.load_adapter(name)
    for entries in (adapter.reads, adapter.relies_on):
        assert len(set(entries)) == len(entries)


def test_an_entry_stands_for_the_first_place_that_is_there():
    assert found("a:B.x or c:D.x", {"a:B.x", "c:D.x"}.__contains__) == "a:B.x"
    assert found("a:B.x or c:D.x", {"c:D.x"}.__contains__) == "c:D.x"
    assert found("a:B.x or c:D.x", set().__contains__) is None


def test_attributes_are_spelled_out_by_place():
    assert attributes({"a:B or c:D": "x y"}, {"m": "f"}) == ("a:B.x or c:D.x", "a:B.y or c:D.y", "m:f")
    assert either(("a", "c"), "f") == "a:f or c:f"
    assert either(("a", "c"), "f", "D.f") == "a:f or c:D.f"

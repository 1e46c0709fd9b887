"""Lock files: what a release of SGLang looked like when this plugin was proven on it.

A lock holds, for each function that is wrapped or relied on, its parameters and a digest of its syntax tree
(docstrings and positions left out). It is made from source text, nothing is imported::

    python -m sglang_adaptive_spec.releases.lock 0.5.14 path/to/site-packages
"""

from __future__ import annotations

import ast
import hashlib
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

_LOCKS = Path(__file__).parent / "locks"


@dataclass(frozen=True)
class FunctionLock:
    """One function as it was.

    Attributes:
        parameters: Names in order as in the signature; ``=`` marks a default, ``/`` and ``*`` stand for themselves.
        digest: Of its syntax tree, docstrings and positions left out.
    """

    parameters: tuple[str, ...]
    digest: str


def lock_path(release: str) -> Path:
    """Where the lock of a release lies, whether or not it exists."""
    return _LOCKS / f"{release}.json"


def locked_releases() -> tuple[str, ...]:
    """The releases that have a lock file, oldest first."""
    names = [path.stem for path in _LOCKS.glob("*.json")]
    return tuple(sorted(names, key=lambda name: [int(part) if part.isdigit() else 0 for part in name.split(".")]))


def read_lock(release: str) -> dict[str, FunctionLock]:
    """The lock of a release, by ``module:qualified.name``."""
    raw = json.loads(lock_path(release).read_text())
    return {name: FunctionLock(tuple(entry["parameters"]), entry["digest"]) for name, entry in raw["functions"].items()}


def describe(root: Path, names: Iterable[str]) -> dict[str, FunctionLock | None]:
    """Describe functions in a source tree; None for the ones that are not there.

    Args:
        root: The folder that contains the ``sglang`` package.
        names: ``module:qualified.name`` of each function.
    """
    trees: dict[Path, ast.Module | None] = {}
    described: dict[str, FunctionLock | None] = {}
    for name in names:
        module, _, qualified = name.partition(":")
        path = root.joinpath(*module.split(".")).with_suffix(".py")
        if not path.exists():
            path = root.joinpath(*module.split("."), "__init__.py")
        if path not in trees:
            trees[path] = ast.parse(path.read_text()) if path.exists() else None
        tree = trees[path]
        node = _find(tree, qualified.split(".")) if tree else None
        described[name] = _describe_function(node) if node else None
    return described


def drifted(locked: Mapping[str, FunctionLock], installed: Mapping[str, FunctionLock | None]) -> dict[str, str]:
    """Compare, and say by function what changed: ``gone``, ``parameters`` or ``body``."""
    changes = {}
    for name, lock in locked.items():
        now = installed.get(name)
        if now is None:
            changes[name] = "gone"
        elif now.parameters != lock.parameters:
            changes[name] = "parameters"
        elif now.digest != lock.digest:
            changes[name] = "body"
    return changes


def write_lock(release: str, root: Path, names: Iterable[str]) -> Path:
    """Write the lock of a release from its source tree.

    Raises:
        LookupError: a function is not in the tree.
    """
    described = describe(root, sorted(set(names)))
    missing = [name for name, function in described.items() if function is None]
    if missing:
        raise LookupError(f"not in SGLang {release}: {', '.join(missing)}")
    functions = {
        name: {"parameters": list(function.parameters), "digest": function.digest}
        for name, function in described.items()
        if function
    }
    path = lock_path(release)
    path.write_text(json.dumps({"release": release, "functions": functions}, indent=1) + "\n")
    return path


def _find(tree: ast.AST, path: list[str]) -> ast.FunctionDef | ast.AsyncFunctionDef | None:
    for name in path:
        found = [
            node
            for node in ast.iter_child_nodes(tree)
            if isinstance(node, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)) and node.name == name
        ]
        if not found:
            return None
        tree = found[-1]
    return tree if isinstance(tree, (ast.FunctionDef, ast.AsyncFunctionDef)) else None


def _describe_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> FunctionLock:
    spec = node.args
    positional = [*spec.posonlyargs, *spec.args]
    first_default = len(positional) - len(spec.defaults)
    parameters = [f"{p.arg}=" if index >= first_default else p.arg for index, p in enumerate(positional)]
    if spec.posonlyargs:
        parameters.insert(len(spec.posonlyargs), "/")
    if spec.vararg or spec.kwonlyargs:
        parameters.append(f"*{spec.vararg.arg}" if spec.vararg else "*")
    parameters += [
        f"{p.arg}=" if default else p.arg for p, default in zip(spec.kwonlyargs, spec.kw_defaults, strict=True)
    ]
    parameters += [f"**{spec.kwarg.arg}"] if spec.kwarg else []
    if isinstance(node, ast.AsyncFunctionDef):
        parameters.insert(0, "async")
    digest = hashlib.sha256(_canonical(node).encode()).hexdigest()
    return FunctionLock(tuple(parameters), digest[:32])


def _canonical(node: object) -> str:
    """A syntax tree as text, the same under every Python that can parse it.

    ``ast.dump`` prints empty fields under some versions and omits them under others, so they are dropped.
    """
    if isinstance(node, ast.AST):
        parts = []
        for name, value in ast.iter_fields(node):
            if name in ("ctx", "kind", "type_comment"):
                continue
            if name == "body" and isinstance(value, list):
                value = _without_docstring(value)
            if value is None or value == []:
                continue
            parts.append(f"{name}={_canonical(value)}")
        return f"{type(node).__name__}({','.join(parts)})"
    if isinstance(node, list):
        return f"[{','.join(map(_canonical, node))}]"
    return repr(node)


def _without_docstring(body: list[ast.stmt]) -> list[ast.stmt]:
    first = body[0] if body else None
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        return body[1:]
    return body


def main(arguments: list[str]) -> None:
    """Write the lock file of the release named on the command line."""
    from sglang_adaptive_spec.activate import locked_functions

    release, root = arguments
    path = write_lock(release, Path(root), locked_functions(release))
    sys.stdout.write(f"wrote {path}\n")


if __name__ == "__main__":
    main(sys.argv[1:])

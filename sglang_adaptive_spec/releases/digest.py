"""A function as a lock keeps it: parameters, and a digest of its syntax tree."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass


@dataclass(frozen=True)
class FunctionLock:
    """One function as it was.

    Attributes:
        parameters: Names in order as in the signature; ``=`` marks a default, ``/`` and ``*`` stand for themselves.
        digest: Of its syntax tree, docstrings and positions left out.
    """

    parameters: tuple[str, ...]
    digest: str


def describe_function(node: ast.FunctionDef | ast.AsyncFunctionDef) -> FunctionLock:
    """Describe a function from its syntax tree."""
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

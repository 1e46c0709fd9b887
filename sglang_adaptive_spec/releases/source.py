"""SGLang's source as text: a ``site-packages`` folder or a wheel, read without importing anything."""

from __future__ import annotations

import ast
import zipfile
from functools import lru_cache
from pathlib import Path

_FunctionNode = ast.FunctionDef | ast.AsyncFunctionDef


class Source:
    """One release's source.

    Args:
        root: The folder that contains the ``sglang`` package, or a wheel.

    Raises:
        FileNotFoundError: it holds no ``sglang`` package.
    """

    def __init__(self, root: Path) -> None:
        self._root: Path | zipfile.Path = zipfile.Path(root) if root.suffix == ".whl" else root
        if self._text("sglang") is None:
            raise FileNotFoundError(f"no sglang package in {root}")
        self._trees = lru_cache(maxsize=None)(self._parse)
        self._names = lru_cache(maxsize=None)(self._names_bound_in)

    def function(self, name: str) -> _FunctionNode | None:
        """The definition of ``module:qualified.name``; of several, the last, which is the one that holds."""
        node = self._definition(name)
        return node if isinstance(node, _FunctionNode) else None

    def has_attribute(self, name: str) -> bool:
        """Whether ``module:name`` or ``module:Class.name`` is defined or assigned there, or on ``self``."""
        module, _, qualified = name.partition(":")
        owner, _, attribute = qualified.rpartition(".")
        return attribute in self._names(f"{module}:{owner}" if owner else module)

    def origin(self, name: str) -> str | None:
        """Where the function that ``module:name`` stands for is written: there, or where it is imported from."""
        if self.function(name):
            return name
        module, _, imported = name.partition(":")
        tree = self._trees(module)
        for node in ast.walk(tree) if tree else ():
            if isinstance(node, ast.ImportFrom) and imported in [alias.asname or alias.name for alias in node.names]:
                (original,) = [alias.name for alias in node.names if (alias.asname or alias.name) == imported]
                origin = f"{node.module}:{original}"
                return origin if self.function(origin) else None
        return None

    def _definition(self, name: str) -> ast.AST | None:
        module, _, qualified = name.partition(":")
        scope: ast.AST | None = self._trees(module)
        for part in qualified.split("."):
            if scope is None:
                return None
            found = [
                node
                for node in ast.iter_child_nodes(scope)
                if isinstance(node, (ast.ClassDef, _FunctionNode)) and node.name == part
            ]
            scope = found[-1] if found else None
        return scope

    def _names_bound_in(self, owner: str) -> frozenset[str]:
        scope = self._definition(owner) if ":" in owner else self._trees(owner)
        return frozenset(_bound_names(scope)) if scope else frozenset()

    def _parse(self, module: str) -> ast.Module | None:
        text = self._text(module)
        return None if text is None else ast.parse(text)

    def _text(self, module: str) -> str | None:
        *folders, last = module.split(".")
        for parts in ([*folders, f"{last}.py"], [*folders, last, "__init__.py"]):
            path = self._root.joinpath(*parts)
            if path.is_file():
                return path.read_text(encoding="utf-8")
        return None


def _bound_names(scope: ast.AST) -> set[str]:
    names: set[str] = set()
    for node in ast.walk(scope):
        if isinstance(node, (ast.ClassDef, _FunctionNode)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            if isinstance(node.value, ast.Name) and node.value.id == "self":
                names.add(node.attr)
        elif isinstance(node, ast.alias):
            names.add(node.asname or node.name)
    return names

"""Runs a function when a module is imported: before it is looked for, or after its own code ran.

Standard library only.
"""

import importlib.util
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

Callback = Callable[[ModuleType], None]


class PreImportFinder(MetaPathFinder):
    """Calls a function once, when the module of this name is first looked for. Finds nothing."""

    def __init__(self, name: str, callback: Callable[[], None]) -> None:
        self._name = name
        self._callback: Callable[[], None] | None = callback

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> None:
        if fullname == self._name and self._callback is not None:
            callback, self._callback = self._callback, None
            callback()


class PostImportFinder(MetaPathFinder):
    """Finds nothing itself: lets the other finders find, and extends what they found.

    The callback runs inside the loader's `exec_module`, so before any `from module import name`
    elsewhere can see the module, and before post-import hooks of libraries like wrapt, whose
    finders wrap the loader that we hand on.
    """

    def __init__(self, callbacks: Mapping[str, Callback]) -> None:
        self._callbacks = callbacks
        self._looking_for: set[str] = set()

    def find_spec(
        self,
        fullname: str,
        path: Sequence[str] | None = None,
        target: ModuleType | None = None,
    ) -> ModuleSpec | None:
        callback = self._callbacks.get(fullname)
        if callback is None or fullname in self._looking_for or fullname in sys.modules:
            return None
        self._looking_for.add(fullname)
        try:
            spec = importlib.util.find_spec(fullname)
        finally:
            self._looking_for.discard(fullname)
        if spec is None or spec.loader is None:
            return None
        _run_after_exec(spec, callback)
        return spec


def _run_after_exec(spec: ModuleSpec, callback: Callback) -> None:
    """Make the loader of `spec` call `callback` when the module's code has run."""
    loader = spec.loader
    assert loader is not None
    exec_module = loader.exec_module

    def exec_then_call_back(module: ModuleType) -> None:
        exec_module(module)
        callback(module)

    # An instance attribute: the loader keeps its class, so its source, path and resource readers.
    loader.exec_module = exec_then_call_back  # type: ignore[method-assign]

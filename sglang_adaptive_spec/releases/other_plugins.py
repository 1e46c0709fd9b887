"""What other plugins of SGLang's do to the same functions, as far as SGLang's hook registry and the chains show."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

_REGISTRY = "sglang.srt.plugins.hook_registry"


@dataclass(frozen=True)
class Hook:
    """One hook of another plugin.

    Attributes:
        target: ``module.qualified.name`` as it was registered: a function, or the class that holds it.
        kind: ``before``, ``after``, ``around`` or ``replace``.
        plugin: Whose it is.
    """

    target: str
    kind: str
    plugin: str


def hooks_on(target: str) -> Iterator[Hook]:
    """The hooks in SGLang's registry on ``module:qualified.name`` or on a class that holds it."""
    registry = sys.modules.get(_REGISTRY)
    if registry is None:
        return
    path = target.replace(":", ".")
    for name, hooks in registry.HookRegistry._hooks.items():
        if path == name or (path.startswith(f"{name}.") and name.count(".") > target.partition(":")[0].count(".")):
            for kind, _, source in hooks:
                yield Hook(name, kind.value, _name(source))


def replaced_by(target: str) -> str | None:
    """Who replaced a target, if SGLang's registry knows."""
    found = [f"the plugin {hook.plugin} replaces {hook.target}" for hook in hooks_on(target) if hook.kind == "replace"]
    return " and ".join(found) or None


def replaces(link: Any) -> bool:
    """Whether a function is the registry's stand-in for one that it replaced.

    It says that it wraps the original, but never calls it.
    """
    registry = sys.modules.get(_REGISTRY)
    cells = getattr(link, "__closure__", None)
    if registry is None or not cells:
        return False
    replacing = [
        hook
        for hooks in registry.HookRegistry._hooks.values()
        for kind, hook, _ in hooks
        if kind is registry.HookType.REPLACE
    ]
    return any(cell.cell_contents is hook for cell in cells for hook in replacing)


def wrappers_in(links: Iterable[Any]) -> Iterator[str]:
    """The modules whose wrappers lie in a chain, neither SGLang's nor this plugin's; its hooks are in the registry."""
    for link in links:
        wrapper = getattr(link, "_self_wrapper", link)
        wrapper = getattr(wrapper, "func", wrapper)
        module = getattr(wrapper, "__globals__", {}).get("__name__", "")
        if module and module.partition(".")[0] not in ("sglang", "sglang_adaptive_spec"):
            yield module


def _name(source: Any) -> str:
    if source is None:
        return "unknown"
    return f"{source.plugin_name} ({source.dist_name})" if source.dist_name else str(source.plugin_name)

"""Declare, apply, verify and revert the patches on SGLang.

Instance methods and module functions are wrapped with wrapt when SGLang imports their module. Static and
class methods go through SGLang's own ``HookRegistry``: a wrapt wrapper there is lost without a word when
another plugin hooks the same target.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import wrapt

from sglang_adaptive_spec.errors import Refusal

Wrapper = Callable[..., Any]
"""``wrapper(owner, wrapped, instance, args, kwargs)``: wrapt's shape behind the object that owns the patch."""


@dataclass(frozen=True)
class Patch:
    """One wrapped function of SGLang.

    Attributes:
        target: ``module:qualified.name`` of what is wrapped.
        wrapper: What runs in its place. Calls the original exactly once, or says which mode's path it replaces.
        why: What it is for.
        upstream: SGLang's issue or pull request that would make it unnecessary, or "none".
        remove_when: When to delete it.
        defined_in: Where the function is written, if ``target`` is a name imported from there.
        via: The mechanism that applies it.
        required: Whether a server must not start without it.
        for_plain: Whether it does anything only on a server that can take plain steps; on any other it is off.
    """

    target: str
    wrapper: Wrapper
    why: str
    upstream: str
    remove_when: str
    defined_in: str | None = None
    via: Literal["wrapt", "hook_registry"] = "wrapt"
    required: bool = True
    for_plain: bool = True

    @property
    def module(self) -> str:
        return self.target.partition(":")[0]

    @property
    def name(self) -> str:
        return self.target.partition(":")[2]

    @property
    def source(self) -> str:
        """``module:qualified.name`` of the function as written, the one the lock file describes."""
        return self.defined_in or self.target


@dataclass
class PatchSet:
    """The patches of one process, applied at most once however often plugins load.

    Attributes:
        owner: Passed to every wrapper.
        patches: What to apply.
        enabled: Whether the wrappers run; if not, calls go straight to SGLang.
        plain_possible: Whether the ones that serve plain steps run.
    """

    owner: Any
    patches: tuple[Patch, ...]
    enabled: bool = True
    plain_possible: bool = True
    _applied: dict[str, Any] = field(default_factory=dict)
    _hooked: list[str] = field(default_factory=list)
    _registered: bool = False

    def apply(self) -> None:
        """Wrap every target now if its module is imported, else as soon as it is."""
        if self._registered:
            return
        self._registered = True
        for patch in self.patches:
            if patch.via == "hook_registry":
                self._register_hook(patch)
            else:
                wrapt.register_post_import_hook(partial(self._wrap, patch), patch.module)

    def _is_on(self, patch: Patch) -> bool:
        return self.enabled and (self.plain_possible or not patch.for_plain)

    def _wrap(self, patch: Patch, module: Any) -> None:
        wrapper = partial(patch.wrapper, self.owner)
        # Positional on purpose: wrapt 2 renamed the keyword parameters.
        self._applied[patch.target] = wrapt.wrap_object(
            module, patch.name, wrapt.FunctionWrapper, (wrapper, partial(self._is_on, patch))
        )

    def _register_hook(self, patch: Patch) -> None:
        from sglang.srt.plugins.hook_registry import HookRegistry, HookType

        def around(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            if not self._is_on(patch):
                return original(*args, **kwargs)
            return patch.wrapper(self.owner, original, None, args, kwargs)

        HookRegistry.register(f"{patch.module}.{patch.name}", around, HookType.AROUND)
        self._hooked.append(patch.target)

    @property
    def applied(self) -> tuple[str, ...]:
        """Targets wrapped so far in this process."""
        return (*self._hooked, *self._applied)

    def verify(self) -> None:
        """Check that each required wrapt patch whose module is imported is still in its target's chain.

        Raises:
            Refusal: something replaced a target after we wrapped it.
        """
        lost = [
            patch.target
            for patch in self.patches
            if patch.required and patch.via == "wrapt" and patch.module in sys.modules and not self._in_chain(patch)
        ]
        if lost:
            raise Refusal(
                f"{', '.join(lost)} no longer runs through this plugin.",
                "Another plugin replaced it after it was wrapped, so the mode would be decided in one place "
                "and ignored in another.",
                "Set SGLANG_PLUGINS to the plugins you need, or let the other plugin wrap instead of replace.",
            )

    def _in_chain(self, patch: Patch) -> bool:
        mine = self._applied.get(patch.target)
        if mine is None:
            return False
        # A hook that took the method from its class holds a bound stand-in, which knows whose it is.
        return any(link is mine or getattr(link, "_self_parent", None) is mine for link in _chain(_lookup(patch)))

    def revert(self) -> tuple[str, ...]:
        """Unwrap what nobody wrapped over, and switch off the rest in place.

        Returns:
            The targets that stay wrapped (switched off).
        """
        self.enabled = False
        left = [*self._hooked]
        for patch in self.patches:
            mine = self._applied.get(patch.target)
            if mine is None:
                continue
            parent, attribute, current = _resolve(patch)
            if current is mine:
                setattr(parent, attribute, mine.__wrapped__)
                del self._applied[patch.target]
            else:
                left.append(patch.target)
        return tuple(left)


def _resolve(patch: Patch) -> tuple[Any, str, Any]:
    parent: Any = importlib.import_module(patch.module)
    *path, attribute = patch.name.split(".")
    for name in path:
        parent = getattr(parent, name)
    # vars() instead of getattr(): a function wrapper is a descriptor, and binding it makes a new object.
    return parent, attribute, vars(parent).get(attribute)


def _lookup(patch: Patch) -> Any:
    return _resolve(patch)[2]


def _chain(function: Any) -> Iterable[Any]:
    seen = 0
    while function is not None and seen < 100:
        yield function
        function = getattr(function, "__wrapped__", None)
        seen += 1

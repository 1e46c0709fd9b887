"""Declare, apply, verify and revert the patches on SGLang.

Methods and module functions are wrapped with wrapt when SGLang imports their module. A static or class method becomes
another static or class method instead: SGLang's own hook registry takes the function out of such a one, and a wrapt
wrapper around it would be lost without a word when another plugin hooks the same target.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import wrapt

from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.releases.other_plugins import replaced_by, replaces

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
        other_targets: Where other releases have it; the first of all that a release has is wrapped.
        origin: Where the function is written, once that is known; ``target`` may be a name imported from there.
        required: Whether a server must not start without it.
        for_plain: Whether it does anything only on a server that can take plain steps; on any other it is off.
    """

    target: str
    wrapper: Wrapper
    why: str
    upstream: str
    remove_when: str
    other_targets: tuple[str, ...] = ()
    origin: str | None = None
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
        return self.origin or self.target

    def placed(self, origin_of: Callable[[str], str | None]) -> Patch | None:
        """This patch on the target that a release has; None if it has none of them.

        Args:
            origin_of: Maps a target to where its function is written, or to None where there is no such target.
        """
        for target in (self.target, *self.other_targets):
            if origin := origin_of(target):
                return replace(self, target=target, origin=origin)
        return None


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
    _registered: bool = False

    def apply(self) -> None:
        """Wrap every target now if its module is imported, else as soon as it is."""
        if self._registered:
            return
        self._registered = True
        for patch in self.patches:
            wrapt.register_post_import_hook(partial(self._wrap, patch), patch.module)

    def _is_on(self, patch: Patch) -> bool:
        return self.enabled and (self.plain_possible or not patch.for_plain)

    def _wrap(self, patch: Patch, module: Any) -> None:
        parent, attribute, current = _resolve(patch, module)
        if isinstance(current, (staticmethod, classmethod)):
            mine = self._wrap_unbound(patch, current)
            setattr(parent, attribute, mine)
        else:
            wrapper = partial(patch.wrapper, self.owner)
            # Positional on purpose: wrapt 2 renamed the keyword parameters.
            mine = wrapt.wrap_object(module, patch.name, wrapt.FunctionWrapper, (wrapper, partial(self._is_on, patch)))
        self._applied[patch.target] = mine

    def _wrap_unbound(self, patch: Patch, current: Any) -> Any:
        """Another static or class method around one, or around another plugin's wrapper of one."""
        takes_class = isinstance(current, classmethod)

        @functools.wraps(current.__func__)
        def around(*args: Any, **kwargs: Any) -> Any:
            cls, args = (args[0], args[1:]) if takes_class else (object, args)
            original = current.__get__(None, cls)
            if not self._is_on(patch):
                return original(*args, **kwargs)
            return patch.wrapper(self.owner, original, None, args, kwargs)

        around.__wrapped__ = current
        return classmethod(around) if takes_class else staticmethod(around)

    @property
    def applied(self) -> tuple[str, ...]:
        """Targets wrapped so far in this process."""
        return tuple(self._applied)

    def verify(self) -> None:
        """Check that each required patch whose module is imported is still in its target's chain.

        Raises:
            Refusal: something replaced a target after we wrapped it.
        """
        lost = [
            patch.target
            for patch in self.patches
            if patch.required and patch.module in sys.modules and not self.in_chain(patch)
        ]
        if not lost:
            return
        culprits = {target: replaced_by(target) for target in lost}
        raise Refusal(
            f"{', '.join(lost)} no longer runs through this plugin.",
            "Another plugin replaced it, so the mode would be decided in one place and ignored in another."
            + "".join(f" {target}: {culprit}." for target, culprit in culprits.items() if culprit),
            "Set SGLANG_PLUGINS to the plugins you need, or let the other plugin wrap instead of replace.",
        )

    def in_chain(self, patch: Patch) -> bool:
        """Whether this plugin's wrapper of a target runs when SGLang calls it."""
        mine = self._applied.get(patch.target)
        if mine is None:
            return False
        # A hook that took the method from its class holds a bound stand-in, which knows whose it is; one that took
        # a static or class method holds the function in it.
        function = getattr(mine, "__func__", mine)
        for link in chain(patch):
            if link is mine or link is function or getattr(link, "_self_parent", None) is mine:
                return True
            if replaces(link):
                return False
        return False

    def revert(self) -> tuple[str, ...]:
        """Unwrap what nobody wrapped over, and switch off the rest in place.

        Returns:
            The targets that stay wrapped (switched off).
        """
        self.enabled = False
        left = []
        for patch in self.patches:
            mine = self._applied.get(patch.target)
            if mine is None:
                continue
            parent, attribute, current = _resolve(patch)
            if current is mine:
                setattr(parent, attribute, getattr(mine, "__func__", mine).__wrapped__)
                del self._applied[patch.target]
            else:
                left.append(patch.target)
        return tuple(left)


def chain(patch: Patch) -> Iterator[Any]:
    """What runs when SGLang calls a target, the outermost first, as far as each says what it wraps."""
    function = _resolve(patch)[2]
    seen = 0
    while function is not None and seen < 100:
        yield function
        function = getattr(function, "__wrapped__", None)
        seen += 1


def _resolve(patch: Patch, module: Any = None) -> tuple[Any, str, Any]:
    parent: Any = module or importlib.import_module(patch.module)
    *path, attribute = patch.name.split(".")
    for name in path:
        parent = getattr(parent, name)
    # Not getattr(): a function wrapper is a descriptor, and binding it makes a new object. Through the bases, since
    # another plugin may have put a subclass in the class's place.
    return parent, attribute, inspect.getattr_static(parent, attribute, None)

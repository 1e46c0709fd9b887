"""Declare, apply, verify and revert the patches on SGLang.

wrapt puts each hook in its place when SGLang imports the module. The hook itself is a function, or a static or class
method in the place of one, and not wrapt's proxy: seven of them run in a decode step, and binding a proxy to its
instance at every call takes longer than all that the hook then does. SGLang's own hook registry takes the function out
of a static or class method, too, and would lose a proxy around it without a word.
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

    def _wrap(self, patch: Patch, module: Any) -> None:
        parent, attribute, current = _resolve(patch, module)
        mine = self._hook(current, patch)
        wrapt.apply_patch(parent, attribute, mine)
        self._applied[patch.target] = mine

    def _hook(self, current: Any, patch: Patch) -> Any:
        """What takes the place of a target, as a thing of its kind."""
        if isinstance(current, staticmethod):
            return staticmethod(self._around_function(patch, current, current.__get__(None, object)))
        if isinstance(current, classmethod):
            return classmethod(self._around_method(patch, current, lambda cls, _: current.__get__(None, cls)))
        if "." in patch.name:
            # Bound, not called with its instance: another plugin's wrapper in it has to learn that, too.
            return self._around_method(patch, current, current.__get__)
        return self._around_function(patch, current, current)

    def _around_function(self, patch: Patch, current: Any, original: Callable[..., Any]) -> Callable[..., Any]:
        owner, wrapper, for_plain = self.owner, patch.wrapper, patch.for_plain

        @functools.wraps(current)
        def hook(*args: Any, **kwargs: Any) -> Any:
            if self.enabled and (self.plain_possible or not for_plain):
                return wrapper(owner, original, None, args, kwargs)
            return original(*args, **kwargs)

        return hook

    def _around_method(self, patch: Patch, current: Any, bind: Callable[[Any, type], Any]) -> Callable[..., Any]:
        owner, wrapper, for_plain = self.owner, patch.wrapper, patch.for_plain

        @functools.wraps(current)
        def hook(instance: Any, /, *args: Any, **kwargs: Any) -> Any:
            original = bind(instance, type(instance))
            if self.enabled and (self.plain_possible or not for_plain):
                return wrapper(owner, original, instance, args, kwargs)
            return original(*args, **kwargs)

        return hook

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
        # A hook that took a static or class method holds the function in it.
        function = getattr(mine, "__func__", mine)
        for link in chain(patch):
            if link is mine or link is function:
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
    # Not getattr(): it would bind what is there, which makes a new object. Through the bases, since
    # another plugin may have put a subclass in the class's place.
    return parent, attribute, inspect.getattr_static(parent, attribute, None)

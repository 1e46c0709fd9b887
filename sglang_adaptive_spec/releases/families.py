"""The adapters, one a family of releases, and which of them serves a given source.

An adapter is chosen by what is there: the functions it wraps and relies on, and the attributes it reads. The choice is
made once, with the lock, and the lock names it.
"""

from __future__ import annotations

import importlib
from typing import cast

from sglang_adaptive_spec.releases.base import Release
from sglang_adaptive_spec.releases.reads import found
from sglang_adaptive_spec.releases.source import Source

ADAPTERS = {
    "Sglang0519": "sglang_adaptive_spec.releases.sglang_0_5_19",
    "Sglang0517": "sglang_adaptive_spec.releases.sglang_0_5_17",
    "Sglang0516": "sglang_adaptive_spec.releases.sglang_0_5_16",
    "Sglang0515": "sglang_adaptive_spec.releases.sglang_0_5_15",
    "Sglang0514": "sglang_adaptive_spec.releases.sglang_0_5_14",
    "Sglang0513": "sglang_adaptive_spec.releases.sglang_0_5_13",
    "Sglang0512": "sglang_adaptive_spec.releases.sglang_0_5_12",
    "Sglang0511": "sglang_adaptive_spec.releases.sglang_0_5_11",
}
"""Each adapter's name and module, the family of the newest releases first."""


def load_adapter(name: str) -> Release:
    """Make the adapter of this name, importing no other."""
    return cast(Release, getattr(importlib.import_module(ADAPTERS[name]), name)())


def adapter_for(source: Source) -> str:
    """The name of the adapter that finds everything it needs in a source.

    Raises:
        LookupError: none does; the message says what the closest one misses.
    """
    missing = {name: missing_from(load_adapter(name), source) for name in ADAPTERS}
    name = min(missing, key=lambda each: len(missing[each]))
    if missing[name]:
        raise LookupError(f"no adapter serves it; the closest, {name}, misses {', '.join(missing[name])}")
    return name


def missing_from(adapter: Release, source: Source) -> list[str]:
    """What an adapter needs that is not there."""
    wrapped = [patch.target for patch in adapter.patches if patch.required and not patch.placed(source.origin)]
    relied_on = [entry for entry in adapter.relies_on if not found(entry, source.function)]
    read = [entry for entry in adapter.reads if not found(entry, source.has_attribute)]
    return [*wrapped, *relied_on, *read]

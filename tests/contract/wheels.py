"""The wheels of all served releases, to read: downloaded once into a folder that git ignores."""

from __future__ import annotations

import functools
from pathlib import Path

from sglang_adaptive_spec.releases.source import Source
from sglang_adaptive_spec.releases.wheels import fetch_wheel

CACHE = Path(__file__).parents[2] / ".wheels"


@functools.cache
def wheel(release: str) -> Path:
    """The wheel of a release; the first call ever downloads it."""
    CACHE.mkdir(exist_ok=True)
    return fetch_wheel(release, CACHE)


@functools.lru_cache(maxsize=1)
def source(release: str) -> Source:
    """What is in it; of the last release asked for, it stays parsed."""
    return Source(wheel(release))

"""Which tests share a worker, and in what order they start, where pytest-xdist spreads them over several."""

from __future__ import annotations

import pytest

_LONGEST_FIRST = ("engine", "contract")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keep a file's tests together, or each worker would start the servers of its fixtures for itself.

    What takes long starts first; many short tests are left to fill up the end.
    """
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(item.nodeid.partition("::")[0]))
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    kinds = [kind for kind in _LONGEST_FIRST if kind in item.path.parts]
    return _LONGEST_FIRST.index(kinds[0]) if kinds else len(_LONGEST_FIRST)

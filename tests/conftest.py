"""Which tests share a worker, and in what order they start, where pytest-xdist spreads them over several."""

from __future__ import annotations

from typing import Any

import pytest

from tests.groups import group_of

_LONGEST_FIRST = ("engine", "contract")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """What takes long starts first; many short tests are left to fill up the end."""
    items.sort(key=_rank)


def _rank(item: pytest.Item) -> int:
    kinds = [kind for kind in _LONGEST_FIRST if kind in item.path.parts]
    return _LONGEST_FIRST.index(kinds[0]) if kinds else len(_LONGEST_FIRST)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Keep tests together that share a server, or each worker would start it for itself."""
    from xdist.scheduler import LoadScopeScheduling

    class ByServer(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return group_of(nodeid)

    return ByServer(config, log)

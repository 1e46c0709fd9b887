"""Servers as the documentation starts them, for the tests of this folder alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.documented.launcher import Launcher


@pytest.fixture(scope="package")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Launcher]:
    launcher = Launcher(tmp_path_factory.mktemp("documented"))
    yield launcher
    launcher.stop()

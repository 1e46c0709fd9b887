"""What the engine tests share: the answers of the server without speculation."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engine.documented import launcher as launcher
from tests.engine.load import Request, mixed_load, run_load
from tests.engine.serving import Server, serve


@pytest.fixture(scope="session")
def plain_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """The server that everything is held against: no plugin, no speculation."""
    with serve(tmp_path_factory.mktemp("reference") / "server.log") as server:
        yield server


@pytest.fixture(scope="session")
def load() -> list[Request]:
    return mixed_load()


@pytest.fixture(scope="session")
def reference(plain_server: Server, load: list[Request]) -> list[list[int]]:
    """Each request's tokens from that server, uninterrupted."""
    stays = [Request(r.text, r.max_new_tokens, 0.0, r.ignore_eos) for r in load]
    return run_load(plain_server, stays)

"""What start-up runs once, so that no request waits for it."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest

from sglang_adaptive_spec.engine.warm_up import warm_up


class IdleServer:
    """Room for so many made-up requests at once."""

    def __init__(self, room: int) -> None:
        self.room = room
        self.caught_up: list = []

    @contextmanager
    def idle_batch(self, worker, runtime, requests, context_tokens):
        if requests > self.room:
            yield None
            return
        yield SimpleNamespace(catch_up=lambda tokens: self.caught_up.append((requests, context_tokens, tokens)))


@pytest.mark.parametrize(
    ("most_requests", "room", "tokens", "expected"),
    [
        # No more requests than kernels ask for, however many may run.
        (4096, 4096, 32, [(1, 256, 32), (16, 256, 32), (128, 256, 32)]),
        (2, 4096, 32, [(1, 256, 32), (2, 256, 32)]),
        (4096, 16, 32, [(1, 256, 32), (16, 256, 32)]),
        (1, 1, 1000, [(1, 1000, 1000)]),
    ],
)
def test_the_draft_catches_up_in_a_few_sizes(most_requests, room, tokens, expected):
    server = IdleServer(room)
    warm_up(server, None, None, tokens, most_requests)
    assert server.caught_up == expected

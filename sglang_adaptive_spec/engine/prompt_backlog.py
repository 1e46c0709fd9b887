"""Prompts that were prefilled in plain mode and that the draft has yet to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Waited(NamedTuple):
    """What waited until now.

    Attributes:
        prompts: In the order in which they came.
        released_rows: Rows of ``req_to_token`` whose requests have left since.
    """

    prompts: list[Any]
    released_rows: list[int]


class PromptBacklog:
    """Holds prompts until there are many, or somebody needs what the draft makes of them.

    Args:
        most_tokens: That may wait; their hidden states take device memory.
        most_requests: That may wait.
    """

    def __init__(self, most_tokens: int, most_requests: int) -> None:
        self.most_tokens = most_tokens
        self.most_requests = most_requests
        self._prompts: list[Any] = []
        self._rows: set[int] = set()
        self._released: set[int] = set()
        self._tokens = 0
        self._requests = 0

    def __bool__(self) -> bool:
        return bool(self._prompts)

    @property
    def is_urgent(self) -> bool:
        """Whether a request left whose prompt waits, so that the next forward may write to its KV slots."""
        return bool(self._released)

    def takes(self, tokens: int, requests: int) -> bool:
        """Whether a batch is small enough to wait at all: a large one keeps the device busy by itself."""
        return tokens <= self.most_tokens // 2 and requests <= self.most_requests

    def has_room(self, tokens: int, requests: int) -> bool:
        """Whether a batch can wait beside those that do."""
        return self._tokens + tokens <= self.most_tokens and self._requests + requests <= self.most_requests

    def add(self, prompts: Any, rows: Sequence[int], tokens: int) -> None:
        """Let a batch's prompts wait."""
        self._prompts.append(prompts)
        self._rows.update(rows)
        self._tokens += tokens
        self._requests += len(rows)

    def released(self, row: int) -> None:
        """A request leaves. What it puts into the radix cache has to be true for the draft, too."""
        if row in self._rows:
            self._released.add(row)

    def take(self) -> Waited:
        """Everything that waits; nothing does any more."""
        waited = Waited(self._prompts, sorted(self._released))
        self._prompts, self._rows, self._released = [], set(), set()
        self._tokens = self._requests = 0
        return waited

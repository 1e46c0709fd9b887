"""Prompts that were prefilled in plain mode and that the draft has yet to read."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple


class Waited(NamedTuple):
    """What waited until now.

    Attributes:
        prompts: In the order in which they came.
        left: By row of ``req_to_token``, the KV slots of requests that have left since.
    """

    prompts: list[Any]
    left: dict[int, Any]


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
        self._left: dict[int, Any] = {}
        self._tokens = 0
        self._requests = 0

    def __bool__(self) -> bool:
        return bool(self._prompts)

    @property
    def is_urgent(self) -> bool:
        """Whether a request left whose prompt waits, so that the next forward may write to its KV slots."""
        return bool(self._left)

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

    def holds(self, row: int) -> bool:
        """Whether the prompt of the request in this row waits, and the request has not left."""
        return row in self._rows and row not in self._left

    def leaves(self, row: int, slots: Any) -> None:
        """A request leaves. What it puts into the radix cache has to be true for the draft, too.

        Args:
            slots: Its KV slots as they are now: the row may tell of another request by the time this is read.
        """
        self._left[row] = slots

    def take(self) -> Waited:
        """Everything that waits; nothing does any more."""
        waited = Waited(self._prompts, self._left)
        self._prompts, self._rows, self._left = [], set(), {}
        self._tokens = self._requests = 0
        return waited

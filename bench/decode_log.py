"""What SGLang's decode log says about the steps it covers."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"Decode batch.*?#running-req: (?P<running>\d+),.*? graph: (?P<graph>True|False)")


@dataclass(frozen=True)
class GraphUse:
    """Decode log lines at one batch size, by whether the step they report replayed a CUDA graph."""

    replayed: int
    eager: int

    @property
    def proven(self) -> bool:
        """Whether there are lines, and every one of them replayed a graph."""
        return self.replayed > 0 and self.eager == 0


def graph_use(text: str, running_requests: int) -> GraphUse:
    """Count the decode lines of ``running_requests`` requests."""
    lines = Counter(m["graph"] for m in _LINE.finditer(text) if int(m["running"]) == running_requests)
    return GraphUse(replayed=lines["True"], eager=lines["False"])


class LogReader:
    """Reads what was added to a growing log since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0

    def added(self) -> str:
        """Text written since the last call."""
        with self._path.open("rb") as log:
            log.seek(self._offset)
            data = log.read()
        self._offset += len(data)
        return data.decode(errors="replace")

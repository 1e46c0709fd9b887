"""The pages of the documentation, and the commands and messages in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGES = {str(path.relative_to(ROOT)): path for path in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")))}

_SHELLS = ("bash", "sh", "shell", "console")
_FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^ *```$", re.M | re.S)
_ASSIGNMENT = re.compile(r"[A-Z_][A-Z0-9_]*=")


@dataclass(frozen=True)
class Command:
    """One shell command of a page, over as many lines as it takes."""

    page: str
    text: str

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text.replace("\\\n", " "), comments=True)

    @property
    def variables(self) -> dict[str, str]:
        """What is assigned in front of it."""
        found = {}
        for word in self.words:
            if not _ASSIGNMENT.match(word):
                break
            name, _, found[name] = word.partition("=")
        return found

    @property
    def call(self) -> list[str]:
        """Its words without those assignments."""
        return self.words[len(self.variables) :]

    def __str__(self) -> str:
        return f"{self.page}: {' '.join(self.words)[:70]}"


def read(page: str) -> str:
    return PAGES[page].read_text()


def commands(page: str) -> list[Command]:
    """The commands in a page's shell blocks, in their order."""
    found = []
    for _, language, block in _FENCE.findall(read(page)):
        if language in _SHELLS:
            found += [Command(page, text) for text in _split(textwrap.dedent(block))]
    return found


def _split(block: str) -> list[str]:
    found, begun = [], ""
    for line in block.splitlines():
        begun = f"{begun}\n{line}" if begun else line
        if line.endswith("\\"):
            continue
        try:
            words = shlex.split(begun, comments=True)
        except ValueError:
            continue  # inside quotes
        if words:
            found.append(begun)
        begun = ""
    assert not begun, f"unfinished: {begun}"
    return found


def code_spans(page: str) -> set[str]:
    """What stands in back-ticks, blocks left out."""
    return set(re.findall(r"`([^`\n]+)`", _FENCE.sub("", read(page))))

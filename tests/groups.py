"""Which tests share a server: those of a file, or of one kind of server where a file has several."""

from __future__ import annotations

import re

# Not pytest-xdist's marker xdist_group: its 3.8 writes the group where pytest 9.2 no longer looks.
_KIND_OF_SERVER = re.compile(r"\[(page\d+-\w+-topk\d|chain|tree|EAGLE|MTP)\b")
_SEVERAL_SERVERS = ("tests/engine/test_tokens.py", "tests/engine/test_draft.py")


def group_of(nodeid: str) -> str:
    """The group of a test, by its id: its file, and the kind of server where that file has several of them."""
    file = nodeid.partition("::")[0]
    kind = _KIND_OF_SERVER.search(nodeid) if file in _SEVERAL_SERVERS else None
    return f"{file} {kind[1]}" if kind else file

"""Tests that share a server share a worker."""

from __future__ import annotations

import pytest

from tests.groups import group_of


@pytest.mark.parametrize(
    ("nodeid", "group"),
    [
        ("tests/unit/test_clock.py::test_a[chain]", "tests/unit/test_clock.py"),
        (
            "tests/engine/test_tokens.py::test_flips_change_no_token[page1-overlap-topk1-every-2]",
            "tests/engine/test_tokens.py page1-overlap-topk1",
        ),
        (
            "tests/engine/test_tokens.py::test_flips_change_no_token[page16-sync-topk4-by-load]",
            "tests/engine/test_tokens.py page16-sync-topk4",
        ),
        ("tests/engine/test_draft.py::test_a_plain_phase[tree-64]", "tests/engine/test_draft.py tree"),
        ("tests/engine/test_draft.py::test_weights_can_be_updated[MTP]", "tests/engine/test_draft.py MTP"),
        ("tests/engine/test_draft.py::test_the_draft_writes_later", "tests/engine/test_draft.py"),
        ("tests/engine/test_features.py::test_x[chain]", "tests/engine/test_features.py"),
    ],
)
def test_a_group_is_a_server(nodeid, group):
    assert group_of(nodeid) == group

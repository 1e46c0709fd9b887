"""Requests that run into the context limit, with flips and catch-ups on the way."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.engine.serving import CHAIN, SPECULATION, TARGET, Server, serve
from tests.models.prompts import heldout_prompts

pytestmark = pytest.mark.engine

CONTEXT_TOKENS = 256
# Small enough that a catch-up of several requests takes several launches.
SMALL = [f"--context-length={CONTEXT_TOKENS}", "--max-running-requests=8", "--chunked-prefill-size=32"]


def to_the_limit(server: Server) -> list[list[int]]:
    """Requests of all lengths up to the context, each of which generates until there is no room left."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    text = "".join(heldout_prompts(8, seed=31, max_size=30))
    ids = tokenizer.encode(text).ids
    prompts = [ids[: 40 + 26 * k] for k in range(8)]
    body: dict[str, Any] = {
        "input_ids": prompts,
        "sampling_params": [
            {"temperature": 0, "max_new_tokens": CONTEXT_TOKENS - 4 - len(prompt), "ignore_eos": True}
            for prompt in prompts
        ],
    }
    response = server.client.post("/generate", json=body)
    assert response.status_code == 200, response.text
    answers = response.json()
    return [answer["output_ids"] for answer in answers]


@pytest.mark.supports("Ends of a request", "the context limit", since="0.1.0")
def test_requests_that_reach_the_context_limit_are_served_to_the_end(tmp_path: Path) -> None:
    with serve(tmp_path / "reference", SMALL) as server:
        wanted = to_the_limit(server)
    settings = {"disable_batch_threshold": 3, "min_dwell_steps": 1}
    with serve(tmp_path / "log", [*SPECULATION, *CHAIN, *SMALL], settings=settings) as server:
        for flips in (
            settings,
            {"policy": "plain"},
            *({"policy": "alternate", "alternate_period_steps": k} for k in (2, 9, 40)),
        ):
            assert server.use(**flips)
            # A verify step may pass the limit by a few tokens, which SGLang cuts.
            assert [got[: len(want)] for got, want in zip(to_the_limit(server), wanted, strict=True)] == wanted
        state = server.state()
        assert state["faults"] == 0, server.process.log_tail()
        assert state["catch_ups"] > 0
        assert server.used_tokens() == 0

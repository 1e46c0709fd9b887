"""What a step takes from the pool of KV slots, read from the allocator after every step."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import pytest

from tests.engine.serving import CHAIN, SPECULATION, Server, serve
from tests.models.prompts import heldout_prompts

pytestmark = pytest.mark.engine

REQUESTS, NEW_TOKENS = 3, 40
# SGLang's strict memory check logs the allocator's free slots after each scheduler step.
FREE_SLOTS = re.compile(r"Mem Check \(BUSY\).*?available=(\d+)")


def taken_by_steps(server: Server) -> list[int]:
    """Slots taken by each scheduler step of one fixed batch, steps that took none left out."""
    already = len(FREE_SLOTS.findall(server.log))
    body = {
        "text": heldout_prompts(REQUESTS, seed=5),
        "sampling_params": {"temperature": 0, "max_new_tokens": NEW_TOKENS, "ignore_eos": True},
    }
    server.client.post("/generate", json=body).raise_for_status()
    free = [int(count) for count in FREE_SLOTS.findall(server.log)[already:]]
    taken = [before - after for before, after in pairwise(free)]
    return [count for count in taken if count > 0]


@pytest.mark.supports("Allocation and cache", "one slot a request in a plain step", since="0.1.0")
def test_a_plain_step_takes_one_slot_a_request(tmp_path: Path) -> None:
    with serve(tmp_path / "log", [*SPECULATION, *CHAIN], settings={"policy": "plain"}) as server:
        steps = taken_by_steps(server)
        # All but the ones that a prefill mixes into at the start.
        assert steps.count(REQUESTS) >= NEW_TOKENS - 5, steps
        assert max(steps[3:]) == REQUESTS, steps


@pytest.mark.supports("Allocation and cache", "page size 1 and above", since="0.1.0")
def test_a_plain_step_takes_whole_pages_only_when_one_is_full(tmp_path: Path) -> None:
    page_size = 16
    arguments = [*SPECULATION, *CHAIN, f"--page-size={page_size}"]
    with serve(tmp_path / "log", arguments, settings={"policy": "plain"}) as server:
        decode = taken_by_steps(server)[1:]
        assert all(count % page_size == 0 for count in decode), decode
        assert sum(decode) <= REQUESTS * (NEW_TOKENS + page_size), decode


@pytest.mark.supports("Allocation and cache", "`--disable-radix-cache`", since="0.1.0")
@pytest.mark.supports(
    "Allocation and cache",
    "a pool too full to speculate",
    since="0.1.0",
    note="steps go plain before a request is thrown out",
)
def test_a_pool_too_small_to_speculate_serves_plainly(tmp_path: Path, plain_server: Server) -> None:
    # The same request eight times in one call, so that all of them need the most at the same step.
    requests, new_tokens = 8, 96
    [prompt] = heldout_prompts(1, seed=6, max_size=12)
    sampling = {"max_new_tokens": new_tokens, "ignore_eos": True}
    answer = plain_server.generate(prompt, **sampling)
    # They fit to their last token, and speculation's reserve of 16 slots a request does not, not even where it counts
    # from a length that is two verify steps old.
    slots = (answer["meta_info"]["prompt_tokens"] + new_tokens + 2) * requests
    wide = ["--speculative-num-steps=7", "--speculative-num-draft-tokens=8"]
    arguments = [*SPECULATION, *CHAIN, *wide, f"--max-total-tokens={slots}", "--disable-radix-cache"]
    # Admit requests as if they stopped early, so that all of them run at once.
    arguments += ["--schedule-conservativeness=0.1"]
    settings = {"disable_batch_threshold": 31, "min_dwell_steps": 1}
    with serve(tmp_path / "log", arguments, settings=settings) as server:
        body = {"text": [prompt] * requests, "sampling_params": {"temperature": 0, **sampling}}
        answers = server.client.post("/generate", json=body).raise_for_status().json()
        state = server.state()
        assert [got["output_ids"] for got in answers] == [answer["output_ids"]] * requests
        assert state["switches_by_reason"].get("too few free KV slots to speculate", 0) >= 1, state
        assert state["steps"]["plain"] > 0
        assert "Retract" not in server.log
        assert server.used_tokens() == 0

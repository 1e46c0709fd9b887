"""The draft comes back warm: a plain phase costs no acceptance afterwards, not even through the radix cache."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean
from time import sleep
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.engine.saboteur import install
from tests.engine.serving import CHAIN, SPECULATION, TARGET, TREE, Server, serve
from tests.models.prompts import heldout_prompts

pytestmark = pytest.mark.engine

LONG, SHORT = 6, 2
AFTER_TOKENS = 170  # about 50 verify steps of the tiny pair
LEAST_RATIO = 0.98
# All of them at once are too many to speculate; without the short ones they are not.
THRESHOLD = {"disable_batch_threshold": LONG + SHORT - 1, "resume_batch_threshold": LONG, "min_dwell_steps": 1}
NEVER_CATCHES_UP = """
def register():
    from sglang_adaptive_spec.releases.sglang_0_5_14 import Sglang0514
    Sglang0514.catch_up = lambda self, *arguments: None
"""

_tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))


def token_ids(text: str) -> list[int]:
    ids: list[int] = _tokenizer.encode(text).ids
    return ids


def generate_all(server: Server, requests: list[tuple[list[int], int]]) -> list[dict[str, Any]]:
    """Send prompts with their numbers of new tokens in one call, so that they start together."""
    sampling = [{"temperature": 0, "max_new_tokens": new_tokens, "ignore_eos": True} for _, new_tokens in requests]
    body = {"input_ids": [ids for ids, _ in requests], "sampling_params": sampling}
    answers: list[dict[str, Any]] = server.client.post("/generate", json=body).raise_for_status().json()
    return answers


def generate(server: Server, input_ids: list[int], new_tokens: int) -> dict[str, Any]:
    return generate_all(server, [(input_ids, new_tokens)])[0]


def generate_staggered(
    server: Server, requests: list[tuple[list[int], int]], gap_seconds: float
) -> list[dict[str, Any]]:
    def send(numbered: tuple[int, tuple[list[int], int]]) -> dict[str, Any]:
        number, request = numbered
        sleep(number * gap_seconds)
        return generate(server, *request)

    with ThreadPoolExecutor(len(requests)) as pool:
        return list(pool.map(send, enumerate(requests)))


def running(server: Server) -> int:
    loads = server.client.get("/v1/loads").raise_for_status().json()["loads"]
    return sum(int(load["num_running_reqs"]) for load in loads)


def accept_length(answer: dict[str, Any]) -> float:
    return float(answer["meta_info"]["spec_accept_length"])


def plain_tokens(answer: dict[str, Any]) -> int:
    """Tokens that came before the first verify step, of a request whose plain steps all came first."""
    meta = answer["meta_info"]
    return int(meta["completion_tokens"] - meta["spec_verify_ct"] - meta["spec_num_correct_drafts"])


def kept_acceptance(server: Server, answers: list[tuple[list[int], dict[str, Any]]]) -> float:
    """Mean accept length after the plain phase, over that of a server that never left speculation.

    The latter gets each prompt with the plain phase's tokens as a part of it, from an empty cache: the same
    drafts are to be made from the same text.
    """
    server.used_tokens()
    assert server.use(policy="spec")
    never_left = [
        generate(server, prompt + answer["output_ids"][: plain_tokens(answer)], AFTER_TOKENS)
        for prompt, answer in answers
    ]
    assert server.use(**THRESHOLD)
    return mean(accept_length(answer) for _, answer in answers) / mean(map(accept_length, never_left))


def after_a_plain_phase(server: Server, steps: int, gap_seconds: float | None = None) -> float:
    prompts = [token_ids(text) for text in heldout_prompts(LONG + SHORT, seed=steps, max_size=40)]
    requests = [(prompt, steps + (AFTER_TOKENS if i >= SHORT else 0)) for i, prompt in enumerate(prompts)]
    if gap_seconds is None:
        answers = generate_all(server, requests)
    else:
        answers = generate_staggered(server, requests, gap_seconds)
    long = [(prompt, answer) for (prompt, _), answer in zip(requests, answers, strict=True)][SHORT:]
    assert mean(plain_tokens(answer) for _, answer in long) > 0.5 * steps, "there was no plain phase to speak of"
    return kept_acceptance(server, long)


def through_the_radix_cache(server: Server) -> float:
    """Accept length of requests that hit prefixes generated in plain steps, over that with an empty cache."""
    server.used_tokens()
    prompts = [token_ids(text) for text in heldout_prompts(LONG, seed=77, max_size=40)]
    assert server.use(policy="plain")
    longer = [prompt + generate(server, prompt, 150)["output_ids"][:120] for prompt in prompts]
    assert server.use(policy="spec")
    hits = [generate(server, ids, AFTER_TOKENS) for ids in longer]
    for prompt, hit in zip(prompts, hits, strict=True):
        assert hit["meta_info"]["cached_tokens"] > len(prompt) + 60, "there was no hit to speak of"
    server.used_tokens()
    misses = [generate(server, ids, AFTER_TOKENS) for ids in longer]
    assert server.use(**THRESHOLD)
    return mean(map(accept_length, hits)) / mean(map(accept_length, misses))


@pytest.fixture(scope="module", params=[CHAIN, TREE], ids=["chain", "tree"])
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("draft") / "log"
    with serve(log, [*SPECULATION, *request.param], settings=THRESHOLD) as server:
        yield server
        assert server.state()["faults"] == 0


@pytest.mark.parametrize("steps", [5, 64, 500])
def test_a_plain_phase_costs_no_acceptance(server: Server, steps: int) -> None:
    assert after_a_plain_phase(server, steps) >= LEAST_RATIO


def test_requests_prefilled_during_a_plain_phase_draft_as_well(server: Server) -> None:
    prompts = [token_ids(text) for text in heldout_prompts(LONG + SHORT, seed=9, max_size=40)]
    # Held plain until all of them decode: each was prefilled while others took plain steps.
    assert server.use(policy="plain")
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(generate_staggered, server, [(prompt, 600) for prompt in prompts], 0.1)
        while running(server) < len(prompts) and not pending.done():
            sleep(0.05)
        assert server.use(policy="spec")
        answers = pending.result()
    late = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if plain_tokens(answer) > 5]
    assert len(late) >= 4, "there was no plain phase to speak of"
    assert kept_acceptance(server, late) >= LEAST_RATIO


def test_a_prefix_generated_in_plain_steps_costs_no_acceptance(server: Server) -> None:
    assert through_the_radix_cache(server) >= LEAST_RATIO


def test_without_the_catch_up_acceptance_is_lost(tmp_path: Path) -> None:
    """What the tests above would say if nothing kept the draft true."""
    env = install(tmp_path / "saboteur", NEVER_CATCHES_UP)
    with serve(tmp_path / "log", [*SPECULATION, *CHAIN], settings=THRESHOLD, env=env) as server:
        lost = {"64 steps": after_a_plain_phase(server, 64), "radix": through_the_radix_cache(server)}
    assert max(lost.values()) < LEAST_RATIO, lost

"""How much acceptance a plain phase costs: held against a server that never left speculation."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from statistics import mean
from time import sleep
from typing import Any

from tokenizers import Tokenizer

from tests.engine.serving import TARGET, Server
from tests.models.prompts import heldout_prompts

LONG, SHORT = 6, 2
AFTER_TOKENS = 170  # about 50 verify steps of the tiny pair
LEAST_RATIO = 0.98
# All of them at once are too many to speculate; without the short ones they are not.
THRESHOLD = {"disable_batch_threshold": LONG + SHORT - 1, "resume_batch_threshold": LONG, "min_dwell_steps": 1}
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
    # As 0.5.11 calls them, and later ones.
    drafts = meta["spec_accepted_drafts"] if "spec_num_correct_drafts" not in meta else meta["spec_num_correct_drafts"]
    return int(meta["completion_tokens"] - meta["spec_verify_ct"] - drafts)


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
    # A mode lasts a step at least, so the first of all steps would speculate.
    generate(server, prompts[0][:2], 8)
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
    before = server.state()["steps"]["plain"]
    longer = [prompt + generate(server, prompt, 150)["output_ids"][:120] for prompt in prompts]
    assert server.state()["steps"]["plain"] - before >= 120 * len(prompts), "the prefixes were not generated plainly"
    assert server.use(policy="spec")
    hits = [generate(server, ids, AFTER_TOKENS) for ids in longer]
    for prompt, hit in zip(prompts, hits, strict=True):
        assert hit["meta_info"]["cached_tokens"] > len(prompt) + 60, "there was no hit to speak of"
    server.used_tokens()
    misses = [generate(server, ids, AFTER_TOKENS) for ids in longer]
    assert server.use(**THRESHOLD)
    return mean(map(accept_length, hits)) / mean(map(accept_length, misses))


def held_plain_until_all_decode(server: Server, prompts: list[list[int]]) -> list[dict[str, Any]]:
    """Answers of requests that were all prefilled in plain mode, and then speculated."""
    assert server.use(policy="plain")
    # The mode changes with a step; on a busy machine all of them may be prefilled before their first one.
    generate(server, [3, 4], 2)
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(generate_staggered, server, [(prompt, 600) for prompt in prompts], 0.1)
        while running(server) < len(prompts) and not pending.done():
            sleep(0.05)
        # On a busy machine the last of them may have been prefilled a moment ago.
        begun = server.state()["steps"]["plain"]
        while server.state()["steps"]["plain"] < begun + 8 and not pending.done():
            sleep(0.05)
        assert server.use(policy="spec")
        return pending.result()


def prefilled_during_a_plain_phase(server: Server) -> float:
    prompts = [token_ids(text) for text in heldout_prompts(LONG + SHORT, seed=9, max_size=40)]
    answers = held_plain_until_all_decode(server, prompts)
    late = [(prompt, answer) for prompt, answer in zip(prompts, answers, strict=True) if plain_tokens(answer) > 5]
    assert len(late) >= 4, f"there was no plain phase to speak of: {server.state()}"
    return kept_acceptance(server, late)

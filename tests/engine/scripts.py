"""Short scripts of what clients ask of a server and when its mode flips, to be played on a running server."""

from __future__ import annotations

import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import httpx

from tests.engine.serving import Server
from tests.models.prompts import heldout_prompts

TICK_SECONDS = 0.03
MOST_DRAFT_TOKENS = 8
NOISE = 2e-4

_SHORT = heldout_prompts(12, seed=41, max_size=20)
# Of 14 to 163 tokens; the last is longer than two prefill chunks, and the third begins with the first.
PROMPTS = (*_SHORT, "\n".join(_SHORT[2:4]))

_SCHEMA = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 99}}, "required": ["n"]}
# What a request may be asked to do, by a name that reads well in a script.
FEATURES: dict[str, dict[str, Any]] = {
    "json": {"json_schema": json.dumps(_SCHEMA)},
    "regex": {"regex": "[a-z]{3,9} [0-9]{2}"},
    "ebnf": {"ebnf": 'root ::= ("yes" | "no") " " [0-9] [0-9]'},
    # In no name of a special token, which SGLang looks at, too.
    "stop": {"stop": ["o"]},
    "stop token": {"stop_token_ids": [300, 17]},
    "bias": {"logit_bias": {"7": -100.0, "40": 1.5}},
    "to the limit": {"ignore_eos": True},
    "logprobs": {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 2},
    # Beside the others, for what they do to a batch: their own tokens are drawn, or differ under SGLang's speculation.
    "drawn": {"temperature": 0.8, "top_p": 0.9, "top_k": 20, "min_p": 0.05},
    "penalty": {"frequency_penalty": 1.1, "presence_penalty": 0.3, "repetition_penalty": 1.2},
    "least": {"min_new_tokens": 6},
}
GRAMMARS = {"json", "regex", "ebnf"}
STOPS = {"stop", "stop token"}
NOT_COMPARED = {"drawn", "penalty", "least"}
_OUTSIDE_SAMPLING = {"return_logprob", "logprob_start_len", "top_logprobs_num"}

FLIPS: dict[str, dict[str, Any]] = {
    "spec": {"policy": "spec"},
    "plain": {"policy": "plain"},
    "by load": {"policy": "threshold", "disable_batch_threshold": 2, "min_dwell_steps": 1},
    **{f"every {k}": {"policy": "alternate", "alternate_period_steps": k} for k in (1, 2, 3, 5)},
}


@dataclass(frozen=True)
class Ask:
    """One request.

    Attributes:
        prompt: Which of :data:`PROMPTS`.
        new_tokens: Its length limit.
        features: Names from :data:`FEATURES`.
        at: When it is sent, in ticks from the start of the script.
        hangs_up_after: The client hangs up after this many tokens; None for one that stays.
        streams: Whether it reads a stream; one that hangs up always does.
        priority: Where the server schedules by it, a higher one throws lower ones out.
    """

    prompt: int
    new_tokens: int
    features: frozenset[str] = frozenset()
    at: int = 0
    hangs_up_after: int | None = None
    streams: bool = False
    priority: int = 0

    @property
    def compared(self) -> bool:
        return not self.features & NOT_COMPARED

    @property
    def body(self) -> dict[str, Any]:
        wanted: dict[str, Any] = {}
        for name in sorted(self.features):
            wanted |= FEATURES[name]
        outside = {name: value for name, value in wanted.items() if name in _OUTSIDE_SAMPLING}
        sampling = {name: value for name, value in wanted.items() if name not in outside}
        limits = {"temperature": 0, "max_new_tokens": self.new_tokens}
        if "min_new_tokens" in sampling:
            sampling["min_new_tokens"] = min(self.new_tokens, sampling["min_new_tokens"])
        return {
            "text": PROMPTS[self.prompt],
            "sampling_params": limits | sampling,
            "priority": self.priority,
            **outside,
        }


@dataclass(frozen=True)
class Flip:
    """Other settings of the plugin: a name from :data:`FLIPS`, and when, in ticks."""

    to: str
    at: int = 0


@dataclass(frozen=True)
class Script:
    """What happens to a server. Its repr is Python: what failed can be played again as it is printed."""

    asks: tuple[Ask, ...]
    flips: tuple[Flip, ...] = ()


Answer = dict[str, Any]


def play(server: Server, script: Script) -> list[Answer | None]:
    """Play a script from an empty cache, and return each request's last answer; None for one that got none."""
    server.flush()
    start = time.monotonic()

    def wait_for(tick: int) -> None:
        time.sleep(max(0.0, start + tick * TICK_SECONDS - time.monotonic()))

    def send(ask: Ask) -> Answer | None:
        wait_for(ask.at)
        return answer_to(server, ask)

    def flip(flip: Flip) -> None:
        wait_for(flip.at)
        assert server.use(**FLIPS[flip.to])

    with ThreadPoolExecutor(len(script.asks) + len(script.flips) or 1) as pool:
        flips = [pool.submit(flip, one) for one in script.flips]
        answers = [pool.submit(send, ask) for ask in script.asks]
        for one in flips:
            one.result()
        return [answer.result() for answer in answers]


def answer_to(server: Server, ask: Ask) -> Answer | None:
    """Ask for one completion; the answer as far as the client read it."""
    if ask.hangs_up_after is None and not ask.streams:
        answer: Answer = server.client.post("/generate", json=ask.body).raise_for_status().json()
        return answer
    last: Answer | None = None
    # A client of its own: closing the connection is what aborts the request.
    with (
        httpx.Client(base_url=server.client.base_url, timeout=120) as client,
        client.stream("POST", "/generate", json=ask.body | {"stream": True}) as stream,
    ):
        for line in stream.raise_for_status().iter_lines():
            if line.startswith("data: {"):
                last = json.loads(line.removeprefix("data: "))
                if ask.hangs_up_after is not None and len(last["output_ids"]) >= ask.hangs_up_after:
                    break
    return last


class Reference:
    """The answers of a server without speculation, each asked for once."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._known: dict[tuple[int, int, frozenset[str]], Answer] = {}
        self._lock = threading.Lock()

    def __call__(self, ask: Ask) -> Answer:
        key = (ask.prompt, ask.new_tokens, ask.features)
        with self._lock:
            if key not in self._known:
                # A prefix from the cache has no logprobs.
                if "logprobs" in ask.features:
                    self._server.flush()
                answer = answer_to(self._server, Ask(*key))
                assert answer is not None
                self._known[key] = answer
            return self._known[key]


def differences(script: Script, answers: list[Answer | None], reference: Reference) -> list[str]:
    """What differs from a server without speculation, a line a request."""
    found = []
    for number, (ask, answer) in enumerate(zip(script.asks, answers, strict=True)):
        if answer is None:
            found += [] if ask.hangs_up_after is not None else [f"request {number} has no answer"]
        elif not ask.compared:
            given = len(answer["output_ids"])
            found += [] if 0 < given <= ask.new_tokens else [f"request {number}: {given} tokens"]
        else:
            found += [f"request {number}: {what}" for what in _differences(ask, answer, reference(ask))]
    return found


def _differences(ask: Ask, got: Answer, wanted: Answer) -> list[str]:
    ids, wanted_ids = got["output_ids"], wanted["output_ids"]
    if ask.hangs_up_after is not None and got["meta_info"]["finish_reason"] is None:
        return [] if ids == wanted_ids[: len(ids)] else [f"got {ids}, wanted {wanted_ids}, up to where it hung up"]
    if _ran_past_its_end(ask, got, wanted):
        return []
    found = [] if ids == wanted_ids else [f"got {ids}, wanted {wanted_ids}"]
    for what, have, want in (
        ("text", got["text"], wanted["text"]),
        ("finish_reason", got["meta_info"]["finish_reason"], wanted["meta_info"]["finish_reason"]),
    ):
        found += [] if have == want else [f"{what} {have!r}, wanted {want!r}"]
    # Streams bring logprobs in pieces, of which the last answer holds one.
    if "logprobs" in ask.features and not ask.streams and not found:
        found += _different_logprobs(got["meta_info"], wanted["meta_info"])
    return found


def _ran_past_its_end(ask: Ask, got: Answer, wanted: Answer) -> bool:
    """Whether this is SGLang's own: a verify step that reaches the length limit looks for no earlier end."""
    ids, wanted_ids = got["output_ids"], wanted["output_ids"]
    return bool(
        len(ids) == ask.new_tokens
        and got["meta_info"]["finish_reason"]["type"] == "length"
        and 0 < len(ids) - len(wanted_ids) < MOST_DRAFT_TOKENS
        and ids[: len(wanted_ids)] == wanted_ids
    )


def _different_logprobs(got: Answer, wanted: Answer) -> list[str]:
    names = ("input_token_logprobs", "output_token_logprobs")
    pairs = [(name, got[name], wanted[name]) for name in names]
    tops = zip(got["output_top_logprobs"], wanted["output_top_logprobs"], strict=True)
    pairs += [("output_top_logprobs", have, want) for have, want in tops]
    return [f"{name} {have}, wanted {want}" for name, have, want in pairs if not _close(have, want)]


def _close(have: list[list[Any]], want: list[list[Any]]) -> bool:
    """Whether two lists of (logprob, token, text) are the same but for rounding and the order of equals."""
    return len(have) == len(want) and all(
        one[0] is other[0] is None or abs(one[0] - other[0]) <= NOISE * (1 + abs(other[0]))
        for one, other in zip(have, want, strict=True)
    )

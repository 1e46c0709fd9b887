"""Request features behave in plain steps as on a server without speculation, and survive flips."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from typing import Any

import pytest
from tokenizers import Tokenizer

from tests.engine.distribution import Sampling, draw, exact, p_value, p_value_of_others
from tests.engine.saboteur import install
from tests.engine.serving import CHAIN, RICH_MESSAGES, SPECULATION, TARGET, Server, serve
from tests.models.prompts import heldout_prompts, heldout_record

pytestmark = pytest.mark.engine

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"type": "integer", "maximum": 99}},
    "required": ["name", "count"],
}
LOGPROBS = {"return_logprob": True, "logprob_start_len": 0, "top_logprobs_num": 3, "token_ids_logprob": [5, 9]}
# What a flip may not change. Penalties, min-p and hidden states are not here: SGLang's own speculative steps count
# only the last token of an accepted run, read no min-p, and return the draft's states.
ACROSS_FLIPS: dict[str, dict[str, Any]] = {
    "logprobs": {"max_new_tokens": 24, "extra": LOGPROBS},
    "json schema": {"max_new_tokens": 48, "json_schema": json.dumps(SCHEMA)},
    "regex": {"max_new_tokens": 24, "regex": "[a-z]{3,9} [0-9]{2}"},
    "stop string": {"max_new_tokens": 64, "stop": ["e"]},
    "stop at the end of text": {"max_new_tokens": 200},
    "logit bias": {"max_new_tokens": 24, "logit_bias": {"7": -100.0}},
    "one token": {"max_new_tokens": 1},
}
PLAIN_ONLY: dict[str, dict[str, Any]] = {
    "frequency penalty": {"max_new_tokens": 40, "frequency_penalty": 1.3},
    "presence penalty": {"max_new_tokens": 40, "presence_penalty": 1.1},
    "minimum length": {"max_new_tokens": 40, "min_new_tokens": 30},
    # All that it leaves is the likeliest token.
    "min-p": {"max_new_tokens": 24, "temperature": 1.0, "min_p": 1.0},
    "hidden states": {"max_new_tokens": 12, "extra": {"return_hidden_states": True}},
}
# To 0.5.13 it looks for a stop string in the last tokens of a verify step alone: it runs past others, plugin or not.
if version("sglang").startswith(("0.5.11", "0.5.12", "0.5.13")):
    PLAIN_ONLY["stop string"] = ACROSS_FLIPS.pop("stop string")
HIDDEN = "--enable-return-hidden-states"
TOOLS = "--tool-call-parser=qwen25"
NOISE = 2e-4

# A token that the model likes to emit, the slash of "3/28", ends reasoning: the tiny vocabulary has no token for that.
SLASH_ENDS_REASONING = """
def register():
    from sglang.srt.configs.model_config import ModelConfig
    init = ModelConfig.__init__

    def init_with_end(self, *args, **kwargs):
        init(self, *args, **kwargs)
        self.think_end_id, self.think_end_ids = 19, [19]  # the name changed between releases

    ModelConfig.__init__ = init_with_end
"""


@pytest.fixture(scope="module")
def reasons(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Environment of a server that counts the tokens of reasoning."""
    return install(tmp_path_factory.mktemp("reasons") / "plugin", SLASH_ENDS_REASONING)


@pytest.fixture(scope="module")
def base(reasons: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with serve(tmp_path_factory.mktemp("base") / "log", [HIDDEN, TOOLS], env=reasons) as server:
        yield server


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    arguments = [*SPECULATION, *CHAIN, HIDDEN]
    with serve(tmp_path_factory.mktemp("plain") / "log", arguments, settings={"policy": "plain"}) as server:
        yield server


@pytest.fixture(scope="module")
def flipping(reasons: dict[str, str], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    settings = {"policy": "alternate", "alternate_period_steps": 2}
    log = tmp_path_factory.mktemp("flips") / "log"
    with serve(log, [*SPECULATION, *CHAIN, TOOLS], settings=settings, env=reasons) as server:
        yield server


def comparable(answer: dict[str, Any]) -> dict[str, Any]:
    """What of an answer is a matter of the model, not of the moment or the mode."""
    meta = answer["meta_info"]
    kept = {
        "finish_reason",
        "prompt_tokens",
        "completion_tokens",
        "hidden_states",
        *(name for name in meta if "logprobs" in name),
    }
    return {
        "text": answer["text"],
        "output_ids": answer["output_ids"],
        "meta_info": {name: value for name, value in meta.items() if name in kept},
    }


def assert_close(wanted: Any, got: Any, where: str = "answer") -> None:
    """Equal, but for rounding in floating-point numbers."""
    if isinstance(wanted, float) and isinstance(got, float):
        assert got == pytest.approx(wanted, rel=NOISE, abs=NOISE), where
    elif isinstance(wanted, dict):
        assert wanted.keys() == got.keys(), where
        for name in wanted:
            assert_close(wanted[name], got[name], f"{where}.{name}")
    elif isinstance(wanted, list):
        assert len(wanted) == len(got), where
        for index, (one, other) in enumerate(zip(wanted, got, strict=True)):
            assert_close(one, other, f"{where}[{index}]")
    else:
        assert wanted == got, where


@pytest.mark.supports(
    "Sampling",
    "frequency and presence penalties",
    "`min_new_tokens`",
    since="0.1.0",
    note="in plain steps; a speculative one counts the last token of an accepted run only, as SGLang alone does",
)
@pytest.mark.supports(
    "Sampling", "min-p", since="0.1.0", note="in plain steps; SGLang's speculative ones don't read it"
)
@pytest.mark.supports("Sampling", "hidden states", since="0.1.0", note="EAGLE-3: in one mode only")
@pytest.mark.parametrize("feature", [*ACROSS_FLIPS, *PLAIN_ONLY])
def test_plain_steps_serve_a_feature_as_without_speculation(base: Server, plain: Server, feature: str) -> None:
    request = (ACROSS_FLIPS | PLAIN_ONLY)[feature]
    for prompt in heldout_prompts(2, seed=21):
        # A prefix found in the cache is not computed again, and has no hidden states to return then.
        base.used_tokens(), plain.used_tokens()
        wanted = comparable(base.generate(prompt, **request))
        assert_close(wanted, comparable(plain.generate(prompt, **request)))


@pytest.mark.supports("Sampling", "logprobs and top logprobs, by position", "logit bias", since="0.1.0")
@pytest.mark.supports("Structured output", "JSON schema", "regular expression", since="0.1.0")
@pytest.mark.supports("Ends of a request", "stop strings", "end of text", "`max_new_tokens` 1", since="0.1.0")
@pytest.mark.parametrize("feature", ACROSS_FLIPS)
def test_flips_leave_a_feature_alone(base: Server, flipping: Server, feature: str) -> None:
    for prompt in heldout_prompts(2, seed=22):
        wanted = comparable(base.generate(prompt, **ACROSS_FLIPS[feature]))
        assert_close(wanted, comparable(flipping.generate(prompt, **ACROSS_FLIPS[feature])))
    assert flipping.state()["faults"] == 0


@pytest.mark.supports("Ends of a request", "streaming", since="0.1.0")
def test_a_stream_across_flips_says_what_the_answer_says(base: Server, flipping: Server) -> None:
    [prompt] = heldout_prompts(1, seed=23)
    wanted = base.generate(prompt, max_new_tokens=40)
    body = {"text": prompt, "sampling_params": {"temperature": 0, "max_new_tokens": 40}, "stream": True}
    with flipping.client.stream("POST", "/generate", json=body) as stream:
        chunks = [json.loads(line.removeprefix("data: ")) for line in stream.iter_lines() if line.startswith("data: {")]
    assert len(chunks) > 10
    assert chunks[-1]["text"] == wanted["text"]
    lengths = [len(chunk["output_ids"]) for chunk in chunks]
    assert lengths == sorted(lengths)


@pytest.mark.supports("Structured output", "forced tool calls, also streamed", since="0.1.0")
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_forced_tool_call_across_flips(base: Server, flipping: Server, streams: bool) -> None:
    schema = {
        "type": "object",
        "properties": {"name": {"type": "string", "maxLength": 8}, "count": {"enum": [3, 14, 159]}},
        "required": ["name", "count"],
    }
    tool = {"type": "function", "function": {"name": "record", "parameters": schema, "strict": True}}
    for seed in range(3):
        body = {
            "model": "tiny",
            "messages": [{"role": "user", "content": heldout_record(seed)}],
            "tools": [tool],
            "tool_choice": "required",
            "temperature": 0,
            "max_tokens": 96,
            # Where a schema allows any white space, the tiny model goes on with it.
            "logit_bias": dict.fromkeys(map(str, white_space()), -100.0),
            "stream": streams,
        }
        name, arguments = tool_call(base, body)
        assert tool_call(flipping, body) == (name, arguments)
        assert name == "record"
        assert json.loads(arguments).keys() == {"name", "count"}


def white_space() -> list[int]:
    """The tokens that are nothing else."""
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    return [token for token, text in texts.items() if text and not text.strip()]


def tool_call(server: Server, body: dict[str, Any]) -> tuple[str, str]:
    """The one call's name and arguments, put together from the pieces of a stream if it is one."""
    response = server.client.post("/v1/chat/completions", json=body).raise_for_status()
    if body["stream"]:
        lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line.startswith("data: {")]
        pieces = [choice["delta"] for line in lines for choice in json.loads(line)["choices"]]
    else:
        pieces = [choice["message"] for choice in response.json()["choices"]]
    calls = [call["function"] for piece in pieces for call in piece.get("tool_calls") or ()]
    return "".join(call.get("name") or "" for call in calls), "".join(call["arguments"] for call in calls)


@pytest.mark.supports("Ends of a request", "reasoning tokens, counted", since="0.1.0")
def test_tokens_of_reasoning_are_counted_across_flips(base: Server, flipping: Server) -> None:
    for prompt in heldout_prompts(3, seed=26):
        request = {"max_new_tokens": 60, "ignore_eos": True, "extra": {"require_reasoning": True}}
        wanted, got = (server.generate(prompt, **request)["meta_info"] for server in (base, flipping))
        assert got["reasoning_tokens"] == wanted["reasoning_tokens"]
        assert 1 < wanted["reasoning_tokens"] < 60


@pytest.mark.supports("Control", "`/pause_generation` (in place, retract) and `/continue_generation`", since="0.1.0")
@pytest.mark.parametrize("how", ["in_place", "retract"])
def test_requests_paused_between_flips_go_on(base: Server, flipping: Server, how: str) -> None:
    prompts = heldout_prompts(4, seed=27, max_size=10)
    sampling = {"temperature": 0, "max_new_tokens": 120, "ignore_eos": True}
    body = {"text": prompts, "sampling_params": sampling}
    wanted = [answer["output_ids"] for answer in base.client.post("/generate", json=body).raise_for_status().json()]
    flips = {"policy": "alternate", "alternate_period_steps": 2}
    assert flipping.use(**flips)
    before = flipping.state()["steps"]
    begun = sum(before.values())
    with ThreadPoolExecutor(1) as pool:
        pending = pool.submit(flipping.client.post, "/generate", json=body)
        # The mode changes while everything rests, too.
        for pauses, settings in enumerate(({"policy": "plain"}, {"policy": "spec"}, flips), start=1):
            while sum(flipping.state()["steps"].values()) < begun + 6 * pauses:
                assert not pending.done(), "it was over before it could be paused"
            flipping.client.post("/pause_generation", json={"mode": how}).raise_for_status()
            assert flipping.use(**settings)
            flipping.client.post("/continue_generation", json={}).raise_for_status()
        answers = pending.result().raise_for_status().json()
    assert [answer["output_ids"] for answer in answers] == wanted
    after = flipping.state()
    assert min(after["steps"][mode] - before[mode] for mode in before) >= 3
    assert after["faults"] == 0
    assert flipping.used_tokens() == 0


def test_plain_steps_count_as_no_verify_steps(base: Server, flipping: Server, plain: Server) -> None:
    [prompt] = heldout_prompts(1, seed=24)
    request = {"max_new_tokens": 60, "ignore_eos": True}
    meta = plain.generate(prompt, **request)["meta_info"]
    assert "spec_verify_ct" not in meta
    if RICH_MESSAGES:
        assert meta["adaptive_spec_plain_steps"] == 59

    before = flipping.state()
    meta = flipping.generate(prompt, **request)["meta_info"]
    after = flipping.state()
    verified = after["verified_requests"] - before["verified_requests"]
    accepted = after["accepted_tokens"] - before["accepted_tokens"]
    assert 0 < verified < 40
    assert meta["spec_verify_ct"] == pytest.approx(verified, abs=1)
    given = {mode: after["tokens"][mode] - before["tokens"][mode] for mode in ("spec", "plain")}
    if RICH_MESSAGES:
        assert given["plain"] == meta["adaptive_spec_plain_steps"]
    # The first one comes from the prefill; and what the last verify step gave behind the end, nobody gets.
    assert sum(given.values()) == meta["completion_tokens"] - 1
    assert meta["spec_accept_length"] == pytest.approx(accepted / verified, rel=0.1)
    assert 1 <= meta["spec_accept_length"] <= 4


# --- the distribution of sampled tokens ------------------------------------------------------------------

DRAWS = 320
# One run in ten thousand fails although nothing is wrong: the error rate of the six comparisons below together.
LEAST_P = 1e-4 / 6
SAMPLINGS = {
    # The likeliest tokens are what a draft proposes, so some of it is accepted.
    "temperature and top-k": Sampling(temperature=5.0, top_k=3),
    # Among tokens that no draft proposes, so that nearly every verify step draws anew.
    "top-p and logit bias": Sampling(temperature=1.3, top_p=0.8, logit_bias=dict.fromkeys(range(40, 46), 22.0)),
}
OTHER_THAN_ASKED = {
    "temperature and top-k": Sampling(temperature=2.0, top_k=3),
    "top-p and logit bias": Sampling(temperature=1.3, top_p=0.9, logit_bias=dict.fromkeys(range(40, 46), 22.0)),
}
MODES: dict[str, dict[str, Any]] = {
    "spec": {"policy": "spec"},
    "plain": {"policy": "plain"},
    "flips": {"policy": "alternate", "alternate_period_steps": 1},
}


@pytest.mark.supports("Sampling", "temperature, top-k, top-p: the distribution of tokens", since="0.1.0")
@pytest.mark.parametrize("name", SAMPLINGS)
def test_sampled_tokens_are_distributed_as_the_model_says(base: Server, flipping: Server, name: str) -> None:
    prompt = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(heldout_prompts(3, seed=25)[2]).ids
    wanted = exact(base, prompt, SAMPLINGS[name])
    # So many draws tell it from what a slightly different request would give.
    assert p_value_of_others(exact(base, prompt, OTHER_THAN_ASKED[name]), wanted, DRAWS) < LEAST_P
    for settings in MODES.values():
        assert flipping.use(**settings)
        before = flipping.state()["steps"]
        drawn = draw(flipping, prompt, SAMPLINGS[name], DRAWS)
        ran = {mode for mode, steps in flipping.state()["steps"].items() if steps > before[mode]}
        assert ran == {"spec", "plain"} if settings["policy"] == "alternate" else {settings["policy"]}
        assert p_value(drawn, wanted) >= LEAST_P, (settings, drawn.most_common(8), wanted)
    assert flipping.use(policy="alternate", alternate_period_steps=2)

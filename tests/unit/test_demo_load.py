"""The demo's trace of requests, without a server."""

from __future__ import annotations

import asyncio
import json

import httpx
import pytest

from bench.demo.load import (
    Load,
    LoadError,
    Prompt,
    TokenMeter,
    answer_all,
    first_difference,
    make_prompts,
    parse_event,
    phases,
    together,
)


def _event(tokens: list[int]) -> str:
    return f"data: {json.dumps({'output_ids': tokens})}\n\n"


def _client(answer: list[int], seen: list[int] | None = None) -> httpx.AsyncClient:
    """A server that gives every request the same answer, a token at a time."""
    running = 0

    async def handle(request: httpx.Request) -> httpx.Response:
        nonlocal running
        running += 1
        if seen is not None:
            seen.append(running)
        await asyncio.sleep(0.01)
        running -= 1
        assert json.loads(request.content)["sampling_params"]["temperature"] == 0
        body = "".join(_event(answer[: n + 1]) for n in range(len(answer))) + "data: [DONE]\n\n"
        return httpx.Response(200, text=body)

    return httpx.AsyncClient(base_url="http://server", transport=httpx.MockTransport(handle))


async def _nothing() -> None:
    return None


def test_the_load_rises_falls_and_ends_quiet() -> None:
    assert [phase.requests for phase in phases(low=2, high=20, seconds=1.0, bursts=2)] == [2, 20, 2, 20, 2]


def test_answers_differ_in_length_and_are_the_same_every_time() -> None:
    prompts = make_prompts(["a", "b", "c", "d", "e", "f"], longest=100, seed=1)
    assert prompts == make_prompts(["a", "b", "c", "d", "e", "f"], longest=100, seed=1)
    lengths = [prompt.new_tokens for prompt in prompts]
    assert len(set(lengths)) > 1
    assert all(50 <= length <= 100 for length in lengths)


@pytest.mark.parametrize(
    ("got", "expected", "position"),
    [
        ([], [], None),
        ([1, 2], [1, 2], None),
        ([1, 3], [1, 2], 1),
        ([1], [1, 2], 1),
        ([1, 2, 3], [1, 2], 2),
    ],
)
def test_first_difference(got: list[int], expected: list[int], position: int | None) -> None:
    assert first_difference(got, expected) == position


def test_events() -> None:
    assert parse_event("") is None
    assert parse_event("data: [DONE]") is None
    assert parse_event('data: {"output_ids": [1]}') == {"output_ids": [1]}
    with pytest.raises(LoadError, match="too long"):
        parse_event('data: {"error": {"message": "too long"}}')


def test_rate_counts_what_arrived_in_the_interval() -> None:
    meter = TokenMeter([(0.0, 5), (1.0, 6), (2.0, 7)])
    assert meter.rate(0.0, 2.0) == 5.5
    assert meter.rate(2.0, 2.0) == 0.0


def test_answers_come_in_the_order_of_the_prompts_and_not_too_many_run_at_once() -> None:
    seen: list[int] = []
    prompts = [Prompt("x", 2)] * 7
    answers = asyncio.run(answer_all(_client([4, 5], seen), prompts, at_once=3))
    assert answers == [[4, 5]] * 7
    assert max(seen) == 3


def test_a_refused_request_says_why() -> None:
    transport = httpx.MockTransport(lambda _: httpx.Response(400, text="no such thing"))
    client = httpx.AsyncClient(base_url="http://server", transport=transport)
    with pytest.raises(LoadError, match="400: no such thing"):
        asyncio.run(answer_all(client, [Prompt("x", 2)] * 3, at_once=2))


def test_one_failure_cancels_the_others() -> None:
    cancelled: list[bool] = []

    async def forever() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.append(True)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise LoadError("broken")

    with pytest.raises(LoadError, match="broken"):
        asyncio.run(together([forever(), fail(), forever()]))
    assert cancelled == [True, True]


def test_the_load_keeps_to_each_phase_and_notes_wrong_answers() -> None:
    seen: list[int] = []
    trace = phases(low=1, high=6, seconds=0.15, bursts=1)

    async def drive() -> Load:
        prompts, expected = [Prompt("x", 2), Prompt("y", 2)], [[4, 5], [4, 9]]
        load = Load(_client([4, 5], seen), prompts, expected, trace, at_boundary=_nothing)
        await load.run()
        return load

    load = asyncio.run(drive())
    assert load.finished
    assert max(seen) == 6
    assert len(load.boundaries) == len(trace) + 1
    assert {answer.phase for answer in load.answers} == {0, 1, 2}
    assert {answer.prompt for answer in load.wrong} == {1}
    assert {answer.difference for answer in load.wrong} == {1}
    assert sum(tokens for _, tokens in load.meter.arrivals) == 2 * len(load.answers)

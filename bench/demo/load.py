"""A load that rises and falls, and the requests it is made of."""

from __future__ import annotations

import asyncio
import json
import random
import time
from bisect import bisect_left
from collections.abc import Awaitable, Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import httpx

TokenIds = list[int]
T = TypeVar("T")


class LoadError(Exception):
    """A request failed: there is no answer to judge."""


@dataclass(frozen=True)
class Prompt:
    """A text to continue by exactly `new_tokens` tokens."""

    text: str
    new_tokens: int


@dataclass(frozen=True)
class Phase:
    """`requests` run at a time, for at least `seconds`."""

    name: str
    requests: int
    seconds: float


@dataclass(frozen=True)
class Answer:
    """What one request got. `difference` is the first position that is not the reference's, or None."""

    prompt: int
    phase: int
    tokens: int
    difference: int | None
    seconds: float


@dataclass
class TokenMeter:
    """Tokens as they reach the client."""

    arrivals: list[tuple[float, int]] = field(default_factory=list)

    def add(self, tokens: int) -> None:
        self.arrivals.append((time.time(), tokens))

    def rate(self, begin: float, end: float) -> float:
        """Tokens a second that arrived in [begin, end)."""
        if end <= begin:
            return 0.0
        first, last = (bisect_left(self.arrivals, (moment,)) for moment in (begin, end))
        return sum(tokens for _, tokens in self.arrivals[first:last]) / (end - begin)


def phases(low: int, high: int, seconds: float, bursts: int) -> tuple[Phase, ...]:
    """Quiet, busy, quiet, ..., and quiet in the end."""
    trace = [Phase("quiet", low, seconds)]
    for _ in range(bursts):
        trace += [Phase("busy", high, seconds), Phase("quiet", low, seconds)]
    return tuple(trace)


def make_prompts(texts: Sequence[str], longest: int, seed: int) -> tuple[Prompt, ...]:
    """Answers of different lengths, half of `longest` to `longest`, so that requests come and go one by one."""
    rng = random.Random(seed)
    return tuple(Prompt(text, rng.randint((longest + 1) // 2, longest)) for text in texts)


def first_difference(got: Sequence[int], expected: Sequence[int]) -> int | None:
    """The first position at which two answers differ, or None."""
    for position, (one, other) in enumerate(zip(got, expected, strict=False)):
        if one != other:
            return position
    return None if len(got) == len(expected) else min(len(got), len(expected))


def different(answers: Iterable[Answer]) -> list[Answer]:
    """Those that are not the answers of the server without speculation."""
    return [answer for answer in answers if answer.difference is not None]


def most_different(answers: int, on_gpu: bool) -> int:
    """So many answers may differ from the server without speculation.

    None in float32. In bf16, on a GPU, a verify step's kernels may round another way than those of a plain step, and
    where two tokens are about as likely, another is chosen.
    """
    return answers // 10 if on_gpu else 0


def parse_event(line: str) -> dict[str, Any] | None:
    """The JSON of one line of a server-sent event stream; None for blank lines and the end mark."""
    if not line.startswith("data:"):
        return None
    data = line.removeprefix("data:").strip()
    if data == "[DONE]":
        return None
    event: dict[str, Any] = json.loads(data)
    if "error" in event:
        raise LoadError(f"The server answered a request with an error: {event['error']}")
    return event


async def stream(client: httpx.AsyncClient, prompt: Prompt, on_tokens: Callable[[int], None]) -> TokenIds:
    """Send one greedy request, report tokens as they come, and return all of them.

    Raises:
        LoadError: the server refused it or the connection broke.
    """
    sampling = {"temperature": 0, "max_new_tokens": prompt.new_tokens, "ignore_eos": True}
    body = {"text": prompt.text, "sampling_params": sampling, "stream": True}
    tokens: TokenIds = []
    try:
        async with client.stream("POST", "/generate", json=body) as response:
            if response.status_code != httpx.codes.OK:
                text = (await response.aread()).decode(errors="replace")
                raise LoadError(f"The server answered a request with {response.status_code}: {text[:500]}")
            async for line in response.aiter_lines():
                event = parse_event(line)
                if event is not None:
                    # Each event repeats the tokens before it.
                    on_tokens(len(event["output_ids"]) - len(tokens))
                    tokens = event["output_ids"]
    except httpx.HTTPError as error:
        raise LoadError(f"A request was cut off: {type(error).__name__}: {error}") from error
    return tokens


async def answer_all(client: httpx.AsyncClient, prompts: Sequence[Prompt], at_once: int) -> list[TokenIds]:
    """The answer to each prompt, in their order."""
    gate = asyncio.Semaphore(at_once)

    async def one(prompt: Prompt) -> TokenIds:
        async with gate:
            return await stream(client, prompt, lambda _: None)

    return await together(one(prompt) for prompt in prompts)


async def together(coroutines: Iterable[Coroutine[Any, Any, T]]) -> list[T]:
    """Run all of them; when one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


class Load:
    """Drives the trace: as many workers as its busiest phase needs, of which a phase wakes some."""

    def __init__(
        self,
        client: httpx.AsyncClient,
        prompts: Sequence[Prompt],
        expected: Sequence[TokenIds],
        trace: Sequence[Phase],
        at_boundary: Callable[[], Awaitable[object]],
    ) -> None:
        self.trace = trace
        self.meter = TokenMeter()
        self.answers: list[Answer] = []
        self.boundaries: list[float] = []  # unix time: start of each phase, and the end of the last
        self.phase = 0
        self.finished = False  # every request is answered
        self._client = client
        self._prompts = prompts
        self._expected = expected
        self._sent = 0
        self._target = 0
        self._at_boundary = at_boundary  # awaited before each phase, to read the counters there
        self._changed = asyncio.Condition()
        self._closing = False

    @property
    def wrong(self) -> list[Answer]:
        return different(self.answers)

    async def run(self) -> None:
        """Run the whole trace, and let the last requests finish.

        Raises:
            LoadError: a request failed; the others are cancelled.
        """
        workers = max(phase.requests for phase in self.trace)
        await together([*(self._work(number) for number in range(workers)), self._lead()])
        self.boundaries.append(time.time())
        self.finished = True

    async def _lead(self) -> None:
        for index, phase in enumerate(self.trace):
            await self._at_boundary()
            self.phase = index
            self.boundaries.append(time.time())
            await self._wake(phase.requests)
            await asyncio.sleep(phase.seconds)
            await self._outlast(index, phase)
        self._closing = True
        await self._wake(0)

    async def _outlast(self, index: int, phase: Phase) -> None:
        """On a slow machine, wait until the phase has had its effect: an answer for each of its requests."""
        deadline = time.time() + 3 * phase.seconds
        while time.time() < deadline and self.answers_in(index) < phase.requests:
            await asyncio.sleep(0.1)

    def answers_in(self, phase: int) -> int:
        return sum(answer.phase == phase for answer in self.answers)

    async def _wake(self, target: int) -> None:
        async with self._changed:
            self._target = target
            self._changed.notify_all()

    async def _work(self, number: int) -> None:
        while True:
            async with self._changed:
                await self._changed.wait_for(lambda: self._closing or number < self._target)
            if self._closing:
                return
            await self._ask()

    async def _ask(self) -> None:
        index, phase, begin = self._sent % len(self._prompts), self.phase, time.time()
        self._sent += 1
        tokens = await stream(self._client, self._prompts[index], self.meter.add)
        difference = first_difference(tokens, self._expected[index])
        self.answers.append(Answer(index, phase, len(tokens), difference, time.time() - begin))

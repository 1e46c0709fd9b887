"""A load that reaches every corner at once: staggered, uneven, chunked, cached, aborted."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import httpx

from tests.engine.serving import Server
from tests.models.prompts import heldout_prompts


@dataclass(frozen=True)
class Request:
    """One request of a load.

    Attributes:
        text: The prompt.
        max_new_tokens: Its length limit.
        delay_seconds: When it is sent, counted from the start of the load.
        ignore_eos: Whether it runs to its limit.
        abort_after_tokens: The client hangs up after this many tokens; None for one that stays.
    """

    text: str
    max_new_tokens: int
    delay_seconds: float
    ignore_eos: bool = True
    abort_after_tokens: int | None = None


def mixed_load(count: int = 18) -> list[Request]:
    """Requests of uneven length, arriving in waves.

    Every third prompt is several prompts in a row (longer than a prefill chunk), every fourth repeats an
    earlier prompt (a radix hit while its first run may still be decoding), every fifth hangs up on the way.
    """
    prompts = heldout_prompts(count, seed=11)
    requests = []
    for index in range(count):
        text = prompts[index]
        if index % 3 == 2:
            text = "\n".join(prompts[(index + k) % count] for k in range(4))
        if index % 4 == 3:
            text = requests[index - 3].text
        requests.append(
            Request(
                text=text,
                max_new_tokens=12 + (index * 13) % 61,
                delay_seconds=0.03 * (index % 9) + 1.0 * (index // 9),
                ignore_eos=index % 2 == 0,
                abort_after_tokens=6 if index % 5 == 4 else None,
            )
        )
    return requests


def run_load(server: Server, load: list[Request]) -> list[list[int]]:
    """Send a load and collect each request's output tokens (the ones received, for one that hung up)."""
    start = time.monotonic()

    def send(request: Request) -> list[int]:
        time.sleep(max(0.0, start + request.delay_seconds - time.monotonic()))
        sampling = {"max_new_tokens": request.max_new_tokens, "ignore_eos": request.ignore_eos}
        if request.abort_after_tokens is None:
            return list(server.generate(request.text, **sampling)["output_ids"])
        return _hang_up(server, request, sampling)

    with ThreadPoolExecutor(len(load)) as pool:
        return list(pool.map(send, load))


def _hang_up(server: Server, request: Request, sampling: dict[str, int | bool]) -> list[int]:
    body = {"text": request.text, "sampling_params": {"temperature": 0, **sampling}, "stream": True}
    received: list[int] = []
    # A client of its own: closing the connection is what aborts the request.
    with (
        httpx.Client(base_url=server.client.base_url, headers=server.client.headers, timeout=120) as client,
        client.stream("POST", "/generate", json=body) as stream,
    ):
        for line in stream.iter_lines():
            if line.startswith("data: {"):
                received = json.loads(line.removeprefix("data: "))["output_ids"]
            if request.abort_after_tokens is not None and len(received) >= request.abort_after_tokens:
                break
    return received


EOS_ID = 1


def up_to_end(request: Request, tokens: list[int]) -> list[int]:
    """A request's tokens as far as it was to run.

    A verify step of SGLang's own may emit a few more after the end of text, where it reaches the length limit in
    the same step.
    """
    if request.ignore_eos or EOS_ID not in tokens:
        return tokens
    return tokens[: tokens.index(EOS_ID) + 1]


def differences(load: list[Request], wanted: list[list[int]], got: list[list[int]]) -> list[str]:
    """What differs, a line a request; a request that hung up is right as far as it got."""
    found = []
    for index, (request, want, have) in enumerate(zip(load, wanted, got, strict=True)):
        want, have = up_to_end(request, want), up_to_end(request, have)
        compared = want[: len(have)] if request.abort_after_tokens is not None else want
        if have != compared or not have:
            found.append(f"request {index}: wanted {compared}, got {have}")
    return found

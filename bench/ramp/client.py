"""Sends a trace with the client of SGLang's ``bench_serving``, and watches the server meanwhile."""

from __future__ import annotations

import argparse
import asyncio
import gc
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import aiohttp

from bench.ramp.trace import Request

_POLL_S = 0.5


@dataclass(frozen=True)
class Moment:
    """What the server said of itself; seconds from the start of the trace.

    Attributes:
        mode: Of the plugin; None without it.
        plain_steps: Of the plugin, since the server started; so are all counts.
        catch_up_s: What keeping the draft true took of the device.
        waited: Prompts that waited for the draft.
    """

    at_s: float
    running: int
    waiting: int
    mode: str | None = None
    plain_steps: int = 0
    spec_steps: int = 0
    switches: int = 0
    catch_ups: int = 0
    catch_up_s: float = 0.0
    waited: int = 0


@dataclass(frozen=True)
class Switch:
    """One change of mode."""

    at_s: float
    before: str
    after: str
    reason: str
    running: int


@dataclass(frozen=True)
class Answer:
    """What a client saw of one request; seconds from the start of the trace.

    Attributes:
        late_s: How much later than due it was sent: a client that can't keep up measures itself.
        times_s: When each token came.
        intervals_s: Between tokens, by ``bench_serving``'s definition: a chunk of several tokens counts as that many
            intervals of equal length.
    """

    sent_s: float
    late_s: float
    times_s: tuple[float, ...]
    intervals_s: tuple[float, ...]
    end_s: float
    error: str = ""

    @property
    def first_s(self) -> float:
        """Seconds to the first token."""
        return self.times_s[0] - self.sent_s

    @property
    def latency_s(self) -> float:
        """Seconds to the last token."""
        return self.end_s - self.sent_s


@dataclass
class Watcher:
    """Polls one server; it has to be idle when that begins."""

    session: aiohttp.ClientSession
    start: float  # of the trace, on time.perf_counter's clock
    moments: list[Moment] = field(default_factory=list)
    _earlier: set[int] = field(default_factory=set)
    _switches: dict[int, Switch] = field(default_factory=dict)

    @property
    def switches(self) -> list[Switch]:
        """All that came after the first look, in their order."""
        return [self._switches[step] for step in sorted(self._switches)]

    async def poll(self) -> None:
        """Ask once."""
        sent = time.perf_counter()
        info, loads = await asyncio.gather(self._get("/server_info"), self._get("/v1/loads?include=core"))
        at_s = (sent + time.perf_counter()) / 2 - self.start
        load, plugin = loads["loads"][0], info["internal_states"][0].get("adaptive_spec")
        running, waiting = load["num_running_reqs"], load["num_waiting_reqs"]
        if plugin is None:
            self.moments.append(Moment(at_s, running, waiting))
            return
        steps = plugin["steps"]
        if not self.moments:
            # Told by step, not by time: the trace may begin before its first arrival, when others were still served.
            self._earlier = {seen["step"] for seen in plugin["last_switches"]}
        self.moments.append(
            Moment(
                at_s,
                running,
                waiting,
                plugin["mode"],
                steps["plain"],
                steps["spec"],
                plugin["switches"],
                plugin["catch_ups"],
                plugin["catch_up_seconds"],
                plugin["deferred_prompts"],
            )
        )
        unix_start = time.time() - time.perf_counter() + self.start
        for seen in plugin["last_switches"]:
            if (step := seen["step"]) not in self._earlier and step not in self._switches:
                at_s = seen["at_seconds"] - unix_start
                self._switches[step] = Switch(at_s, seen["from"], seen["to"], seen["reason"], seen["running_requests"])

    async def watch(self) -> None:
        """Ask again and again, until cancelled; an answer that does not come leaves a gap."""
        while True:
            with suppress(aiohttp.ClientError, asyncio.TimeoutError):
                await self.poll()
            await asyncio.sleep(_POLL_S)

    async def _get(self, path: str) -> dict[str, Any]:
        async with self.session.get(path) as response:
            response.raise_for_status()
            answer: dict[str, Any] = await response.json()
            return answer


@dataclass(frozen=True)
class Recording:
    """A trace as one server answered it."""

    answers: list[Answer]
    moments: list[Moment]
    switches: list[Switch]


def send(url: str, trace: Sequence[Request], drain_s: float) -> Recording:
    """Send a trace, and wait for the last answer.

    Args:
        drain_s: The longest wait after the last arrival.

    Raises:
        TimeoutError: answers were still missing then.
    """
    # Looking for garbage among a quarter of a million times takes Python tenths of a second, in the midst of the load.
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        return asyncio.run(_send(url, trace, drain_s))
    finally:
        if collects:
            gc.enable()


def warm_up(url: str, most_requests: int, input_tokens: int, vocab: int) -> None:
    """Bursts of 1, 2, 4 and so on up to the most that run, then one request alone.

    SGLang compiles kernels anew for each power of two of requests, a tenth of a second each, when it first meets it.
    The lone request brings a policy by load to where it would be on a quiet server.
    """

    def request(number: int, output_tokens: int) -> Request:
        return Request(0.0, [2 + (number + k) % (vocab - 2) for k in range(input_tokens)], output_tokens)

    sizes = [1 << power for power in range(most_requests.bit_length()) if 1 << power < most_requests]
    bursts = [[request(number, 16) for number in range(size)] for size in (*sizes, most_requests)]
    for trace in (*bursts, [request(0, 48)]):
        recording = send(url, trace, drain_s=120.0)
        if errors := {answer.error for answer in recording.answers if answer.error}:
            raise ValueError(f"the warm-up failed: {errors}")


async def _send(url: str, trace: Sequence[Request], drain_s: float) -> Recording:
    from sglang import bench_serving
    from sglang.benchmark.datasets import DatasetRow

    bench_serving.set_global_args(_client_settings())
    bench_serving.set_ulimit()
    rows = [
        DatasetRow(request.prompt, len(request.prompt), request.output_tokens, timestamp=1000 * request.at_s)
        for request in trace
    ]
    async with aiohttp.ClientSession(url, timeout=aiohttp.ClientTimeout(total=30.0)) as session:
        # get_request counts from the first arrival.
        start = time.perf_counter() - rows[0].timestamp / 1000
        watcher = Watcher(session, start)
        await watcher.poll()
        watching = asyncio.create_task(watcher.watch())
        tasks = []
        try:
            watcher.start = start = time.perf_counter() - rows[0].timestamp / 1000
            async for row in bench_serving.get_request(rows, float("inf"), use_trace_timestamps=True):
                asked = bench_serving.RequestFuncInput(
                    prompt=row.prompt,
                    api_url=f"{url}/generate",
                    prompt_len=row.prompt_len,
                    output_len=row.output_len,
                    model="",
                    lora_name="",
                    image_data=None,
                    extra_request_body={},
                )
                tasks.append(asyncio.create_task(bench_serving.async_request_sglang_generate(asked)))
            outputs = await asyncio.wait_for(asyncio.gather(*tasks), drain_s)
        finally:
            watching.cancel()
            with suppress(asyncio.CancelledError):
                await watching
        await watcher.poll()
    answers = [_answer(output, request, start) for output, request in zip(outputs, trace, strict=True)]
    return Recording(answers, watcher.moments, watcher.switches)


def _answer(output: Any, request: Request, start: float) -> Answer:
    sent_s = output.start_time - start
    error = output.error
    if output.success and output.output_len != request.output_tokens:
        error = f"{output.output_len} tokens instead of {request.output_tokens}"
    times, now_s = [], sent_s + output.ttft
    # What came with the first chunk has no interval.
    times += [now_s] * (output.output_len - len(output.itl))
    for interval in output.itl:
        now_s += interval
        times.append(now_s)
    end_s = sent_s + output.latency
    return Answer(sent_s, sent_s - request.at_s, tuple(times), tuple(output.itl), end_s, error)


def _client_settings() -> argparse.Namespace:
    """What ``bench_serving``'s request function reads of its command line, with the defaults of that."""
    return argparse.Namespace(
        cache_report=False,
        disable_ignore_eos=False,
        disable_stream=False,
        header=None,
        logprob_start_len=-1,
        return_logprob=False,
        return_routed_experts=False,
        temperature=0.0,
        token_ids_logprob=None,
        top_logprobs_num=0,
        top_p=1.0,
    )

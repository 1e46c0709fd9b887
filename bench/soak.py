"""Keep a server busy, flip its mode every few seconds, and look at tokens and memory: ``python -m bench.soak``.

The tiny trained pair in float32, or in bf16 on a GPU if there is one. Requests of uneven length come one by one, every
eighth hangs up on the way; another policy is put in charge every few seconds. Exit code 1 if an answer differs from
that of the server without speculation (in bf16, one in ten), a KV slot is lost, the plugin counts a fault, the server
ends, or its memory grows.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any
from xml.etree import ElementTree

import httpx
import psutil

from bench import host
from bench.demo.load import (
    LoadError,
    Prompt,
    TokenIds,
    first_difference,
    make_prompts,
    most_different,
    stream,
    together,
)
from bench.demo.options import MODELS
from bench.demo.run import ask_reference, client_for
from bench.results import RESULTS, append_row, now, without_paths
from bench.server import (
    Server,
    ServerError,
    cuda_device_present,
    server_arguments,
    server_environment,
    settings_body,
)

STRICT = {"SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1", "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE": "1"}
THRESHOLD = 12
"""At start, and the highest later: a server captures speculative graphs up to the first, and refuses one above them."""
HANG_UP_SHARE = 1 / 8
SAMPLES = 60
WARM_UP_SHARE = 0.2
"""Of the samples: SGLang itself grows until everything has been used once."""
MOST_GROWTH = 1.1
"""Of the server's memory, on the host and on the device, from then on to the end."""


@dataclass
class Seen:
    """What happened so far.

    Attributes:
        wrong: Of each answer that differs, the prompt and the first position that does.
        memory: A sample a row: seconds, and GiB of the server's processes on the host and of the device.
    """

    answers: int = 0
    tokens: int = 0
    hung_up: int = 0
    flips: int = 0
    wrong: list[tuple[int, int]] = field(default_factory=list)
    memory: list[dict[str, float]] = field(default_factory=list)

    def growth(self, name: str) -> float:
        """The last samples' memory over that of the first ones after the warm-up."""
        values = [sample[name] for sample in self.memory[int(len(self.memory) * WARM_UP_SHARE) :]]
        few = max(1, len(values) // 5)
        first, last = median(values[:few]), median(values[-few:])
        return last / first if first else 1.0


class Soak:
    """One run against one server.

    Args:
        client: Of the server.
        process: Its first process.
        prompts: What is asked.
        expected: The answers without speculation.
    """

    def __init__(
        self, client: httpx.AsyncClient, process: psutil.Process, prompts: Sequence[Prompt], expected: list[TokenIds]
    ) -> None:
        self._client = client
        self._process = process
        self._prompts = prompts
        self._expected = expected
        self._draw = random.Random(0)
        self.seen = Seen()

    async def run(self, seconds: float, flip_seconds: float, at_once: int) -> None:
        """Load, flip and look for so long; all requests are answered when this returns."""
        end = time.monotonic() + seconds
        workers = [self._ask(end) for _ in range(at_once)]
        await together([*workers, self._flip(end, flip_seconds), self._sample(end, seconds / SAMPLES)])

    async def _ask(self, end: float) -> None:
        while time.monotonic() < end:
            number = self._draw.randrange(len(self._prompts))
            prompt, expected = self._prompts[number], self._expected[number]
            if self._draw.random() < HANG_UP_SHARE:
                await self._hang_up(prompt)
                continue
            got = await stream(self._client, prompt, lambda _: None)
            self.seen.answers += 1
            self.seen.tokens += len(got)
            different = first_difference(got, expected)
            if different is not None:
                self.seen.wrong.append((number, different))
            # So that the load is uneven.
            await asyncio.sleep(self._draw.choice((0, 0, 0, 0.5)))

    async def _hang_up(self, prompt: Prompt) -> None:
        self.seen.hung_up += 1
        # Cancelling it closes the connection. What fails before that counts as for any other request.
        with suppress(TimeoutError):
            async with asyncio.timeout(self._draw.uniform(0.01, 0.5)):
                await stream(self._client, prompt, lambda _: None)

    async def _flip(self, end: float, flip_seconds: float) -> None:
        while time.monotonic() < end:
            await asyncio.sleep(flip_seconds * self._draw.uniform(0.5, 1.5))
            await self.use(**any_policy(self._draw))
            self.seen.flips += 1
        await self.use(disable_batch_threshold=THRESHOLD)

    async def use(self, **settings: Any) -> None:
        """Put other settings in charge.

        Raises:
            LoadError: the server refused.
        """
        answer = await self._client.post("/set_internal_state", json=settings_body(settings))
        if answer.status_code != httpx.codes.OK or not all(answer.json()):
            raise LoadError(f"The server refused {settings}: {answer.status_code} {answer.text[:500]}")

    async def _sample(self, end: float, every_seconds: float) -> None:
        start = time.monotonic()
        while time.monotonic() < end:
            await asyncio.sleep(every_seconds)
            processes = [self._process, *self._process.children(recursive=True)]
            gib = {"host_gib": sum(_resident_gib(process) for process in processes), "device_gib": _device_gib()}
            self.seen.memory.append({"at_s": round(time.monotonic() - start, 1), **gib})

    async def state(self) -> dict[str, Any]:
        """The plugin's block in /server_info."""
        answer = (await self._client.get("/server_info")).raise_for_status().json()
        block: dict[str, Any] = answer["internal_states"][0]["adaptive_spec"]
        return block

    async def used_tokens(self) -> int:
        """KV slots in use once the server is idle and its radix cache empty."""
        for _ in range(300):
            if (await self._client.post("/flush_cache")).status_code == httpx.codes.OK:
                break
            await asyncio.sleep(0.1)
        loads = (await self._client.get("/v1/loads")).raise_for_status().json()["loads"]
        return sum(int(load["num_used_tokens"]) for load in loads)


def any_policy(draw: random.Random) -> dict[str, Any]:
    """Settings that another policy decides by."""
    kind = draw.choice(("spec", "plain", "alternate", "threshold"))
    if kind == "alternate":
        return {"policy": kind, "alternate_period_steps": draw.randint(1, 12)}
    return {"policy": kind} if kind != "threshold" else {"disable_batch_threshold": draw.randint(2, THRESHOLD)}


def _resident_gib(process: psutil.Process) -> float:
    try:
        return float(process.memory_info().rss) / 2**30
    except psutil.Error:  # it ended since
        return 0.0


def _device_gib() -> float:
    """All that is used of the first device; 0 without one."""
    if not cuda_device_present():
        return 0.0
    import pynvml

    pynvml.nvmlInit()
    try:
        return float(pynvml.nvmlDeviceGetMemoryInfo(pynvml.nvmlDeviceGetHandleByIndex(0)).used) / 2**30
    finally:
        pynvml.nvmlShutdown()


def complaints(seen: Seen, state: Mapping[str, Any], used_tokens: int, on_gpu: bool) -> list[str]:
    """What is not as it has to be."""
    found = []
    if len(seen.wrong) > most_different(seen.answers, on_gpu):
        prompt, position = seen.wrong[0]
        found.append(f"{len(seen.wrong)} answers differ, the first (prompt {prompt}) from token {position} on")
    if not seen.answers or min(state["steps"].values()) < 100 or state["switches"] < seen.flips:
        happened = f"{seen.answers} answers, {state['steps']} steps, {state['switches']} switches"
        found.append(f"too little happened: {happened}")
    if state["faults"]:
        found.append(f"the plugin counts faults: {state['faults_by_kind']}")
    if used_tokens:
        found.append(f"{used_tokens} KV slots are lost")
    growths = {name: seen.growth(name) for name in ("host_gib", "device_gib")}
    found += [f"{name} grew to {by:.2f} of what it was" for name, by in growths.items() if by > MOST_GROWTH]
    return found


def outcomes(junit: Path) -> dict[str, Any]:
    """The row of what pytest wrote with ``--junitxml``."""
    cases = {f"{case.get('classname')}::{case.get('name')}": case for case in ElementTree.parse(junit).iter("testcase")}
    passed = {
        name: all(case.find(kind) is None for kind in ("failure", "error", "skipped")) for name, case in cases.items()
    }
    return {
        "kind": "tests",
        "seconds": {name: float(case.attrib["time"]) for name, case in cases.items()},
        "complaints": [f"{name} did not pass" for name, well in passed.items() if not well],
    }


async def _soak(server: Server, prompts: Sequence[Prompt], expected: list[TokenIds], args: argparse.Namespace) -> Any:
    async with client_for(server) as client:
        soak = Soak(client, psutil.Process(server.pid), prompts, expected)
        await soak.run(args.seconds, args.flip_seconds, args.requests)
        return soak.seen, await soak.state(), await soak.used_tokens()


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=1800.0, help="of load")
    parser.add_argument("--flip-seconds", type=float, default=3.0, help="between two changes of the policy, on average")
    parser.add_argument("--requests", type=int, default=16, help="at once")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--start-seconds", type=float, default=300.0, help="that a server may take to start")
    parser.add_argument("--out", type=Path, help="default: soak.jsonl among the results, of a GPU or of a CPU")
    parser.add_argument("--tests", type=Path, metavar="FILE", help="pytest's --junitxml of the soak tests, to keep too")
    parser.add_argument("--logs", type=Path, default=Path(), metavar="DIR", help="where the servers' logs go")
    parser.add_argument("server_args", nargs="*", metavar="-- ARG", help="more arguments for both servers")
    args = parser.parse_args(argv)
    args.on_gpu = args.device == "cuda" or (args.device == "auto" and cuda_device_present())
    args.out = args.out or RESULTS / f"{'gpu' if args.on_gpu else 'cpu'}-soak.jsonl"
    return args


def run(args: argparse.Namespace) -> dict[str, Any]:
    """Both servers, one after the other; returns the row of what was seen.

    Raises:
        ServerError: a server did not start.
        LoadError: a request failed.
    """
    from tests.models.prompts import heldout_prompts

    prompts = make_prompts(heldout_prompts(4 * args.requests, seed=9), longest=96, seed=9)

    def server(name: str, draft: Path | None) -> Server:
        arguments = server_arguments(MODELS / "target", draft, THRESHOLD, args.on_gpu, args.server_args)
        environment = server_environment(os.environ, draft is not None, args.on_gpu) | STRICT
        return Server(name, arguments, environment, args.logs / f"soak-{name}.log")

    with server("reference", None) as reference:
        reference.wait_until_healthy(args.start_seconds)
        expected = asyncio.run(ask_reference(reference, prompts, args.requests))
    with server("adaptive", MODELS / "draft") as adaptive:
        adaptive.wait_until_healthy(args.start_seconds)
        seen, state, used_tokens = asyncio.run(_soak(adaptive, prompts, expected, args))
    counted = ("steps", "switches", "catch_ups", "deferred_prompts", "faults_by_kind")
    return {
        "kind": "soak",
        "seconds": args.seconds,
        **{name: getattr(seen, name) for name in ("answers", "tokens", "hung_up", "flips", "wrong")},
        **{name: state[name] for name in counted},
        "lost_tokens": used_tokens,
        "host_growth": round(seen.growth("host_gib"), 3),
        "device_growth": round(seen.growth("device_gib"), 3),
        "memory": [{name: round(value, 3) for name, value in sample.items()} for sample in seen.memory],
        "complaints": complaints(seen, state, used_tokens, args.on_gpu),
    }


def main(argv: list[str]) -> int:
    args = parse(argv)
    if not host.plugin_is_installed():
        print("The plugin is not installed in this environment, so SGLang would not load it.")
        return 2
    header = {"kind": "header", "tool": "bench.soak", "started": now(), "host": host.facts()}
    header["command"] = without_paths(" ".join(["python -m bench.soak", *argv]))
    rows = [outcomes(args.tests)] if args.tests else []
    try:
        rows.append(run(args))
    except (ServerError, LoadError, httpx.HTTPError, psutil.Error) as error:
        rows.append({"kind": "soak", "complaints": [f"{type(error).__name__}: {error}"]})
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.unlink(missing_ok=True)
    for row in (header, *rows):
        append_row(args.out, row)
    for row in rows:
        print({name: value for name, value in row.items() if name != "memory"})
    return 1 if any(row["complaints"] for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""What the server says about itself: mode, counters and switches, polled over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

SPEC, PLAIN = "spec", "plain"


class WatchError(Exception):
    """The server tells nothing about its modes."""


@dataclass(frozen=True)
class Sample:
    """The counters at one moment; they count from the start of the server.

    Attributes:
        at: Unix time.
        running: Requests in the server's running batch.
        verified: Requests verified, summed over all speculative steps.
    """

    at: float
    mode: str
    running: int
    spec_steps: int
    plain_steps: int
    spec_tokens: int
    plain_tokens: int
    verified: int
    switches: int
    faults: int = 0


@dataclass(frozen=True)
class Switch:
    """One change of mode, as the server recorded it."""

    step: int
    at: float
    before: str
    after: str
    reason: str
    running: int


@dataclass(frozen=True)
class Band:
    """A stretch of time in one mode."""

    begin: float
    end: float
    mode: str


def read_sample(state: Mapping[str, Any], running: int, at: float) -> Sample:
    """A sample from the plugin's part of /server_info."""
    return Sample(
        at=at,
        mode=state["mode"],
        running=running,
        spec_steps=state["steps"][SPEC],
        plain_steps=state["steps"][PLAIN],
        spec_tokens=state["accepted_tokens"],  # as counted over verified requests, for the accept length
        plain_tokens=state["tokens"][PLAIN],
        verified=state["verified_requests"],
        switches=state["switches"],
        faults=state["faults"],
    )


def read_switches(state: Mapping[str, Any]) -> list[Switch]:
    """The last switches from the plugin's part of /server_info."""
    return [
        Switch(s["step"], s["at_seconds"], s["from"], s["to"], s["reason"], s["running_requests"])
        for s in state["last_switches"]
    ]


def accept_length(before: Sample, after: Sample) -> float | None:
    """Tokens a request gained in each speculative step between two samples; None without such a step."""
    verified = after.verified - before.verified
    return (after.spec_tokens - before.spec_tokens) / verified if verified else None


def plain_share(before: Sample, after: Sample) -> float | None:
    """Share of the decode steps between two samples that ran plain; None without a step."""
    plain = after.plain_steps - before.plain_steps
    steps = plain + after.spec_steps - before.spec_steps
    return plain / steps if steps else None


def bands(switches: Sequence[Switch], first_mode: str, begin: float, end: float) -> list[Band]:
    """Cut [begin, end] at the switches."""
    found: list[Band] = []
    mode = first_mode
    for switch in sorted(switches, key=lambda s: s.step):
        if switch.at > begin:
            cut = min(switch.at, end)
            found.append(Band(begin, cut, mode))
            begin = cut
        mode = switch.after
    return [*(band for band in found if band.end > band.begin), Band(begin, end, mode)]


@dataclass
class Watcher:
    """Polls one server and keeps what it said."""

    client: httpx.AsyncClient
    samples: list[Sample] = field(default_factory=list)
    _switches: dict[int, Switch] = field(default_factory=dict)
    _one_at_a_time: asyncio.Lock = field(default_factory=asyncio.Lock)

    @property
    def switches(self) -> list[Switch]:
        """All switches seen since the first sample, in their order."""
        return [self._switches[step] for step in sorted(self._switches)]

    async def poll(self) -> Sample:
        """Ask once, and keep the sample.

        Raises:
            WatchError: the server did not answer, or runs without the plugin.
        """
        async with self._one_at_a_time:  # or an older answer could come after a newer one
            return await self._poll()

    async def _poll(self) -> Sample:
        sent = time.time()
        try:
            info, loads = await asyncio.gather(self._get("/server_info"), self._get("/v1/loads?include=core"))
        except httpx.HTTPError as error:
            raise WatchError(f"The server did not tell its state: {type(error).__name__}: {error}") from error
        state = info["internal_states"][0].get("adaptive_spec")
        if state is None:
            raise WatchError("The server runs without the plugin: /server_info has no 'adaptive_spec'.")
        # Under load the way there and back takes a good part of a second.
        at = (sent + time.time()) / 2
        sample = read_sample(state, loads["loads"][0]["num_running_reqs"], at)
        self._switches |= {switch.step: switch for switch in read_switches(state)}
        self.samples.append(sample)
        return sample

    async def _get(self, path: str) -> dict[str, Any]:
        response = await self.client.get(path)
        response.raise_for_status()
        answer: dict[str, Any] = response.json()
        return answer

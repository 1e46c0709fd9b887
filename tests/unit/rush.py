"""A small simulator of SGLang's scheduler under requests that come and go: host and GPU overlap, prefills go first.

What :mod:`tests.unit.traces` leaves out: how many requests run depends on how fast they are served.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any

from bench.ramp.client import Switch
from bench.ramp.trace import Phase, Request, make_trace
from sglang_adaptive_spec.clock import StepClock
from sglang_adaptive_spec.controller import Controller
from sglang_adaptive_spec.costs import StepCosts
from sglang_adaptive_spec.engine.samples import SampleRelay
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.policies import Policy
from tests.unit.traces import accepted_alike, between

INPUT_TOKENS, OUTPUT_TOKENS = 128, 256
CONTEXT_TOKENS = 256
MOST_REQUESTS = 256
PLENTY_OF_STEPS = 1 << 20
_LOOP_S = 0.0002
"""Of the scheduler's loop, around everything else."""


@dataclass(frozen=True)
class Server:
    """What steps and prefills take, in seconds.

    Of a step: what start-up measured. The rest is set so that servers which can't choose give the latencies of
    ``bench/results/h200-*-ramp-graphs.jsonl`` (:func:`tests.unit.test_auto_policy_ramp`).

    Attributes:
        step: By mode and batch size.
        prefill_host: Until a prefill is launched.
        draft_host: The same of the draft's part.
        prefill_gpu: A prefill of no tokens.
        token_gpu: Each token of it.
        draft_gpu: The draft's part.
        launch_host: Until a decode step is launched, by mode.
        result_host: A result's processing.
        request_host: The same, for each request of a decode step.
        noise: Standard deviation on the GPU, relative.
        kept_host: With the plugin, what keeping the draft true adds to a plain prefill.
        kept_share: The same to a plain step, relative.
        to_spec_gpu: A switch to speculation.
        prompt_gpu: The same, for each prompt that waits.
    """

    step: Mapping[Mode, Mapping[int, float]]
    prefill_host: float = 0.0084
    draft_host: float = 0.002
    prefill_gpu: float = 0.0042
    token_gpu: float = 8e-6
    draft_gpu: float = 0.0008
    launch_host: Mapping[Mode, float] = field(default_factory=lambda: {Mode.PLAIN: 0.0015, Mode.SPEC: 0.0035})
    result_host: float = 0.0003
    request_host: float = 6e-6
    noise: float = 0.03
    kept_host: float = 0.0003
    kept_share: float = 0.015
    to_spec_gpu: float = 0.008
    prompt_gpu: float = 0.0001

    def costs(self) -> StepCosts:
        """Step times as start-up has measured them."""
        costs = StepCosts({mode: sorted(sizes) for mode, sizes in self.step.items()})
        for mode, sizes in self.step.items():
            for requests, seconds in sizes.items():
                costs.seed(mode, requests, CONTEXT_TOKENS, seconds)
        return costs


@dataclass
class Served:
    """What became of a load.

    Attributes:
        latencies_s: Of each request.
        switches: All of them, probes included.
    """

    latencies_s: list[float]
    switches: list[Switch]

    @property
    def latency_s(self) -> float:
        """The mean."""
        return fmean(self.latencies_s)


@dataclass(eq=False)
class _Running:
    asked: Request
    tokens: int = 0
    done_s: float | None = None


@dataclass
class _Forward:
    """What was launched; ``mode`` is None for a prefill."""

    requests: list[_Running]
    ready_s: float
    mode: Mode | None = None
    accepted: int = 1


class _Scheduler:
    """One run. A result is processed once the forward behind it is launched, as SGLang does."""

    def __init__(self, server: Server, mode: Mode | Policy, accept_length: float, seed: int) -> None:
        self.server = server
        self.policy = None if isinstance(mode, Mode) else mode
        self.mode = self.last_mode = mode if isinstance(mode, Mode) else mode.initial_mode
        self.accept_length = accept_length
        self.rng = random.Random(seed)
        self.host_s = self.gpu_s = 0.0
        self.running: list[_Running] = []
        self.waiting_for_draft = 0
        self.switches: list[Switch] = []
        self.clock = StepClock(lambda: self.host_s)
        self.controller = Controller(self.policy) if self.policy else None
        self.relay = SampleRelay(1, list, self.controller.learn if self.controller else lambda times, verifies: None)

    def serve(self, trace: Sequence[Request]) -> list[float]:
        to_come, waiting = deque(trace), deque[_Running]()
        everybody: list[_Running] = []
        before: _Forward | None = None
        while to_come or waiting or self.running or before:
            while to_come and to_come[0].at_s <= self.host_s:
                waiting.append(_Running(to_come.popleft()))
                everybody.append(waiting[-1])
            self.host_s += _LOOP_S
            now = None
            if waiting and len(self.running) < MOST_REQUESTS:
                room = MOST_REQUESTS - len(self.running)
                now = self._prefill([waiting.popleft() for _ in range(min(len(waiting), room))])
            elif self.running:
                now = self._decode(list(self.running))
            elif before is None:
                self.host_s = max(self.host_s, to_come[0].at_s)
            if before is not None:
                self._process(before)
            if now is not None and now.mode is None:
                self.running += now.requests
            before = now
        return [each.done_s - each.asked.at_s for each in everybody if each.done_s is not None]

    def _usual(self, seconds: float) -> float:
        return seconds * self.rng.lognormvariate(0, self.server.noise)

    def _prefill(self, requests: list[_Running]) -> _Forward:
        server = self.server
        host_s, gpu_s = server.prefill_host, server.prefill_gpu + server.token_gpu * INPUT_TOKENS * len(requests)
        if self.mode is Mode.SPEC:
            host_s, gpu_s = host_s + server.draft_host, gpu_s + server.draft_gpu
        elif self.controller:
            host_s += server.kept_host
            self.waiting_for_draft += len(requests)
        begin_s = max(self.gpu_s, self.host_s)
        self.host_s += host_s
        # It runs while it is launched, and not beyond what is launched.
        self.gpu_s = max(begin_s + self._usual(gpu_s), self.host_s)
        if self.controller:
            self.clock.interrupted()
            self.controller.note_prefill()
        return _Forward(requests, self.gpu_s)

    def _decode(self, requests: list[_Running]) -> _Forward:
        server = self.server
        if self.controller and self.policy:
            self._decide(self.controller, self.policy, len(requests))
        gpu_s = self._usual(between(server.step[self.mode], len(requests)))
        if self.controller and self.mode is Mode.PLAIN:
            gpu_s *= 1 + server.kept_share
        elif self.mode is not self.last_mode:
            gpu_s += server.to_spec_gpu + server.prompt_gpu * self.waiting_for_draft
            self.waiting_for_draft = 0
        self.last_mode = self.mode
        self.host_s += server.launch_host[self.mode]
        self.gpu_s = max(self.gpu_s, self.host_s) + gpu_s
        accepted = accepted_alike(self.rng, self.accept_length, 1) if self.mode is Mode.SPEC else 1
        return _Forward(requests, self.gpu_s, self.mode, accepted)

    def _decide(self, controller: Controller, policy: Policy, requests: int) -> None:
        self.relay.at_step(controller.decided_steps, at_once=policy.attentive)
        decision = controller.decide(requests, lambda: PLENTY_OF_STEPS, CONTEXT_TOKENS)
        if decision.mode is not self.mode:
            made = Switch(self.host_s, self.mode.value, decision.mode.value, decision.reason, requests)
            self.switches.append(made)
            self.mode = decision.mode
        self.clock.launched(self.mode, requests, controller.decided_steps - 1, CONTEXT_TOKENS)

    def _process(self, forward: _Forward) -> None:
        self.host_s = max(self.host_s, forward.ready_s) + self.server.result_host
        if forward.mode is None:
            for each in forward.requests:
                each.tokens = 1
            return
        self.host_s += self.server.request_host * len(forward.requests)
        # Who ended with the result before was still in this step.
        theirs = [each for each in forward.requests if each.done_s is None]
        for each in theirs:
            each.tokens += forward.accepted
            if each.tokens >= each.asked.output_tokens:
                each.done_s = self.host_s
        self.running = [each for each in self.running if each.done_s is None]
        if self.controller:
            self._learn(self.controller, forward.mode, len(theirs), forward.accepted)

    def _learn(self, controller: Controller, mode: Mode, requests: int, accepted: int) -> None:
        timed = self.clock.processed(mode)
        if timed is not None:
            if timed.after is not mode:
                controller.note_time(timed)
            if timed.alone:
                self.relay.timed(timed)
        if mode is Mode.SPEC and requests:
            self.relay.verified(requests, requests * accepted)


def serve(
    server: Server, mode: Mode | Policy, phases: Sequence[Phase], *, accept_length: float = 2.5, seed: int = 1
) -> Served:
    """Send the ramp's trace to a server.

    Args:
        server: What everything takes.
        mode: A server that can't choose: without speculation, or always with it; or the policy of one that can.
        phases: Of the load.
        accept_length: Tokens that a verify step gives each request.
        seed: Of noise and acceptance.
    """
    sizes: Any = {"input_tokens": 1, "output_tokens": OUTPUT_TOKENS, "vocab": 100}
    scheduler = _Scheduler(server, mode, accept_length, seed)
    latencies_s = scheduler.serve(make_trace(phases, seed=1, **sizes))
    if scheduler.controller:
        assert not scheduler.controller.faults.counts
    return Served(latencies_s, scheduler.switches)

"""A small simulator of a server that decodes, to see what a policy makes of a load, and how far from the best it is."""

from __future__ import annotations

import random
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from sglang_adaptive_spec.clock import StepTime
from sglang_adaptive_spec.controller import Controller
from sglang_adaptive_spec.costs import StepCosts
from sglang_adaptive_spec.engine.measure import CONTEXTS_TOKENS
from sglang_adaptive_spec.engine.samples import SampleRelay
from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies import Observation, Policy

BUCKETS = (1, 2, 4, 8, 12, 16, *range(24, 257, 8))
"""Batch sizes that SGLang captures graphs for, up to 256."""

BENCH_CONTEXT_TOKENS = 320
"""Mean context of the benchmark's requests: 256 tokens in, 128 out."""

PROBING = {Reason.PROBE, Reason.PROBE_OVER, Reason.NO_DATA}
MAX_ACCEPT_LENGTH = 4
CATCH_UP_STEPS = 32

# One H200, Llama-3.1-8B shape in bf16, EAGLE3 draft of one layer, 3 steps, topk 1, accept length 2.5. Milliseconds
# of a decode step by batch size: requests * accept length / decode tokens a second, from bench/results/h200-*.jsonl
# (8, 64, 256) and a sweep of the same set-up (the others).
PLAIN_MS = {1: 4.78, 4: 4.83, 8: 4.97, 16: 5.11, 32: 5.49, 64: 6.20, 128: 7.73, 256: 11.5}
SPEC_MS = {
    "fa3": {1: 7.42, 8: 7.53, 32: 7.82, 64: 10.3, 128: 16.7, 256: 30.5},
    "triton": {1: 6.7, 4: 6.79, 8: 8.05, 16: 7.9, 64: 22.9, 256: 89.8},
}
_KV_MS_PER_TOKEN = 32 * 2 * 8 * 128 * 2 / 4.0e12 * 1e3
"""Reading the KV cache: layers, keys and values, heads, head size, bytes; at what an H200 reads in a second."""
_SPEC_READS = {"fa3": 1 + 3 / 32, "triton": 16.5}
"""Of the KV cache in a speculative step. The verify reads all layers, each draft step one of 32. Triton's verify takes
as long as 15 to 17 readings, by the step times that one start measured with 256 and 3072 tokens (``step_costs`` of the
server ``ours-auto`` in bench/results/h200-triton-accept-2.5.jsonl, batch 16 to 256)."""


def between(table: Mapping[int, float], requests: int) -> float:
    """A value of a table by linear interpolation, its last ones beyond its ends."""
    sizes = sorted(table)
    right = min(bisect_left(sizes, requests), len(sizes) - 1)
    if right == 0 or sizes[right] <= requests:
        return table[sizes[right]]
    left, right = sizes[right - 1], sizes[right]
    return table[left] + (table[right] - table[left]) * (requests - left) / (right - left)


@dataclass(frozen=True)
class Machine:
    """How long decode steps take on it.

    Attributes:
        backend: Attention backend, ``fa3`` or ``triton``.
        noise: Standard deviation of a step time, relative.
        to_plain_ms: What the first plain step takes longer.
        to_spec_ms: What the first speculative step takes longer: the draft catches up.
        catch_up_ms: What every 32nd plain step takes longer, for the same reason.
    """

    backend: str = "fa3"
    noise: float = 0.03
    to_plain_ms: float = 2.0
    to_spec_ms: float = 8.0
    catch_up_ms: float = 3.0

    def milliseconds(self, mode: Mode, requests: int, context_tokens: int) -> float:
        """A usual step: its graph is padded, its attention is not."""
        bucket = BUCKETS[bisect_left(BUCKETS, requests)]
        table = PLAIN_MS if mode is Mode.PLAIN else SPEC_MS[self.backend]
        reads = 1.0 if mode is Mode.PLAIN else _SPEC_READS[self.backend]
        kv_ms = _KV_MS_PER_TOKEN * requests * (context_tokens - BENCH_CONTEXT_TOKENS) * reads
        return max(between(table, bucket) + kv_ms, 1.0)

    def goodput(self, mode: Mode, requests: int, context_tokens: int, accept_length: float) -> float:
        """Tokens a millisecond and request in the long run."""
        ms = self.milliseconds(mode, requests, context_tokens)
        return accept_length / ms if mode is Mode.SPEC else 1 / (ms + self.catch_up_ms / CATCH_UP_STEPS)

    def better(self, load: Load) -> Mode:
        """The mode with the higher goodput."""
        return max(Mode, key=lambda m: self.goodput(m, load.requests, load.context_tokens, load.accept_length))


@dataclass(frozen=True)
class Load:
    """What a server has to do for a while.

    Attributes:
        seconds: How long.
        requests: That run.
        accept_length: Mean tokens that a verify step gives one of them.
        context_tokens: Their mean length.
        prefill_share: Of the steps, how many can't be timed, since a prefill is launched before or behind them.
        alike: Whether all requests of a step are accepted alike, as where SGLang simulates acceptance.
    """

    seconds: float
    requests: int
    accept_length: float = 2.5
    context_tokens: int = BENCH_CONTEXT_TOKENS
    prefill_share: float = 0.05
    alike: bool = False


@dataclass
class Run:
    """What a policy made of a trace.

    Attributes:
        decisions: One a step.
        loads: The load that each was made under.
        tokens: A request, expected.
        best_tokens: The same in the same time, in the better mode at every step, switches free.
    """

    decisions: list[Decision] = field(default_factory=list)
    loads: list[Load] = field(default_factory=list)
    tokens: float = 0.0
    best_tokens: float = 0.0

    @property
    def regret(self) -> float:
        return 1 - self.tokens / self.best_tokens

    def switches(self, *, probes: bool = False) -> list[tuple[int, Decision]]:
        """Step and decision of each switch: those made without a probe, or the probes', there and back or to stay."""
        made = [
            (step, now)
            for step, (before, now) in enumerate(zip(self.decisions, self.decisions[1:], strict=False), 1)
            if before.mode is not now.mode
        ]
        return [(step, now) for step, now in made if (now.reason in PROBING) is probes]

    def modes_at_end_of_loads(self) -> list[Mode]:
        """The mode that each stretch of one load ended in, or would have returned to after a probe."""
        ends = [i for i, (a, b) in enumerate(zip(self.loads, self.loads[1:], strict=False)) if a is not b]
        last = [self.decisions[i] for i in [*ends, len(self.loads) - 1]]
        return [decision.mode.other if decision.reason is Reason.PROBE else decision.mode for decision in last]


def probability(accept_length: float) -> float:
    """With which each of a chain of 3 drafts is accepted, to give that accept length."""
    low, high = 0.0, 1.0
    for _ in range(30):
        middle = (low + high) / 2
        low, high = (middle, high) if 1 + middle + middle**2 + middle**3 < accept_length else (low, middle)
    return low


def accepted(rng: random.Random, chance: float, requests: int) -> int:
    """Tokens of one verify step: a request's drafts up to the first that is not accepted, and one more."""
    tokens = requests
    for _ in range(requests):
        for _ in range(MAX_ACCEPT_LENGTH - 1):
            if rng.random() >= chance:
                break
            tokens += 1
    return tokens


def accepted_alike(rng: random.Random, accept_length: float, requests: int) -> int:
    """Tokens of one verify step by SGLang's way to simulate acceptance: one whole number for all requests."""
    whole = int(accept_length)
    return requests * (whole + (rng.random() < accept_length - whole))


def seeded_costs(
    machine: Machine, contexts: Sequence[int] = CONTEXTS_TOKENS, bias: Callable[[Mode], float] = lambda mode: 0.93
) -> StepCosts:
    """Step times as start-up measures them: at some context lengths, without the host's share.

    Args:
        machine: Where.
        contexts: At which all is measured, in tokens.
        bias: What start-up sees of a step's time, by mode.
    """
    costs = StepCosts(dict.fromkeys(Mode, BUCKETS))
    for mode in Mode:
        for requests in BUCKETS:
            for context_tokens in contexts:
                ms = machine.milliseconds(mode, requests, context_tokens)
                costs.seed(mode, requests, context_tokens, ms * 1e-3 * bias(mode))
    return costs


def serve(
    policy: Policy,
    machine: Machine,
    trace: Sequence[Load],
    *,
    seed: int = 0,
    ranks: int = 1,
    clock: Callable[[int, float], float] = lambda step, seconds: seconds,
) -> Run:
    """Run a trace.

    Args:
        policy: Decides.
        machine: Takes the time.
        trace: The loads, one after the other.
        seed: Of noise and accepted tokens.
        ranks: Tensor-parallel ranks: several hear of step times seldom.
        clock: What the clock shows of a step's seconds, given its number.
    """
    rng, run = random.Random(seed), Run()
    mode, steps_in_mode, step, before = policy.initial_mode, 0, 0, None
    results: deque[tuple[int, int]] = deque()
    controller = Controller(policy)
    relay = SampleRelay(ranks, list, controller.learn)
    for load in trace:
        chance, left_ms = probability(load.accept_length), load.seconds * 1e3
        goodput = {m: machine.goodput(m, load.requests, load.context_tokens, load.accept_length) for m in Mode}
        usual_ms = {m: machine.milliseconds(m, load.requests, load.context_tokens) for m in Mode}
        while left_ms > 0:
            relay.at_step(step, at_once=policy.attentive)
            decision = policy.decide(Observation(load.requests, mode, steps_in_mode, load.context_tokens))
            steps_in_mode = steps_in_mode + 1 if decision.mode is mode else 1
            mode = decision.mode
            ms = usual_ms[mode] * rng.lognormvariate(0, machine.noise)
            if before not in (None, mode):
                ms += machine.to_plain_ms if mode is Mode.PLAIN else machine.to_spec_ms
            elif mode is Mode.PLAIN and steps_in_mode % CATCH_UP_STEPS == 0:
                ms += machine.catch_up_ms
            left_ms -= ms
            run.decisions.append(decision)
            run.loads.append(load)
            run.tokens += load.accept_length if mode is Mode.SPEC else 1.0
            run.best_tokens += ms * max(goodput.values())
            # Results are processed one step late: the schedule overlaps.
            if results:
                relay.verified(*results.popleft())
            if mode is Mode.SPEC:
                if load.alike:
                    tokens = accepted_alike(rng, load.accept_length, load.requests)
                else:
                    tokens = accepted(rng, chance, load.requests)
                results.append((load.requests, tokens))
            if before is not None and rng.random() > load.prefill_share:
                seconds = clock(step, ms * 1e-3)
                relay.timed(StepTime(mode, load.requests, seconds, before, step, load.context_tokens))
            before = mode
            step += 1
    assert not controller.faults.counts
    return run

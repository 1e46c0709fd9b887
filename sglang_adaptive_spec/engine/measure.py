"""Step times measured at start-up, on the real worker and graphs."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from typing import Any

from sglang_adaptive_spec.costs import StepCosts
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.releases.base import IdleBatch, PlainRuntime, Release

CONTEXTS_TOKENS = (256, 3072)
"""A short and a long context: verifying may read the KV cache less well than a plain step does, so that the longer
contexts are, the less speculation pays. Each is the middle of its class."""
_MOST_STEPS = 5
_REPEATS = 2
_SECONDS_A_SAMPLE = 0.25
"""Slow steps are timed one at a time: they are long enough to read off a clock."""
_MOST_EAGER_REQUESTS = 64
"""Without graphs, larger batches are left to what serving shows."""


def measure(
    release: Release,
    worker: Any,
    runtime: PlainRuntime,
    costs: StepCosts,
    sizes: Sequence[int],
    budget_seconds: float,
) -> int:
    """Time both modes at each batch size while the budget lasts.

    Every rank runs the same steps: whether to go on, and what is kept, comes from rank 0.

    Args:
        release: The adapter of the installed SGLang.
        worker: SGLang's speculative worker, before the first request.
        runtime: What plain steps run on.
        costs: Takes the times.
        sizes: Batch sizes, the most telling ones first.
        budget_seconds: For timed steps alone; sizes that are not begun by then are left out. The first step of a size
            is not timed: it may have kernels to compile, which the first requests are spared then.

    Returns:
        How many sizes were measured.
    """
    from tqdm import tqdm

    spent, measured = 0.0, 0
    # As SGLang shows its graph capture.
    progress = tqdm(sizes, desc="Time decode steps", disable=release.rank(worker) != 0)
    for requests in progress:
        if release.from_rank_0(worker, spent > budget_seconds):
            break
        progress.set_postfix_str(f"bs={requests}", refresh=False)
        contexts: set[int] = set()
        for context_tokens in CONTEXTS_TOKENS:
            with release.idle_batch(worker, runtime, requests, context_tokens) as idle:
                # The pool may hold no longer contexts than were timed already.
                if idle is None or costs.context_class(idle.context_tokens) in contexts:
                    continue
                contexts.add(costs.context_class(idle.context_tokens))
                spent += _time(release, worker, idle, costs)
        measured += bool(contexts)
    progress.close()
    return measured


def _time(release: Release, worker: Any, idle: IdleBatch, costs: StepCosts) -> float:
    """Time both modes on one batch, and return the seconds spent."""
    first = release.from_rank_0(worker, {mode: idle.seconds_a_step(mode, 1) for mode in Mode})
    steps = {mode: max(1, min(_MOST_STEPS, int(_SECONDS_A_SAMPLE / first[mode]))) for mode in Mode}
    start = time.perf_counter()
    # In turns, so that whatever else the machine does meets both; and the least, since it only ever adds.
    taken = [{mode: idle.seconds_a_step(mode, steps[mode]) for mode in Mode} for _ in range(_REPEATS)]
    spent = time.perf_counter() - start
    for mode in Mode:
        seconds = release.from_rank_0(worker, min(sample[mode] for sample in taken))
        costs.seed(mode, idle.requests, idle.context_tokens, seconds)
    return spent


def spread(sizes: Sequence[int]) -> Iterator[int]:
    """Both ends, then the middle, then the middles of the halves, and so on: any beginning covers the whole range."""
    if not sizes:
        return
    yield sizes[-1]
    if len(sizes) == 1:
        return
    yield sizes[0]
    gaps = [(0, len(sizes) - 1)]
    while gaps:
        low, high = gaps.pop(0)
        middle = (low + high) // 2
        if middle in (low, high):
            continue
        yield sizes[middle]
        gaps += [(low, middle), (middle, high)]


def sizes_to_measure(spec: Sequence[int], plain: Sequence[int], most_requests: int) -> list[int]:
    """Batch sizes to time, the most telling ones first.

    Args:
        spec: Sizes with speculative graphs.
        plain: Sizes with plain graphs.
        most_requests: Requests that may run at once.
    """
    if spec and plain:
        # Unpadded in both modes; and the largest speculative size, where its range ends.
        return list(spread(sorted({*spec} & {*plain} | {max(spec)})))
    most = min(most_requests, _MOST_EAGER_REQUESTS)
    return [2**power for power in range(most.bit_length())]

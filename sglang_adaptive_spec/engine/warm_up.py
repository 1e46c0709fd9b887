"""What the first switches would have to wait for, run once at start-up."""

from __future__ import annotations

from typing import Any

from sglang_adaptive_spec.releases.base import PlainRuntime, Release

_SIZES = (1, 16, 128)
"""Which kernels a forward takes depends on its size. More requests would take memory that is not needed yet."""
_CONTEXT_TOKENS = 256


def warm_up(release: Release, worker: Any, runtime: PlainRuntime, tokens: int, most_requests: int) -> None:
    """Let the draft catch up with made-up requests, in a few batch sizes.

    A process loads a kernel when it first launches it, and no graph holds those of a catch-up. On an H200 the draft had
    taken 36 to 47 ms to follow once or twice, prompts included, and later took 3 to 12 ms each time (``since_start`` in
    bench/results/h200-*-ramp-lean.jsonl, -ramp-pinned.jsonl).

    Args:
        release: The adapter of the installed SGLang.
        worker: SGLang's speculative worker, before the first request.
        runtime: What plain steps run on; it keeps what the draft needs.
        tokens: Of a request that wait for the draft at most.
        most_requests: That may run at once.
    """
    for requests in sorted({min(size, most_requests) for size in _SIZES}):
        with release.idle_batch(worker, runtime, requests, max(_CONTEXT_TOKENS, tokens)) as idle:
            if idle is not None:
                idle.catch_up(tokens)

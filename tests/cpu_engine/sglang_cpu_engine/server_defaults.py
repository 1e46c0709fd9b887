"""Defaults of server arguments where SGLang's own make no sense on a CPU. What the user gives wins."""

import functools
import os
from collections.abc import Callable
from typing import Any

# SGLang would take most of the machine's memory: millions of KV slots, and the allocator copies its
# list of free slots at every step.
MAX_TOTAL_TOKENS = 32768


def before(resolve: Callable[[Any], None]) -> Callable[[Any], None]:
    """What resolves a server's arguments, with our defaults filled in first."""

    @functools.wraps(resolve)
    def wrapper(args: Any) -> None:
        # Arguments that were resolved in another process are read-only, and have the defaults already.
        if args.device in (None, "cpu") and not getattr(args, "_resolution_finished", False):
            # The speculative worker looks for a graph runner for the device, and there is none.
            args.disable_cuda_graph = True
            if args.max_total_tokens is None:
                args.max_total_tokens = MAX_TOTAL_TOKENS
            if args.tp_size > 1:
                # SGLang binds a rank to a NUMA node, of which there may be one; all ranks may use all cores.
                cores = ",".join(map(str, sorted(os.sched_getaffinity(0))))
                os.environ.setdefault("SGLANG_CPU_OMP_THREADS_BIND", "|".join([cores] * args.tp_size))
        resolve(args)

    return wrapper

"""What a server takes, and what it can say of itself, where others use the GPU at the same time."""

from __future__ import annotations

from typing import Any

from bench.modes import Served

MOST_SERVERS_AT_ONCE = 8

_FIRST_PORT, _PORTS_APART, _PORTS_TO_CHOOSE_FROM = 20_000, 1_500, 400
"""SGLang takes further ports up to 1000 above the one it is given; all stay below those that the system hands out."""

_LEAST_POOL_TOKENS = 8192
_SLACK_TOKENS = 64
"""KV slots of a request beyond its own tokens: SGLang reserves two verify steps ahead, and whole pages."""

_MEM_FRACTION = 0.99
"""``mem_fraction_static`` where servers share a GPU.

SGLang refuses to start unless 1 - this of the memory that was free before it loaded the weights is free afterwards,
and what other servers took meanwhile counts like weights of its own: at 0.8 a start can fail on a GPU with room for
all. Nor need anything be kept back for forwards and graphs, since ``max_total_tokens`` bounds the KV pool.
"""


def ports(number: int) -> range:
    """Ports of which a server can be given any one, whichever the others of its group have.

    Args:
        number: Of the server in its group, from 0.
    """
    first = _FIRST_PORT + _PORTS_APART * number
    return range(first, first + _PORTS_TO_CHOOSE_FROM)


def pool_tokens(requests: int, tokens: int) -> int:
    """KV slots that so many requests of so many tokens, prompt included, need at once."""
    return max(_LEAST_POOL_TOKENS, requests * (tokens + _SLACK_TOKENS))


def arguments(requests: int, tokens: int) -> dict[str, Any]:
    """SGLang's arguments for a server that takes no more than it needs: the rest is for others.

    Args:
        requests: That run at once.
        tokens: Of a request, prompt included.
    """
    return {
        # An idle scheduler would keep a core busy, next to the server that is measured.
        "sleep_on_idle": True,
        "max_total_tokens": pool_tokens(requests, tokens),
        "mem_fraction_static": _MEM_FRACTION,
    }


def memory_gb(served: Served, *, shares_gpu: bool) -> dict[str, Any] | None:
    """What a server says of its memory; None where it says nothing.

    Args:
        shares_gpu: Whether others use the GPU, too: what is read off its free memory says nothing of this server then.
    """
    memory: dict[str, Any] | None = served.state.get("memory_usage")
    if memory is None or not shares_gpu:
        return memory
    return {name: memory[name] for name in ("kvcache", "token_capacity")}

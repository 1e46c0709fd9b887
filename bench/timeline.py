"""What a file of torch's profiler says of host and GPU, in a few figures."""

from __future__ import annotations

import gzip
import json
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

Event = dict[str, Any]

_ON_GPU = ("kernel", "gpu_memcpy", "gpu_memset")
_MOST_KERNELS = 12
_MOST_OPERATIONS = 12
_PREFILL_LAUNCHES = 100
"""A prefill without graphs launches hundreds of kernels; what else there is between two graphs, some tens."""


def summarize(path: Path) -> dict[str, Any]:
    """The figures of one trace, in milliseconds of the time that it covers.

    ``wall_ms`` runs from the first to the last event of the thread that launches. Where there is no GPU, all that is
    of one is 0. ``operations_ms`` are the outermost operations of that thread. ``graph_to_graph_ms`` lies between the
    launches of two CUDA graphs, each time: ``short`` with some kernels launched singly between them, ``long`` with
    hundreds, such as those of a prefill.

    Args:
        path: As ``export_chrome_trace`` writes it, packed.

    Raises:
        ValueError: there is nothing in it.
    """
    with gzip.open(path, "rt") as file:
        events: list[Event] = [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]
    threads = Counter(event["tid"] for event in events if event.get("cat") == "cpu_op")
    if not threads:
        raise ValueError(f"no operation in {path.name}")
    busiest = threads.most_common(1)[0][0]
    host = [event for event in events if event["tid"] == busiest and event.get("cat") in ("cpu_op", "cuda_runtime")]
    calls = [event for event in events if event.get("cat") in ("cuda_runtime", "cuda_driver")]
    graphs = {event["args"]["correlation"] for event in calls if "GraphLaunch" in event["name"]}
    single = sum("LaunchKernel" in event["name"] for event in calls)
    device = [event for event in events if event.get("cat") in _ON_GPU]
    in_graphs = [event for event in device if event["args"].get("correlation") in graphs]
    alone = [event for event in device if event["args"].get("correlation") not in graphs]
    begin = min(event["ts"] for event in host)
    end = max(event["ts"] + event["dur"] for event in host)
    waits = [event for event in calls if event["tid"] == busiest and "Synchronize" in event["name"]]
    return {
        "wall_ms": _ms(end - begin),
        "gpu_busy_ms": _ms(_covered(device)),
        "gpu_in_graphs_ms": _ms(_covered(in_graphs)),
        "gpu_single_ms": _ms(_covered(alone)),
        "graph_launches": len(graphs),
        "single_launches": single,
        "host_wait_ms": _ms(_covered(waits)),
        "graph_to_graph_ms": _between_graphs(calls),
        "kernels_outside_graphs_ms": _largest(alone, _MOST_KERNELS),
        "operations_ms": _largest(_outermost(event for event in host if event["cat"] == "cpu_op"), _MOST_OPERATIONS),
    }


def _between_graphs(calls: Iterable[Event]) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {"short": [], "long": []}
    before, singles = None, 0
    for call in sorted(calls, key=lambda call: call["ts"]):
        if "GraphLaunch" in call["name"]:
            if before is not None:
                found["long" if singles >= _PREFILL_LAUNCHES else "short"].append(_ms(call["ts"] - before))
            before, singles = call["ts"], 0
        elif "LaunchKernel" in call["name"]:
            singles += 1
    return found


def _ms(microseconds: float) -> float:
    return round(microseconds / 1000, 3)


def _covered(events: Iterable[Event]) -> float:
    """Microseconds in which at least one of these was under way."""
    covered, until = 0.0, float("-inf")
    for event in sorted(events, key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        covered += max(0.0, end - max(event["ts"], until))
        until = max(until, end)
    return covered


def _outermost(events: Iterable[Event]) -> list[Event]:
    """Those that are in no other."""
    outermost: list[Event] = []
    until = float("-inf")
    for event in sorted(events, key=lambda event: (event["ts"], -event["dur"])):
        if event["ts"] >= until:
            outermost.append(event)
            until = event["ts"] + event["dur"]
    return outermost


def _largest(events: Iterable[Event], most: int) -> dict[str, float]:
    """What took longest, by name."""
    took: Counter[str] = Counter()
    for event in events:
        took[event["name"][:100]] += event["dur"]
    return {name: _ms(microseconds) for name, microseconds in took.most_common(most)}

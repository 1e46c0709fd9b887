"""What a server says, for the tests of the live view."""

from __future__ import annotations

from typing import Any

from sglang_adaptive_spec.top.sampler import Sample, read_sample

THRESHOLD = {"policy": "threshold", "disable_batch_threshold": 64, "resume_batch_threshold": 48}
SWITCH = {
    "step": 100,
    "from": "spec",
    "to": "plain",
    "reason": "more requests run than the threshold",
    "running_requests": 65,
    "at_seconds": 990.0,
    "first_step_seconds": 0.0123,
}


def block(**changed: Any) -> dict[str, Any]:
    """``adaptive_spec`` of /server_info."""
    return {
        "settings": THRESHOLD,
        "mode": "plain",
        "dry_run": False,
        "decided_mode": "plain",
        "dry_run_steps": {"spec": 0, "plain": 0},
        "steps": {"spec": 100, "plain": 300},
        "tokens": {"spec": 2400, "plain": 9000},
        "accepted_tokens": 2500,
        "verified_requests": 1000,
        "switches": 1,
        "last_switches": [SWITCH],
        "faults": 0,
        "spec_only": False,
        "catch_ups": 2,
        "catch_up_tokens": 48,
        "plain_memory_gib": 0.41,
        "plain_graph_sizes": [1, 2, 4],
        **changed,
    }


def sample(at: float, *, running: int = 65, exposition: str = "", **changed: Any) -> Sample:
    """A sample at a moment of the server's clock."""
    load = {"timestamp": at, "num_running_reqs": running, "num_waiting_reqs": 0}
    return read_sample(block(**changed), load, exposition, "0.5.14")


def steady(at: float, *, plain: bool, since: Sample | None = None) -> Sample:
    """A sample of a server at ten steps a second, all in one mode, of 40 requests; accept length 2.5."""
    before = since or sample(at - 1, steps={"spec": 0, "plain": 0}, tokens={"spec": 0, "plain": 0}, accepted_tokens=0,
                             verified_requests=0)  # fmt: skip
    steps, tokens, now = dict(before.steps), dict(before.tokens), round(10 * (at - before.at_seconds))
    verified, accepted = before.verified_requests, before.accepted_tokens
    if plain:
        steps["plain"] += now
        tokens["plain"] += 40 * now
    else:
        steps["spec"] += now
        tokens["spec"] += 100 * now
        verified += 40 * now
        accepted += 100 * now
    return sample(at, running=40, steps=steps, tokens=tokens, verified_requests=verified, accepted_tokens=accepted)

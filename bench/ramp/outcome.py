"""What a recording amounts to: a row a second, and the area under each curve."""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from statistics import fmean
from typing import Any

from bench.measure import percentile
from bench.ramp.client import Answer, Moment, Recording, Switch
from bench.ramp.trace import Phase, boundaries, parse_phases, rises_and_falls
from bench.results import Results, Row
from sglang_adaptive_spec.modes import Mode, Reason


def summary(recording: Recording, phases: Sequence[Phase]) -> Row:
    """A whole ramp in figures.

    ``window_tokens`` came before the last phase ended: a server that can't keep up has not answered all by then.
    ``switches_by_phase`` counts what follows the last phase with it. A probe that found the other mode no faster is no
    switch: the policy ``auto`` tries it for some steps, within a budget of its own.
    """
    answers, edges = recording.answers, boundaries(phases)
    window_s = edges[-1]
    lasting = without_probes(recording.switches)
    by_phase = Counter(phase_of(switch.at_s, edges) for switch in lasting)
    first, last = recording.moments[0], recording.moments[-1]
    plain, spec = last.plain_steps - first.plain_steps, last.spec_steps - first.spec_steps
    return {
        "window_s": round(window_s, 3),
        "drained_s": round(max(answer.end_s for answer in answers), 3),
        "requests": len(answers),
        "tokens": sum(len(answer.times_s) for answer in answers),
        "window_tokens": sum(bisect_right(answer.times_s, window_s) for answer in answers),
        "ttft_ms": _spread(answer.first_s for answer in answers),
        "itl_ms": _spread(interval for answer in answers for interval in answer.intervals_s),
        "latency_ms": _spread(answer.latency_s for answer in answers),
        "sent_late_ms": _spread(answer.late_s for answer in answers),
        "most_running": max(moment.running for moment in recording.moments),
        "most_waiting": max(moment.waiting for moment in recording.moments),
        "plain_step_share": round(plain / (plain + spec), 4) if plain + spec else None,
        "switches": len(lasting),
        "probes": (len(recording.switches) - len(lasting)) // 2,
        "switches_by_phase": [by_phase[number] for number in range(len(phases))],
    }


def without_probes(switches: Sequence[Switch]) -> list[Switch]:
    """The switches that lasted: a probe of no use goes there and back."""
    lasting: list[Switch] = []
    for switch in switches:
        if switch.reason == Reason.PROBE_OVER and lasting and lasting[-1].reason in (Reason.PROBE, Reason.NO_DATA):
            lasting.pop()
        else:
            lasting.append(switch)
    return lasting


def most_switches_a_change(results: Results, run: Row) -> int:
    """The most lasting switches that answer one change of the load, in the run that a measurement row sums up.

    One to plain answers the latest rise of the rate, one to spec the latest fall, or what the one before it answered
    where that came later. Requests stay for a while, so that a load is at its fullest, and calls for plain decode, when
    the rate has begun to fall: by phases, the switch there and the one back would be two for that fall.
    """
    settings = results.header["settings"]
    rises, falls = rises_and_falls(parse_phases(settings["phases"], settings["time_scale"], settings["rate_scale"]))
    labels = ("backend", "mode", "round", "pass")
    switches = [
        Switch(row["at_s"], row["before"], row["after"], row["reason"], row["running"])
        for row in results.of_kind("switch")
        if all(row.get(label) == run.get(label) for label in labels)
    ]
    answered: Counter[float] = Counter()
    change_s = 0.0
    for switch in without_probes(switches):
        changes = rises if switch.after == Mode.PLAIN.value else falls
        change_s = max([change_s, *(at_s for at_s in changes if at_s <= switch.at_s)])
        answered[change_s] += 1
    return max(answered.values(), default=0)


def seconds(recording: Recording, phases: Sequence[Phase]) -> Iterator[Row]:
    """The time series, a row for each second until the last answer is complete."""
    answers = recording.answers
    end = int(max(answer.end_s for answer in answers)) + 1
    arrived = Counter(int(answer.sent_s) for answer in answers)
    tokens = Counter(int(time_s) for answer in answers for time_s in answer.times_s)
    first: dict[int, list[float]] = {}
    gaps: dict[int, list[float]] = {}
    for answer in answers:
        first.setdefault(int(answer.times_s[0]), []).append(answer.first_s)
        for time_s, interval in zip(answer.times_s[-len(answer.intervals_s) :], answer.intervals_s, strict=False):
            gaps.setdefault(int(time_s), []).append(interval)
    for second in range(end):
        moment = _moment_at(recording.moments, second + 0.5)
        yield {
            "second": second,
            "offered_per_s": round(_rate(second + 0.5, phases), 3),
            "arrived": arrived[second],
            "tokens": tokens[second],
            "running": moment.running,
            "waiting": moment.waiting,
            "server_mode": moment.mode,
            "since_start": _counts(moment),
            "ttft_ms": _mean_ms(first.get(second)),
            "itl_ms": _mean_ms(gaps.get(second)),
        }


def _counts(moment: Moment) -> dict[str, float] | None:
    """What the plugin has done since the server started; None without it."""
    if moment.mode is None:
        return None
    names = ("plain_steps", "spec_steps", "catch_ups", "catch_up_s", "waited")
    return {name: round(getattr(moment, name), 4) for name in names}


def complaints(answers: Iterable[Answer]) -> list[str]:
    """What shows that requests were not answered as asked."""
    errors = Counter(answer.error.strip().splitlines()[-1].strip()[:200] for answer in answers if answer.error)
    return [f"{count} requests: {error}" for error, count in errors.most_common(3)]


def _spread(values_s: Iterable[float]) -> dict[str, float]:
    values = [1000 * value for value in values_s]
    if not values:
        return {}
    shown = {"mean": fmean(values), "p50": percentile(values, 50), "p99": percentile(values, 99)}
    return {name: round(value, 3) for name, value in shown.items()}


def _mean_ms(values_s: list[float] | None) -> float | None:
    return round(1000 * fmean(values_s), 3) if values_s else None


def phase_of(at_s: float, edges: Sequence[float]) -> int:
    """The phase that a moment belongs to, by :func:`boundaries`; those outside, to the first or the last."""
    return min(max(0, bisect_right(edges, at_s) - 1), len(edges) - 2)


def _rate(at_s: float, phases: Sequence[Phase]) -> float:
    edges = boundaries(phases)
    if at_s >= edges[-1]:
        return 0.0
    number = phase_of(at_s, edges)
    phase = phases[number]
    share: Any = (at_s - edges[number]) / phase.seconds
    return float(phase.first_rate + share * (phase.last_rate - phase.first_rate))


def _moment_at(moments: Sequence[Moment], at_s: float) -> Moment:
    return min(moments, key=lambda moment: abs(moment.at_s - at_s))

"""What happened: a table by phase, a plot over time, and the verdict."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.table import Table

from .load import Answer, Phase, TokenMeter, different, most_different
from .watch import PLAIN, SPEC, Sample, Switch, accept_length, bands, plain_share

_INK, _MUTED = "#333333", "#777777"
_SHADES = {SPEC: "#d5ecd4", PLAIN: "#fbe0c3"}
_LABELS = {SPEC: "speculative decode", PLAIN: "plain decode"}


@dataclass(frozen=True)
class Outcome:
    """All that one run left behind. `boundaries`: unix times of the start of each phase, and of the end."""

    trace: tuple[Phase, ...]
    boundaries: tuple[float, ...]
    samples: tuple[Sample, ...]
    switches: tuple[Switch, ...]
    answers: tuple[Answer, ...]
    meter: TokenMeter
    threshold: int
    resume: int
    on_gpu: bool = False


@dataclass(frozen=True)
class PhaseRow:
    """One phase in figures. Its requests are those sent in it; the last of them may finish in the next."""

    name: str
    at_once: int
    requests: int
    wrong: int
    plain_share: float | None
    tokens_per_second: float
    accept_length: float | None
    to_plain: int
    to_spec: int


def sample_at(samples: Sequence[Sample], moment: float) -> Sample:
    """The last sample up to a moment, or the first one there is."""
    return samples[max(0, bisect_right([sample.at for sample in samples], moment) - 1)]


def phase_rows(outcome: Outcome) -> list[PhaseRow]:
    rows = []
    for index, (phase, (begin, end)) in enumerate(zip(outcome.trace, pairwise(outcome.boundaries), strict=True)):
        before, after = sample_at(outcome.samples, begin), sample_at(outcome.samples, end)
        answers = [answer for answer in outcome.answers if answer.phase == index]
        switches = [switch for switch in outcome.switches if begin <= switch.at < end]
        rows.append(
            PhaseRow(
                name=phase.name,
                at_once=phase.requests,
                requests=len(answers),
                wrong=len(different(answers)),
                plain_share=plain_share(before, after),
                tokens_per_second=outcome.meter.rate(begin, end),
                accept_length=accept_length(before, after),
                to_plain=sum(switch.after == PLAIN for switch in switches),
                to_spec=sum(switch.after == SPEC for switch in switches),
            )
        )
    return rows


def table(outcome: Outcome) -> Table:
    """The rows for people."""
    shown = Table(title="What each phase of the load got", title_justify="left", box=SIMPLE_HEAD)
    shown.add_column("phase")
    for heading in (
        "at\nonce",
        "answers",
        "right",
        "plain\nsteps",
        "tokens/s",
        "accept\nlength",
        "to\nplain",
        "to\nspec",
    ):
        shown.add_column(heading, justify="right", no_wrap=True)
    for row in phase_rows(outcome):
        shown.add_row(
            row.name,
            str(row.at_once),
            str(row.requests),
            str(row.requests - row.wrong),
            "-" if row.plain_share is None else f"{row.plain_share:.0%}",
            f"{row.tokens_per_second:.0f}",
            "-" if row.accept_length is None else f"{row.accept_length:.2f}",
            str(row.to_plain),
            str(row.to_spec),
        )
    return shown


def complaints(outcome: Outcome) -> list[str]:
    """What keeps the demo from being a success, if anything does."""
    found = []
    seen = {(switch.before, switch.after) for switch in outcome.switches}
    if (SPEC, PLAIN) not in seen:
        busiest = max(sample.running for sample in outcome.samples)
        found.append(
            f"The server never switched from spec to plain: at most {busiest} requests ran at once, and "
            f"it switches above {outcome.threshold}."
        )
    elif (PLAIN, SPEC) not in seen:
        found.append(f"The server never came back from plain to spec: it does at {outcome.resume} requests or fewer.")
    if not outcome.answers:
        found.append("No request was answered.")
    wrong = different(outcome.answers)
    if len(wrong) > most_different(len(outcome.answers), outcome.on_gpu):
        first = wrong[0]
        found.append(
            f"{len(wrong)} of {len(outcome.answers)} answers differ from the server without speculation; the "
            f"first one is prompt {first.prompt}, from token {first.difference} on."
        )
    if outcome.samples[-1].faults:
        found.append(f"The plugin reports {outcome.samples[-1].faults} faults of its own.")
    return found


def plot(outcome: Outcome, path: Path, title: str) -> None:
    """Draw load, throughput and accept length over time, with the mode as shading."""
    from matplotlib import rc_context
    from matplotlib.figure import Figure
    from matplotlib.patches import Patch

    start, samples = outcome.boundaries[0], outcome.samples
    seconds = [sample.at - start for sample in samples]
    style: Any = {
        "font.size": 10,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.edgecolor": _MUTED,
        "text.color": _INK,
        "axes.labelcolor": _INK,
        "xtick.color": _MUTED,
        "ytick.color": _MUTED,
    }
    with rc_context(style):
        figure = Figure(figsize=(9.5, 7), layout="constrained")
        load, rate, accept = figure.subplots(3, 1, sharex=True, height_ratios=(1.2, 1, 1))
        last = max(seconds[-1], outcome.boundaries[-1] - start)
        for band in bands(outcome.switches, samples[0].mode, start, start + last):
            for axes in (load, rate, accept):
                axes.axvspan(band.begin - start, band.end - start, color=_SHADES[band.mode], linewidth=0)

        load.step(seconds, [sample.running for sample in samples], where="mid", color="#1f4e79")
        for level, text in (
            (outcome.threshold, f"plain above {outcome.threshold}"),
            (outcome.resume, f"spec again at {outcome.resume}"),
        ):
            load.axhline(level, color=_MUTED, linewidth=0.8, linestyle=(0, (4, 3)))
            offset = (-4, 2) if level == outcome.threshold else (-4, -10)
            load.annotate(text, (last, level), xytext=offset, textcoords="offset points", ha="right", fontsize=8)
        load.set_ylabel("running requests")

        middles = [(one + other) / 2 for one, other in pairwise(seconds)]
        rates = [outcome.meter.rate(one.at, other.at) for one, other in pairwise(samples)]
        rate.plot(middles, rates, color="#1f4e79")
        rate.set_ylabel("throughput\n(tokens/s)")

        _draw_accept(accept, middles, samples)
        accept.set_xlabel("time (s)")
        for axes in (load, rate, accept):
            axes.set_ylim(0, 1.08 * axes.get_ylim()[1])
        load.set_xlim(0, last)
        figure.suptitle(title, fontsize=12, x=0.01, ha="left")
        figure.legend(
            handles=[Patch(color=_SHADES[mode], label=_LABELS[mode]) for mode in (SPEC, PLAIN)],
            loc="outside upper right",
            ncols=2,
            frameon=False,
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path, dpi=150)


def _draw_accept(axes: Any, middles: Sequence[float], samples: Sequence[Sample]) -> None:
    nothing = float("nan")  # a gap in the line
    lengths = [accept_length(one, other) for one, other in pairwise(samples)]
    axes.plot(middles, [nothing if n is None else n for n in lengths], color="#1f4e79", marker=".", markersize=5)
    axes.set_ylabel("accept length\n(tokens per verify)")

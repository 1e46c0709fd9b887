"""A ramp's result file as a Markdown table and a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

from bench.ramp.outcome import most_switches_a_change
from bench.report import acceptance, in_turns, measured_on, model_of, save, when
from bench.results import Results, Row

_LATE_MS = 100.0

_COLOURS = {
    "base": "tab:blue",
    "spec": "tab:orange",
    "ours-threshold": "tab:green",
    "ours-auto": "tab:red",
}


def markdown(results: Results) -> str:
    """What was measured."""
    return "\n".join(_lines(results)) + "\n"


def _lines(results: Results) -> Iterator[str]:
    head = results.header
    settings = head["settings"]
    yield f"# Ramp, {head['started']}"
    yield ""
    yield f"{measured_on(results)}; {settings['attention_backend']}."
    yield (
        f"{model_of(results)}; {settings['input_tokens']} tokens in, {settings['output_tokens'] // 2} to "
        f"{settings['output_tokens']} out; {acceptance(results)}; threshold "
        f"{settings['threshold']}. Requests a second: {settings['phases']} (times x {settings['time_scale']:g}, rates "
        f"x {settings['rate_scale']:g}), seed {settings['seed']}."
    )
    yield from in_turns(results)
    yield ""
    yield f"    {head['command']}"
    yield ""
    yield (
        "Tokens served until the last phase ended; TTFT, inter-token and request latency as mean / p50 / p99 over all "
        "requests, until the last was answered. Medians of the runs; the most switches that answer one change of the "
        "load are the most of any run."
    )
    yield ""
    yield (
        "| mode | tokens served | TTFT, ms | inter-token, ms | latency, s | all answered after, s | plain steps "
        "| switches (most a change of the load) | probes | runs |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    modes = dict.fromkeys(row["mode"] for row in results.of_kind("measurement"))
    runs = {mode: [row for row in results.of_kind("measurement") if row["mode"] == mode] for mode in modes}
    for mode, rows in runs.items():
        most = max(most_switches_a_change(results, row) for row in rows)
        yield f"| {mode} | {' | '.join(_cells(rows, most))} | {len(rows)} |"
    late_ms = {mode: max(row["sent_late_ms"]["p99"] for row in rows) for mode, rows in runs.items()}
    told = ", ".join(f"{mode} {late:.0f}" for mode, late in late_ms.items())
    kept_up = max(late_ms.values(), default=0.0) < _LATE_MS
    yield ""
    verdict = (
        "It kept up." if kept_up else f"Where that is above {_LATE_MS:.0f} it did not keep up: doubt those latencies."
    )
    yield f"The client sent requests so many ms late (p99 of the worst run): {told}. {verdict}"
    errors = results.of_kind("error")
    if errors:
        yield ""
        yield "Not measured:"
        yield ""
        for row in errors:
            yield f"- {row['mode']}{when(row)}: {row['error']}"


def _cells(rows: list[Row], most_switches: int) -> Iterator[str]:
    """One mode's figures, of all its runs."""

    def middle(name: str) -> float:
        return float(median(row[name] for row in rows))

    def spread(name: str, divisor: float, digits: int) -> str:
        middles = (median(row[name][figure] for row in rows) for figure in ("mean", "p50", "p99"))
        return " / ".join(f"{value / divisor:.{digits}f}" for value in middles)

    yield f"{middle('window_tokens'):.0f}"
    yield spread("ttft_ms", 1, 0)
    yield spread("itl_ms", 1, 2)
    yield spread("latency_ms", 1000, 2)
    yield f"{middle('drained_s'):.1f}"
    plain = [row["plain_step_share"] for row in rows if row["plain_step_share"] is not None]
    yield f"{median(plain):.0%}" if plain else ""
    yield f"{middle('switches'):g} ({most_switches})"
    yield f"{middle('probes'):g}"


def plot(results: Results, path: Path) -> bool:
    """Draw the time series of every mode's first run; False without matplotlib or measurements."""
    modes = list(dict.fromkeys(row["mode"] for row in results.of_kind("measurement")))
    if not modes:
        return False
    try:
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        return False

    series = {mode: _of_first_run(results, "second", mode) for mode in modes}
    figure = Drawing(figsize=(10, 12))
    axes = figure.subplots(5, 1, sharex=True, height_ratios=(2, 3, 3, 3, 3))
    longest = max(series.values(), key=len)
    axes[0].fill_between(*_curve(longest, "offered_per_s"), step="mid", color="0.85")
    axes[0].set_ylabel("requests/s\noffered")
    for axis, column, label in zip(
        axes[1:],
        ("running", "tokens", "ttft_ms", "itl_ms"),
        ("running requests", "tokens/s", "TTFT, ms", "inter-token, ms"),
        strict=True,
    ):
        for mode in modes:
            axis.plot(*_curve(series[mode], column), label=mode, color=_COLOURS.get(mode), marker=".")
        axis.set_ylabel(label)
        axis.grid(alpha=0.3)
    axes[3].set_yscale("log")
    for mode in modes:
        for switch in _of_first_run(results, "switch", mode):
            style = "--" if switch["after"] == "plain" else ":"
            axes[1].axvline(switch["at_s"], color=_COLOURS.get(mode), linestyle=style, linewidth=1)
    axes[1].legend(title="vertical: to plain --, to spec ..", fontsize=8, title_fontsize=8)
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True


def _of_first_run(results: Results, kind: str, mode: str) -> list[Row]:
    return [r for r in results.of_kind(kind) if r["mode"] == mode and r["round"] == 0 and r.get("pass", 0) == 0]


def _curve(rows: list[Row], column: str) -> tuple[list[Any], list[Any]]:
    return [row["second"] + 0.5 for row in rows], [float("nan") if row[column] is None else row[column] for row in rows]


def write(path: Path) -> None:
    """Write and print the table, and draw the plot, beside a result file."""
    save(path, markdown, plot)

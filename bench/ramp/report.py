"""A ramp's result file as a Markdown table and a plot."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.report import acceptance, measured_on, save
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
    model = settings["model"] or f"{settings['model_shape']} shape with dummy weights"
    yield f"# Ramp, {head['started']}"
    yield ""
    yield f"{measured_on(results)}; {settings['attention_backend']}."
    yield (
        f"{model}; {settings['input_tokens']} tokens in, {settings['output_tokens'] // 2} to "
        f"{settings['output_tokens']} out; {acceptance(results)}; threshold "
        f"{settings['threshold']}. Requests a second: {settings['phases']} (times x {settings['time_scale']:g}, rates "
        f"x {settings['rate_scale']:g}), seed {settings['seed']}."
    )
    yield ""
    yield f"    {head['command']}"
    yield ""
    yield (
        "Tokens served until the last phase ended; TTFT, inter-token and request latency as mean / p50 / p99 over all "
        "requests, until the last was answered."
    )
    yield ""
    yield (
        "| mode | tokens served | TTFT, ms | inter-token, ms | latency, s | all answered after, s | plain steps "
        "| switches (most in a phase) | probes |"
    )
    yield "| --- | ---: | ---: | ---: | ---: | ---: | ---: | ---: | ---: |"
    for row in results.of_kind("measurement"):
        plain = row["plain_step_share"]
        yield (
            f"| {row['mode']} | {row['window_tokens']} | {_spread(row['ttft_ms'], 1, 0)} "
            f"| {_spread(row['itl_ms'], 1, 2)} | {_spread(row['latency_ms'], 1000, 2)} | {row['drained_s']:.1f} "
            f"| {'' if plain is None else f'{plain:.0%}'} | {row['switches']} ({row['most_switches_a_phase']}) "
            f"| {row['probes']} |"
        )
    late_ms = {row["mode"]: row["sent_late_ms"]["p99"] for row in results.of_kind("measurement")}
    told = ", ".join(f"{mode} {late:.0f}" for mode, late in late_ms.items())
    kept_up = max(late_ms.values(), default=0.0) < _LATE_MS
    yield ""
    verdict = (
        "It kept up." if kept_up else f"Where that is above {_LATE_MS:.0f} it did not keep up: doubt those latencies."
    )
    yield f"The client sent requests so many ms late (p99): {told}. {verdict}"
    errors = results.of_kind("error")
    if errors:
        yield ""
        yield "Not measured:"
        yield ""
        for row in errors:
            yield f"- {row['mode']}: {row['error']}"


def _spread(values: Row, divisor: float, digits: int) -> str:
    return " / ".join(f"{values[name] / divisor:.{digits}f}" for name in ("mean", "p50", "p99"))


def plot(results: Results, path: Path) -> bool:
    """Draw the time series of every mode's first round; False without matplotlib or measurements."""
    modes = list(dict.fromkeys(row["mode"] for row in results.of_kind("measurement")))
    if not modes:
        return False
    try:
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        return False

    series = {mode: [r for r in results.of_kind("second") if r["mode"] == mode and r["round"] == 0] for mode in modes}
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
        switches = [r for r in results.of_kind("switch") if r["mode"] == mode and r["round"] == 0]
        for switch in switches:
            style = "--" if switch["after"] == "plain" else ":"
            axes[1].axvline(switch["at_s"], color=_COLOURS.get(mode), linestyle=style, linewidth=1)
    axes[1].legend(title="vertical: to plain --, to spec ..", fontsize=8, title_fontsize=8)
    axes[-1].set_xlabel("seconds")
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    return True


def _curve(rows: list[Row], column: str) -> tuple[list[Any], list[Any]]:
    return [row["second"] + 0.5 for row in rows], [float("nan") if row[column] is None else row[column] for row in rows]


def write(path: Path) -> None:
    """Write and print the table, and draw the plot, beside a result file."""
    save(path, markdown, plot)

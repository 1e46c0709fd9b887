"""A result file as a Markdown table and a plot: ``python -m bench.report FILE...``"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from statistics import median
from typing import Any

from bench.order import groups
from bench.results import Figure, Results, Row, flat

RATIOS: tuple[tuple[str, str, bool], ...] = (
    # mode, reference, compared by decode step instead of by token
    ("ours-plain", "base", False),
    ("ours-threshold", "base", False),
    ("ours-spec", "spec", True),
    ("ours-plain", "upstream-zero", False),
    ("ours-threshold", "upstream-zero", False),
)
_ENVELOPE = ("base", "spec")


def markdown(results: Results) -> str:
    """What was measured, one table an attention backend."""
    lines = [*_heading(results)]
    for backend in results.backends():
        lines += ["", f"## Attention backend {backend}", "", *_table(results, backend)]
    errors = results.of_kind("error")
    if errors:
        lines += ["", "## Not measured", ""]
        for row in errors:
            where = " ".join(str(row[k]) for k in ("backend", "mode", "concurrency") if k in row)
            lines.append(f"- {where}{when(row)}: {row['error']}")
    return "\n".join(lines) + "\n"


def measured_on(results: Results) -> str:
    """Machine, packages and plugin of a result file, without a full stop."""
    machine = results.header["host"]
    packages = machine["packages"]
    return (
        f"{machine['gpu'] or machine['cpu']}; SGLang {packages['sglang']}, torch {packages['torch']}; "
        f"plugin at {machine['commit']} ({machine['plugin_digest']})"
    )


def model_of(results: Results) -> str:
    """What the servers ran: a model by name, or a shape."""
    settings = results.header["settings"]
    return settings.get("model") or f"{settings['model_shape']} shape with dummy weights"


def acceptance(results: Results) -> str:
    """Where the accept length of a result file comes from."""
    return f"accept length {results.header['settings']['simulate_accept_length'] or 'not simulated'}"


def in_turns(results: Results) -> Iterator[str]:
    """Which servers of a result file took turns, if any did."""
    settings = results.header["settings"]
    if (at_once := settings.get("servers_at_once", 1)) > 1:
        together = "; ".join(", ".join(group) for group in groups(settings["modes"], at_once))
        yield f"Measured in turns, one group of servers after the other: {together}."


def when(row: Row) -> str:
    """In which round and pass a row was measured, where that was not the first one."""
    return "".join(f", {name} {row[name] + 1}" for name in ("round", "pass") if row.get(name))


def _heading(results: Results) -> Iterator[str]:
    head = results.header
    settings = head["settings"]
    yield f"# Decode throughput, {head['started']}"
    yield ""
    yield f"{measured_on(results)}."
    yield (
        f"{model_of(results)}; {settings['input_tokens']} tokens in, "
        f"{settings['output_tokens']} out; {acceptance(results)}; prefix cache off; "
        f"{settings['repeats']} repeats"
        f"{f' in each of {passes} passes' if (passes := settings.get('passes', 1)) > 1 else ''}, "
        f"{settings['rounds']} round(s)"
        f"{f'; {ranks} tensor-parallel ranks' if (ranks := settings.get('tp_size', 1)) > 1 else ''}."
    )
    yield from in_turns(results)
    yield ""
    yield f"    {head['command']}"


def _table(results: Results, backend: str) -> Iterator[str]:
    concurrencies = results.concurrencies(backend)
    modes = [m for m in results.modes() if any(results.series(backend, m, c) for c in concurrencies)]
    ratios = [r for r in RATIOS if r[0] in modes and r[1] in modes]
    names = [f"{a} / {b}{' (by step)' if by_step else ''}" for a, b, by_step in ratios]
    compared = {"ours-auto", *_ENVELOPE} <= set(modes)
    if compared:
        names.append("ours-auto / better of base and spec")
    ratios_of: dict[int, list[Figure | None]] = {}
    for concurrency in concurrencies:
        row = [results.ratio(backend, mode, other, concurrency, by_step=by_step) for mode, other, by_step in ratios]
        if compared:
            row.append(results.ratio_to_better(backend, "ours-auto", _ENVELOPE, concurrency))
        ratios_of[concurrency] = row
    by_turn = any(each and each.counted == "turns" for row in ratios_of.values() for each in row)
    how = "ratios of medians in each turn, their median" if by_turn else "ratios of medians"
    yield f"Decode tokens/s, median of the repeats (spread: highest less lowest, in % of it); {how}."
    if compared:
        yield (
            "The last ratio is of the tokens that the steps give at the nominal accept length: simulated acceptance is "
            "drawn at random."
        )
    yield ""
    yield "| concurrency | " + " | ".join(modes + names) + " |"
    yield "| ---: |" + " ---: |" * (len(modes) + len(names))
    for concurrency in concurrencies:
        cells = [_figure(results, backend, mode, concurrency) for mode in modes]
        cells += ["" if each is None else f"{each.value:.3f}" for each in ratios_of[concurrency]]
        yield f"| {concurrency} | " + " | ".join(cells) + " |"
    overall = [results.overall(backend, mode, other, by_step=by_step) for mode, other, by_step in ratios]
    if len(concurrencies) > 1 and any(overall):
        cells = [""] * len(modes) + [str(each or "") for each in overall] + [""] * compared
        yield f"| all | {' | '.join(cells)} |"
        yield ""
        yield "All: the geometric mean over concurrencies and turns, with its standard error, were all independent."
    yield from _switches(results, backend)
    latencies = [row for row in results.measurements if row["backend"] == backend and "streamed" in row]
    if latencies:
        yield ""
        yield "| mode | concurrency | TTFT p50 / p99, ms | inter-token p50 / p99, ms |"
        yield "| --- | ---: | ---: | ---: |"
        for row in latencies:
            s = row["streamed"]
            yield (
                f"| {row['mode']} | {row['concurrency']} | {s['ttft_p50_ms']:.1f} / {s['ttft_p99_ms']:.1f} "
                f"| {s['itl_p50_ms']:.2f} / {s['itl_p99_ms']:.2f} |"
            )


_ALWAYS = {"spec": ("spec", "ours-spec"), "plain": ("base", "ours-plain")}
"""Modes of the bench whose every step is of a mode of the plugin."""


def _switches(results: Results, backend: str) -> Iterator[str]:
    """What the plugin's own clock says of the first step in a mode, against an ordinary one of that mode.

    Ordinary is the step of a server that knows no other mode. The plugin's median of late goes back to other batches
    where a mode is seldom used, so it serves only where the file has no such server.
    """
    lines = []
    repeats = defaultdict(list)
    for row in results.measurements:
        if row["backend"] == backend:
            repeats[row["mode"], row["concurrency"]] += row["repeats"]
    for (mode, concurrency), of_all_rows in repeats.items():
        times = [repeat.get("plugin_times") for repeat in of_all_rows]
        for to in ("spec", "plain"):
            first = [ms for each in times if each for ms in each["switch_ms"][to]]
            usual = [repeat["step_ms"] for always in _ALWAYS[to] for repeat in repeats.get((always, concurrency), ())]
            usual = usual or [each["step_ms"][to] for each in times if each and each["step_ms"][to] is not None]
            if first and usual:
                figures = f"{median(first):.1f} ({len(first)}) | {median(usual):.1f}"
                lines.append(f"| {mode} | {concurrency} | {to} | {figures} |")
    if lines:
        yield ""
        yield "Time from the last result in one mode to the first in the other, median (switches timed); both in ms."
        yield ""
        yield "| mode | concurrency | switch to | its first step | an ordinary step |"
        yield "| --- | ---: | --- | ---: | ---: |"
        yield from lines


def _figure(results: Results, backend: str, mode: str, concurrency: int) -> str:
    series = results.series(backend, mode, concurrency)
    if series is None:
        return ""
    values = flat(series.tokens_per_s)
    middle = median(values)
    return f"{middle:.0f} ({100 * (max(values) - min(values)) / middle:.1f})"


def plot(results: Results, path: Path) -> bool:
    """Draw throughput against concurrency; False where matplotlib is missing or nothing was measured."""
    backends = results.backends()
    if not backends:
        return False
    try:
        from matplotlib.figure import Figure as Drawing
    except ImportError:
        return False

    figure = Drawing(figsize=(1 + 5.5 * len(backends), 4.5))
    axes = figure.subplots(1, len(backends), squeeze=False)
    for axis, backend in zip(axes[0], backends, strict=True):
        _draw(axis, results, backend)
    settings = results.header["settings"]
    figure.suptitle(f"Decode throughput, {settings['model_shape']} shape, {_device(results)}")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    return True


_STYLES: dict[str, dict[str, Any]] = {
    "base": {"color": "tab:blue"},
    "spec": {"color": "tab:orange"},
    "ours-plain": {"color": "tab:green", "linestyle": "--"},
    "ours-spec": {"color": "tab:red", "linestyle": "--"},
    "ours-threshold": {"color": "tab:olive", "linestyle": "--"},
    "upstream-zero": {"color": "tab:purple", "linestyle": ":"},
    "upstream-adaptive": {"color": "tab:brown", "linestyle": ":"},
}


def _draw(axis: Any, results: Results, backend: str) -> None:
    concurrencies = results.concurrencies(backend)

    def curve(mode: str) -> dict[int, float]:
        found = ((c, results.series(backend, mode, c)) for c in concurrencies)
        return {c: median(flat(series.tokens_per_s)) for c, series in found if series}

    base, spec = curve("base"), curve("spec")
    both = sorted(base.keys() & spec.keys())
    if both:
        envelope = [max(base[c], spec[c]) for c in both]
        axis.plot(both, envelope, color="0.85", linewidth=8, label="the better of base and spec", zorder=0)
    for mode in results.modes():
        points = curve(mode)
        if points:
            axis.plot(list(points), list(points.values()), marker="o", label=mode, **_STYLES.get(mode, {}))
    axis.set_xscale("log", base=2)
    axis.set_xticks(concurrencies, [str(c) for c in concurrencies])
    axis.set_title(backend)
    axis.set_xlabel("concurrent requests")
    axis.set_ylabel("decode tokens/s")
    axis.set_ylim(bottom=0)
    axis.grid(alpha=0.3)
    axis.legend()


def _device(results: Results) -> str:
    machine = results.header["host"]
    return str(machine["gpu"].split(",")[0] if machine["gpu"] else "a CPU")


def write(path: Path) -> None:
    """Write and print the table, and draw the plot, beside a result file."""
    save(path, markdown, plot)


def save(
    path: Path, to_markdown: Callable[[Results], str], to_plot: Callable[[Results, Path], bool] | None = None
) -> None:
    """Write and print a result file's table, and draw its plot, beside it."""
    results = Results.read(path)
    table = to_markdown(results)
    path.with_suffix(".md").write_text(table)
    print(f"\n{table}", flush=True)
    if to_plot is not None and not to_plot(results, path.with_suffix(".png")):
        print(
            "No plot: matplotlib is missing, or nothing was measured. Later: python -m bench.report FILE",
            flush=True,
        )


def rewrite(path: Path) -> bool:
    """Write a result file's table and plot as the tool does that made it; False where that makes none."""
    tool = Results.read(path).header["tool"]
    writers = {"bench.sweep": "bench.report", "bench.ramp": "bench.ramp.report"}
    writers |= {tool: tool for tool in ("bench.serve", "bench.profile")}
    if tool not in writers:
        print(f"{path.name} is of {tool}, which has no table (those of {', '.join(writers)} have).")
        return False
    import_module(writers[tool]).write(path)
    return True


if __name__ == "__main__":
    written = [rewrite(Path(name)) for name in sys.argv[1:]]
    sys.exit(0 if all(written) else 1)

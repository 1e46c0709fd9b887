"""What the view shows, as rich renderables; no request is sent from here."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from rich.console import Console, ConsoleOptions, Group, RenderResult
from rich.table import Table
from rich.text import Text

from sglang_adaptive_spec.top.history import History, Rates
from sglang_adaptive_spec.top.sampler import Sample

COLOURS = {"spec": "green", "plain": "dark_orange"}
_BARS = "▁▂▃▄▅▆▇█"
_IDLE = "·"
_NARROW_COLUMNS = 60
_BESIDE_STRIP_COLUMNS = 32
"""Left and right of a strip: its name and its present value."""


@dataclass(frozen=True)
class Screen:
    """One frame.

    Attributes:
        history: At least one sample.
        url: The server, for the title.
        span_seconds: How far back the strips reach.
        interval_seconds: Time between two samples; no slot of a strip is shorter.
        silent_seconds: How long the server has not answered; 0 while it does.
    """

    history: History
    url: str
    span_seconds: float
    interval_seconds: float
    silent_seconds: float = 0.0

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        columns = max(8, options.max_width - _BESIDE_STRIP_COLUMNS)
        slot_seconds = max(self.interval_seconds, self.span_seconds / columns)
        slots = self.history.slots(min(columns, round(self.span_seconds / slot_seconds)), slot_seconds)
        yield Group(
            self._title(),
            self._why(),
            Text(),
            _strips(self.history, slots, len(slots) * slot_seconds),
            Text(),
            _counters(self.history.latest),
            Text(),
            _switches(self.history.latest, narrow=options.max_width < _NARROW_COLUMNS),
        )

    def _title(self) -> Text:
        latest = self.history.latest
        title = Text.assemble(("adaptive-spec", "bold"), f"  {self.url}  SGLang {latest.sglang_version}")
        if self.silent_seconds:
            title.append(f"  no answer for {self.silent_seconds:.0f} s", "bold red")
        dry = "dry run of: " if latest.dry_run else ""
        return title.append(f"\n{dry}{describe(latest.settings)}", "dim")

    def _why(self) -> Text:
        latest, last = self.history.latest, self.history.last_switch
        line = Text.assemble((f" {latest.mode.upper()} ", f"bold black on {COLOURS.get(latest.mode, 'white')}"), " ")
        if latest.dry_run:
            line.append(f"in a dry run; else {latest.decided_mode} ")
        if latest.disabled_by_faults:
            return line.append("until the next start: repeated faults of the plugin, see the log", "bold red")
        if last is None:
            return line.append("since the start: no switch yet")
        return line.append(
            f"for {duration(latest.at_seconds - last.at_seconds)}: {last.reason} "
            f"({last.running_requests} running, step {last.step})"
        )


def describe(settings: object) -> str:
    """The policy in a few words, from the plugin's settings."""
    values = settings if isinstance(settings, dict) else {}
    policy = values.get("policy")
    if policy == "threshold":
        above, at = values.get("disable_batch_threshold"), values.get("resume_batch_threshold")
        return f"plain above {above} running, spec again at {at}"
    return f"always {policy}" if policy in COLOURS else f"policy {policy}"


def duration(seconds: float) -> str:
    """Seconds as people say them."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole} s"
    big, small, names = (whole // 60, whole % 60, ("min", "s"))
    if whole >= 3600:
        big, small, names = (whole // 3600, whole % 3600 // 60, ("h", "min"))
    return f"{big} {names[0]}" + (f" {small} {names[1]}" if small else "")


def mode_strip(slots: Sequence[Rates | None]) -> Text:
    """A bar a slot, as high as the share of its steps that ran plain; readable without colours, too."""
    strip = Text(no_wrap=True)
    for slot in slots:
        if slot is None:
            strip.append(" ")
        elif slot.plain_share is None:
            strip.append(_IDLE, "dim")
        elif slot.plain_share in (0.0, 1.0):
            strip.append(_BARS[0 if slot.plain_share == 0.0 else -1], COLOURS["plain" if slot.plain_share else "spec"])
        else:
            strip.append(_bar(slot.plain_share, 1.0), f"{COLOURS['plain']} on {COLOURS['spec']}")
    return strip


def value_strip(values: Sequence[float | None]) -> Text:
    """A bar a value, from zero to the greatest; a gap where there is none."""
    greatest = max((value for value in values if value is not None), default=0.0)
    return Text("".join(" " if value is None else _bar(value, greatest) for value in values), no_wrap=True)


def _bar(value: float, greatest: float) -> str:
    top = len(_BARS) - 1
    return _BARS[min(top, round(top * max(value, 0.0) / greatest))] if greatest else _BARS[0]


def _strips(history: History, slots: Sequence[Rates | None], span_seconds: float) -> Table:
    latest, rates = history.latest, history.rates()

    def values(of: Callable[[Rates], float | None]) -> list[float | None]:
        return [None if slot is None else of(slot) for slot in slots]

    waiting = f" + {latest.waiting_requests} wait" if latest.waiting_requests else ""
    rows: list[tuple[str, str, Text]] = [
        ("plain wanted" if latest.dry_run else "plain steps", _share(rates), mode_strip(slots)),
        ("running", _number(latest.running_requests) + waiting, value_strip(values(lambda r: r.running_requests))),
        (
            "tokens/s",
            _number(rates.tokens_per_second if rates else None),
            value_strip(values(lambda r: r.tokens_per_second)),
        ),
        (
            "accept length",
            _number(rates.accept_length if rates else None, 2),
            value_strip(values(lambda r: r.accept_length)),
        ),
    ]
    if latest.inter_token_latency is not None:
        for name, of in _LATENCIES:
            milliseconds = [None if value is None else 1000 * value for value in values(of)]
            now = of(rates) if rates else None
            rows.append((name, _number(None if now is None else 1000 * now), value_strip(milliseconds)))
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(justify="right", min_width=8, no_wrap=True)
    table.add_column(no_wrap=True)
    for row in rows:
        table.add_row(*row)
    table.add_row(f"last {duration(span_seconds)}")
    return table


_LATENCIES: tuple[tuple[str, Callable[[Rates], float | None]], ...] = (
    ("TTFT, ms", lambda rates: rates.time_to_first_token_seconds),
    ("ITL, ms", lambda rates: rates.inter_token_latency_seconds),
)


def _share(rates: Rates | None) -> str:
    if rates is None:
        return "-"
    if rates.plain_share is None:
        return "idle"
    return f"{100 * rates.plain_share:.0f} %"


def _number(value: float | None, digits: int = 0) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _counters(latest: Sample) -> Table:
    graphs = f"{latest.plain_graph_count} sizes" if latest.plain_graph_count else "none"
    faults = Text(str(latest.faults), "bold red" if latest.faults else "")
    table = Table.grid(padding=(0, 2))
    table.add_column(style="dim")
    table.add_column(justify="right")
    table.add_column(justify="right")
    table.add_column(style="dim")
    table.add_column()
    table.add_row("", Text("spec", "dim"), Text("plain", "dim"), "  switches", str(latest.switch_count))
    table.add_row(
        "steps",
        str(latest.steps["spec"]),
        str(latest.steps["plain"]),
        "  catch-ups",
        f"{latest.catch_ups} ({latest.catch_up_tokens} tokens)",
    )
    table.add_row("tokens", str(latest.tokens["spec"]), str(latest.tokens["plain"]), "  faults", faults)
    table.add_row("", "", "", "  plain graphs", f"{graphs}, {latest.plain_memory_gib:.2f} GiB in all")
    return table


def _switches(latest: Sample, *, narrow: bool) -> Table:
    table = Table(box=None, pad_edge=False, header_style="dim")
    table.add_column("ago", justify="right", no_wrap=True)
    table.add_column("switch", no_wrap=True)
    table.add_column("running", justify="right")
    if not narrow:
        table.add_column("step", justify="right")
        table.add_column("which took", justify="right", no_wrap=True)
    table.add_column("why", overflow="fold")
    for switch in reversed(latest.switches):
        after = Text.assemble(f"{switch.before} → ", (switch.after, COLOURS.get(switch.after, "")))
        row: list[str | Text] = [duration(latest.at_seconds - switch.at_seconds), after, str(switch.running_requests)]
        if not narrow:
            took = switch.first_step_seconds
            row += [str(switch.step), "-" if took is None else f"{1000 * took:.1f} ms"]
        table.add_row(*row, switch.reason)
    return table

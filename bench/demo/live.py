"""The display while the load runs: a live panel on a terminal, else one line a second."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .watch import PLAIN, SPEC

COLOURS = {SPEC: "green", PLAIN: "dark_orange"}
_BARS = "▁▂▃▄▅▆▇█"
_LABELS_WIDTH = 32  # columns beside the sparklines


@dataclass(frozen=True)
class Moment:
    """What there is to show; rates and lengths are over the time since the moment before."""

    seconds: float
    phase: str
    mode: str
    running: int
    tokens_per_second: float
    accept_length: float | None  # None: no speculative step
    answers: int
    wrong: int
    switches: int


def sparkline(values: Sequence[float | None]) -> str:
    """Values as bars from zero to the greatest; a gap where there is none."""
    greatest = max((value for value in values if value is not None), default=0.0) or 1.0
    top = len(_BARS) - 1
    return "".join(" " if v is None else _BARS[min(top, round(top * max(v, 0.0) / greatest))] for v in values)


def line(moment: Moment) -> str:
    """One moment as plain text."""
    accept = "-" if moment.accept_length is None else f"{moment.accept_length:.2f}"
    return (
        f"{moment.seconds:5.0f} s  {moment.phase:<5}  mode {moment.mode:<5}  batch {moment.running:2d}  "
        f"{moment.tokens_per_second:6.0f} tokens/s  accept length {accept:>4}  "
        f"answers {moment.answers:3d} ({moment.wrong} wrong)  switches {moment.switches}"
    )


class Display(AbstractContextManager["Display"]):
    """Shows moments as they come."""

    def __init__(self, console: Console, title: str) -> None:
        self._console = console
        self._title = title
        self._moments: list[Moment] = []
        self._live: Live | None = None
        self._stack = ExitStack()
        self._next_line = 0.0

    def __enter__(self) -> Display:
        if self._console.is_terminal:
            self._live = self._stack.enter_context(Live(console=self._console, auto_refresh=False))
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.__exit__(kind, error, trace)

    def show(self, moment: Moment) -> None:
        self._moments.append(moment)
        if self._live is not None:
            self._live.update(self._panel(), refresh=True)
        elif moment.seconds >= self._next_line:
            # Moments come more often than once a second.
            self._next_line = max(self._next_line, float(int(moment.seconds))) + 1.0
            print(line(moment), flush=True)

    def _panel(self) -> RenderableType:
        now, recent = self._moments[-1], self._moments[-max(20, self._console.width - _LABELS_WIDTH) :]
        facts = Text.assemble(
            ("mode ", "dim"),
            (f" {now.mode.upper()} ", f"bold black on {COLOURS[now.mode]}"),
            ("   load ", "dim"),
            now.phase,
            ("   answers ", "dim"),
            f"{now.answers} ",
            (f"({now.wrong} wrong)", "bold red" if now.wrong else "dim"),
            ("   switches ", "dim"),
            str(now.switches),
            ("   time ", "dim"),
            f"{now.seconds:.0f} s",
        )
        rows = Table.grid(padding=(0, 2))
        rows.add_column(style="dim")
        rows.add_column(justify="right", min_width=5)
        rows.add_column(no_wrap=True)
        accept = "-" if now.accept_length is None else f"{now.accept_length:.2f}"
        rows.add_row("batch size", str(now.running), sparkline([m.running for m in recent]))
        rows.add_row("tokens/s", f"{now.tokens_per_second:.0f}", sparkline([m.tokens_per_second for m in recent]))
        rows.add_row("accept length", accept, sparkline([m.accept_length for m in recent]))
        rows.add_row("mode", "", Text.assemble(*(("█", COLOURS[m.mode]) for m in recent)))
        return Panel(Group(facts, Text(), rows), title=self._title, title_align="left", expand=False)

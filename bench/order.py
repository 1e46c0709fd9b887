"""Which server is measured when: groups that take turns, who starts together, and whose turn it is."""

from __future__ import annotations

import argparse
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar

from bench.budget import Budget
from bench.modes import MODES
from bench.sharing import MOST_SERVERS_AT_ONCE

T = TypeVar("T")
U = TypeVar("U")


def add_options(parser: argparse.ArgumentParser) -> None:
    """How often, and how many servers at once."""
    add = parser.add_argument
    add("--rounds", type=int, default=1, help="fresh servers a mode; the order rotates between rounds")
    add(
        "--servers-at-once", type=int, default=1, metavar="N", help="modes that share the GPU and are measured in turns"
    )
    add("--passes", type=int, default=1, help="all is measured so often, with the same servers")
    add(
        "--pin-schedulers",
        type=int,
        default=0,
        metavar="N",
        help="before servers are measured, their schedulers move to the N quickest cores of the moment",
    )


def check_options(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Refuse what can't be."""
    if min(args.passes, args.rounds) < 1:
        parser.error("passes and rounds start at 1")
    if args.pin_schedulers < 0:
        parser.error("schedulers can be pinned to 1 core or more, and to 0 are not pinned at all")
    if args.pin_schedulers and args.servers_at_once == 1:
        # Of servers in a group schedulers sleep while they have nothing to do.
        parser.error("a scheduler that waits alone keeps its core busy, which then looks slow: pin those of several")
    if not 1 <= args.servers_at_once <= MOST_SERVERS_AT_ONCE:
        parser.error(f"servers at once: 1 to {MOST_SERVERS_AT_ONCE}, for which there are ports")
    if not args.modes:
        parser.error("no mode to measure")
    if len(set(args.modes)) < len(args.modes):
        parser.error("servers are told apart by mode: name each once, and use --rounds for more of them")


def groups(modes: Sequence[str], at_once: int) -> list[list[str]]:
    """The modes whose servers take turns."""
    return [list(modes[first : first + at_once]) for first in range(0, len(modes), at_once)]


def plan(
    backends: Sequence[str], modes: Sequence[str], rounds: int, at_once: int
) -> Iterator[tuple[int, str, list[str]]]:
    """The groups of servers that take turns, as round, backend and modes.

    The same modes share a group in every round, so that the two sides of a ratio stay together. Each round begins one
    group later than the one before, and each group one mode later.
    """
    grouped = groups(modes, at_once)
    for number in range(rounds):
        for backend in backends:
            for group in _rotated(grouped, number):
                yield number, backend, _rotated(group, number)


def affordable(
    budget: Budget, planned: Iterable[tuple[int, str, list[str]]], skipped: Callable[[dict[str, Any], str], None]
) -> Iterator[list[dict[str, Any]]]:
    """The labels of each planned group that is expected to finish in time, once the one before it is over.

    Args:
        planned: As :func:`plan` gives it.
        skipped: Is told of every server of another group, by its labels, and why.
    """
    for number, backend, modes in planned:
        group = [{"backend": backend, "mode": mode, "round": number} for mode in modes]
        size = {"servers": len(group), "starts": len(starts(group))}
        if budget.allows(backend, **size):
            yield group
            continue
        together = f" for {len(group)} servers" if len(group) > 1 else ""
        left, needed = budget.left_s, budget.needed_s(backend, **size)
        for labels in group:
            skipped(labels, f"skipped, {left:.0f} s left, about {needed:.0f} s needed{together}")


def _rotated(items: list[T], by: int) -> list[T]:
    by %= len(items)
    return items[by:] + items[:by]


def starts(group: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """Which servers of a group, by their labels, start at once, one start after another.

    One that measures its own steps at start is alone and last: others that load would show in what it finds.
    """
    alone = [[labels] for labels in group if MODES[labels["mode"]].measures_at_start]
    together = [labels for labels in group if not MODES[labels["mode"]].measures_at_start]
    return [together, *alone] if together else alone


def turns(passes: int, points: Iterable[U], servers: Sequence[T]) -> Iterator[tuple[int, U, T]]:
    """Who is measured when, as pass, point and server.

    Each point begins one server later than the one before. So does each pass: were it to go on where the last one
    ended, three servers would come in the same order in every pass over three points.

    Args:
        points: At which each server is measured in each pass, such as concurrencies.
    """
    for pass_number in range(passes):
        order = deque(servers)
        order.rotate(-pass_number)
        for point in points:
            for server in order:
                yield pass_number, point, server
            order.rotate(-1)

"""What is served and what is refused, as the tests say it: writes docs/support.md.

    python -m tests.support

A test that proves features carries ``@pytest.mark.supports(area, feature, ..., since=..., note=...)``. What is refused
is read from the refusals themselves.
"""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from sglang_adaptive_spec.releases.refusals_0_5_14 import REFUSED, Unserved

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "support.md"
AREAS = (
    "Allocation and cache",
    "Steps and scheduling",
    "Sampling",
    "Structured output",
    "Ends of a request",
    "Models and drafts",
    "Parallelism",
    "Faults",
    "Control",
)
REFUSED_SINCE = "0.1.0"
_HEAD = """# What is served, and what is refused

For each feature: what becomes of it on a server that changes modes under way, since which release of the plugin, and
the tests that show it. This is SGLang 0.5.14 on the CPU engine, which runs SGLang's own scheduler, worker and server;
[other releases](releases.md) refuse more. "Served" means: as on a server without speculation, token for token.

Written by `python -m tests.support` from the marks of the tests and from the refusals; a unit test holds it to them.
"""


@dataclass
class Feature:
    """A feature that is served: since when, with what reservation, and the tests that show it."""

    area: str
    name: str
    since: str
    note: str
    tests: list[str] = field(default_factory=list)


def features(root: Path = ROOT) -> list[Feature]:
    """Every feature that a test marks as served, in the order of :data:`AREAS`, then by name.

    Raises:
        ValueError: a mark is not made of plain words, names no known area, or two contradict each other.
    """
    found: dict[tuple[str, str], Feature] = {}
    for path in sorted((root / "tests").rglob("test_*.py")):
        test = path.relative_to(root).as_posix()
        for mark in _marks(path):
            where = f"{test}:{mark.lineno}"
            for feature in _features(mark, where):
                known = found.setdefault((feature.area, feature.name), feature)
                if (known.since, known.note) != (feature.since, feature.note):
                    raise ValueError(f"{where}: {feature.name!r} is marked elsewhere with another release or note")
                if test not in known.tests:
                    known.tests.append(test)
    return sorted(found.values(), key=lambda feature: (AREAS.index(feature.area), feature.name.strip("`-").lower()))


def _marks(path: Path) -> Iterator[ast.Call]:
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "pytest.mark.supports":
            yield node


def _features(mark: ast.Call, where: str) -> list[Feature]:
    try:
        area, *names = (ast.literal_eval(argument) for argument in mark.args)
        more = {keyword.arg: ast.literal_eval(keyword.value) for keyword in mark.keywords}
        since, note = more.pop("since"), more.pop("note", "")
    except (ValueError, KeyError) as error:
        raise ValueError(f"{where}: supports(area, feature, ..., since=..., note=...), in plain words") from error
    if more or not names or area not in AREAS:
        raise ValueError(f"{where}: {area!r} is no area, no feature is named, or {more} are no words of the mark")
    return [Feature(area, name, since, note) for name in names]


def page(served: list[Feature], refused: tuple[Unserved, ...]) -> str:
    """The page, as Markdown."""
    by_area: dict[str, list[Feature]] = defaultdict(list)
    for feature in served:
        by_area[feature.area].append(feature)
    parts = [_HEAD]
    for area, some in by_area.items():
        rows = [f"| {_named(one)} | served | {one.since} | {_links(one.tests)} |" for one in some]
        parts.append(_section(area, "shown by", rows))
    rows = [f"| {_code(one.flag)} | refused | {REFUSED_SINCE} | {one.why} |" for one in refused]
    return "\n".join([*parts, _section("Refused at start", "why", rows)])


def _section(title: str, last: str, rows: list[str]) -> str:
    return "\n".join([f"## {title}\n", f"| feature | | since | {last} |", "| --- | --- | --- | --- |", *rows, ""])


def _named(feature: Feature) -> str:
    return f"{feature.name} ({feature.note})" if feature.note else feature.name


def _links(tests: list[str]) -> str:
    return ", ".join(f"[{Path(test).stem.removeprefix('test_')}](../{test})" for test in tests)


def _code(flag: str) -> str:
    """With the flag or variable that it begins with in code, if it does."""
    first, _, rest = flag.partition(" ")
    return f"`{first}` {rest}".strip() if first.startswith("-") or first.isupper() else flag


if __name__ == "__main__":
    PAGE.write_text(page(features(), REFUSED))

"""The Grafana dashboard: its schema, its queries, and that every metric in them exists."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from docs import grafana_dashboard
from tests.promql import vectors

ROOT = Path(__file__).parents[2]
DASHBOARD: dict[str, Any] = json.loads(grafana_dashboard.PATH.read_text())
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]
# Of Prometheus' scrape, and of every scheduler metric of SGLang's.
COMMON_LABELS = {"instance", "tp_rank", "pp_rank"}


def documented() -> dict[str, set[str]]:
    """The metrics of metrics.md, with the labels that the table gives them."""
    rows = re.findall(r"^\| `(sglang:\w+)` \| \w+ \| (.*?) \|", (ROOT / "docs/metrics.md").read_text(), re.M)
    return {name: set(re.findall(r"`(\w+)`", labels)) for name, labels in rows}


def of_sglang() -> set[str]:
    """The series that SGLang exports, read in its source; importing it would take seconds."""
    spec = importlib.util.find_spec("sglang")
    assert spec
    assert spec.submodule_search_locations
    [root] = spec.submodule_search_locations
    source = (Path(root) / "srt/observability/metrics_collector.py").read_text()
    series = set()
    for kind, name in re.findall(r"(Counter|Gauge|Histogram|Summary)\(\s*name=\"(sglang:\w+)\"", source):
        series |= {f"{name}{end}" for end in ("_bucket", "_sum", "_count")} if kind == "Histogram" else {name}
    return series


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """What is in the one and not, or not so, in the other, which may have defaults beside."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from lost(value, after.get(name), f"{path}.{name}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for index, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from lost(one, other, f"{path}[{index}]")
    elif before != after:
        yield f"{path}: {before!r}, read as {after!r}"


def test_the_json_is_what_the_script_makes() -> None:
    assert grafana_dashboard.PATH.read_text() == grafana_dashboard.build(), "run: python docs/grafana_dashboard.py"


def test_grafanas_schema_knows_every_field() -> None:
    register_default_plugins()
    read = json.loads(json.dumps(Dashboard.from_json(DASHBOARD), cls=JSONEncoder))
    assert list(lost(DASHBOARD, read)) == []


def test_panels_have_places_and_numbers_of_their_own() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert not cells & taken, panel["title"]
        assert place["x"] + place["w"] <= 24
        taken |= cells
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])


@pytest.mark.parametrize("query", QUERIES)
def test_a_query_asks_for_metrics_and_labels_that_exist(query: str) -> None:
    ours, theirs = documented(), of_sglang()
    assert len(theirs) > 50
    for name, labels in vectors(query):
        own_labels = ours.get(name, {"le"})
        assert name in ours.keys() | theirs, name
        assert labels <= COMMON_LABELS | own_labels | {"le"}, f"{name}: {labels}"


def test_every_metric_of_ours_that_says_what_happened_is_shown() -> None:
    shown = {name for query in QUERIES for name, _ in vectors(query)}
    derived = {"sglang:adaptive_spec_accept_length", "sglang:adaptive_spec_policy"}  # the last minutes', the thresholds
    derived |= {"sglang:adaptive_spec_catch_ups_total"}  # their tokens and their time
    derived |= {"sglang:adaptive_spec_dry_run"}  # a mode that stays spec, with switches
    assert set(documented()) - shown == derived

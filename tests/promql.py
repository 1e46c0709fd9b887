"""The metrics that a query asks for."""

from __future__ import annotations

import re

import promql_parser


def vectors(query: str) -> list[tuple[str, set[str]]]:
    """Each metric in a Grafana query, with the labels by which it is selected or grouped.

    Raises:
        ValueError: it is no PromQL.
    """
    plain = query.replace("$__rate_interval", "1m")
    promql_parser.parse(plain)
    groups = {label for group in re.findall(r"by \(([^)]*)\)", plain) for label in group.split(", ")}
    selectors = re.findall(r"(sglang:\w+)\{([^}]*)\}", plain)
    assert len(selectors) == plain.count("sglang:"), f"a metric of all servers in {query}"
    return [(name, groups | set(re.findall(r"(\w+)=", labels))) for name, labels in selectors]

"""Writes ``grafana-dashboard.json``, a dashboard of Grafana 11 or newer over the metrics of ``metrics.md``.

    python docs/grafana_dashboard.py

Change the dashboard here, not in the JSON: a test holds the two together.
"""

from __future__ import annotations

import json
from pathlib import Path

from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, statetimeline, timeseries
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.models import common as options
from grafana_foundation_sdk.models.dashboard import (
    DashboardCursorSync,
    DataSourceRef,
    DynamicConfigValue,
    FieldColorModeId,
    ThresholdsMode,
    ValueMap,
    ValueMappingResult,
    VariableRefresh,
)
from grafana_foundation_sdk.models.dashboard import Threshold as ColourStep

PATH = Path(__file__).with_name("grafana-dashboard.json")

SPEC, PLAIN, BAD = "green", "orange", "red"
_SOURCE = DataSourceRef(type_val="prometheus", uid="${datasource}")
_WHERE = 'instance=~"$instance"'
# One rank of a server speaks for all; metrics of SGLang's HTTP process have no rank.
_RANK = f'{_WHERE}, tp_rank=~"0|", pp_rank=~"0|"'
_OURS = "sglang:adaptive_spec"
_WIDE, _HALF, _THIRD = 24, 12, 8


def _query(expression: str, legend: str) -> prometheus.Dataquery:
    return prometheus.Dataquery().datasource(_SOURCE).expr(expression).legend_format(legend)


def _rate(metric: str, *by: str, where: str = _RANK) -> str:
    return f"sum by ({', '.join(('instance', *by))}) (rate({metric}{{{where}}}[$__rate_interval]))"


def _gauge(metric: str, *by: str, more: str = "") -> str:
    return f"max by ({', '.join(('instance', *by))}) ({metric}{{{_RANK}{more}}})"


def _quantile(share: float, histogram: str) -> str:
    rates = f"rate({histogram}_bucket{{{_WHERE}}}[$__rate_interval])"
    return f"histogram_quantile({share}, sum by (instance, le) ({rates}))"


def _lines(
    title: str, unit: str, *queries: prometheus.Dataquery, width: int = _HALF, about: str = ""
) -> timeseries.Panel:
    panel = (
        timeseries.Panel()
        .title(title)
        .description(about)
        .unit(unit)
        .min(0)
        .height(7)
        .span(width)
        .datasource(_SOURCE)
        .fill_opacity(10)
        .tooltip(common.VizTooltipOptions().mode(options.TooltipDisplayMode.MULTI))
    )
    for query in queries:
        panel.with_target(query)
    return panel


def _by_mode(panel: timeseries.Panel) -> timeseries.Panel:
    """Stacked, each mode in its colour."""
    panel.stacking(common.StackingConfig().mode(options.StackingMode.NORMAL)).fill_opacity(60)
    return _coloured(panel)


def _coloured(panel: timeseries.Panel) -> timeseries.Panel:
    for mode, colour in (("spec", SPEC), ("plain", PLAIN)):
        fixed = DynamicConfigValue("color", {"mode": FieldColorModeId.FIXED, "fixedColor": colour})
        panel.override_by_regexp(f"/\\b{mode}$/", [fixed])
    return panel


def _number(title: str, unit: str, query: prometheus.Dataquery, bad_from: float | None = None) -> stat.Panel:
    panel = stat.Panel().title(title).unit(unit).height(4).span(4).datasource(_SOURCE).with_target(query.instant())
    steps = [ColourStep(value=None, color="text")]
    if bad_from is not None:
        steps.append(ColourStep(value=bad_from, color=BAD))
    return panel.thresholds(dashboard.ThresholdsConfig().mode(ThresholdsMode.ABSOLUTE).steps(steps))


def _mode_names() -> list[ValueMap]:
    return [
        ValueMap(
            {
                "0": ValueMappingResult(text="spec", color=SPEC, index=0),
                "1": ValueMappingResult(text="plain", color=PLAIN, index=1),
            }
        )
    ]


def _mode_panels() -> list[object]:
    is_plain = _query(_gauge(f"{_OURS}_mode", more=', mode="plain"'), "{{instance}}")
    by_reason = _lines(
        "Switches by reason",
        "short",
        _query(
            f"sum by (instance, to_mode, reason) (increase({_OURS}_switches_total{{{_RANK}}}[$__rate_interval]))",
            "{{instance}} {{reason}}: to {{to_mode}}",
        ),
        about="How many in each interval.",
    )
    return [
        statetimeline.Panel()
        .title("Mode")
        .description("The mode of the last decode step at each scrape.")
        .height(5)
        .span(16)
        .datasource(_SOURCE)
        .mappings(_mode_names())
        .show_value(options.VisibilityMode.NEVER)
        .with_target(is_plain),
        _number(
            "Plain share of the steps",
            "percentunit",
            _query(
                f'sum(rate({_OURS}_steps_total{{{_RANK}, mode="plain"}}[$__rate_interval]))'
                f" / sum(rate({_OURS}_steps_total{{{_RANK}}}[$__rate_interval]))",
                "",
            ),
        ).height(5),
        _number("Off after faults", "short", _query(f"sum({_OURS}_disabled_by_faults{{{_RANK}}})", ""), bad_from=1)
        .description("Servers that speculate as SGLang would alone, after repeated faults of the plugin.")
        .height(5),
        _by_mode(_lines("Decode steps", "ops", _query(_rate(f"{_OURS}_steps_total", "mode"), "{{instance}} {{mode}}"))),
        _by_mode(
            _lines("Decoded tokens", "ops", _query(_rate(f"{_OURS}_tokens_total", "mode"), "{{instance}} {{mode}}"))
        ),
        by_reason.draw_style(options.GraphDrawStyle.BARS)
        .fill_opacity(80)
        .stacking(common.StackingConfig().mode(options.StackingMode.NORMAL)),
        _by_mode(
            _lines(
                "Time by mode",
                "percentunit",
                _query(_rate(f"{_OURS}_mode_seconds_total", "mode"), "{{instance}} {{mode}}"),
                about="Idle time counts for the mode that was current.",
            ).max(1)
        ),
        _lines(
            "Accept length",
            "short",
            _query(
                f"{_rate(f'{_OURS}_accepted_tokens_total')} / {_rate(f'{_OURS}_verified_requests_total')}",
                "{{instance}} speculative steps",
            ),
            _query(_gauge("sglang:spec_accept_length"), "{{instance}} SGLang's own, last log interval"),
            width=_THIRD,
            about="Tokens a request and speculative step, the bonus token included. Plain steps don't count.",
        ),
        _coloured(
            _lines(
                "Step time",
                "s",
                _query(_gauge(f"{_OURS}_step_seconds", "mode"), "{{instance}} {{mode}}"),
                width=_THIRD,
                about="Median of the last 64 steps of each mode. A spec step gives accept length tokens a request.",
            )
        ),
        _lines(
            "Running requests and thresholds",
            "short",
            _query(_gauge("sglang:num_running_reqs"), "{{instance}} running"),
            _query(_gauge(f"{_OURS}_disable_batch_threshold"), "{{instance}} plain above"),
            _query(_gauge(f"{_OURS}_resume_batch_threshold"), "{{instance}} spec again at"),
            width=_THIRD,
        ),
    ]


def _cost_panels() -> list[object]:
    return [
        _lines(
            "Catch-up tokens",
            "ops",
            _query(_rate(f"{_OURS}_catch_up_tokens_total"), "{{instance}}"),
            width=6,
            about="Tokens of plain steps that the draft saw afterwards.",
        ),
        _lines(
            "Time in catch-ups",
            "percentunit",
            _query(_rate(f"{_OURS}_catch_up_seconds_total"), "{{instance}}"),
            width=6,
            about="Share of the time, on the device.",
        ),
        _lines(
            "Faults",
            "short",
            _query(
                f"sum by (instance, kind) (increase({_OURS}_faults_total{{{_RANK}}}[$__rate_interval]))",
                "{{instance}} {{kind}}",
            ),
            width=6,
            about="Faults of the plugin. No request is lost to one; see troubleshooting.md.",
        ).draw_style(options.GraphDrawStyle.BARS),
        _lines(
            "Memory for plain steps",
            "bytes",
            _query(_gauge(f"{_OURS}_plain_memory_bytes"), "{{instance}}"),
            width=6,
            about="Plain graphs, their attention backend, and what waits for the draft.",
        ),
    ]


def _sglang_panels() -> list[object]:
    return [
        _lines(
            "Throughput",
            "ops",
            _query(_gauge("sglang:gen_throughput"), "{{instance}} generated"),
            _query(_rate("sglang:prompt_tokens_total", where=_WHERE), "{{instance}} prompt"),
            width=_THIRD,
        ),
        _lines(
            "Requests",
            "short",
            _query(_gauge("sglang:num_running_reqs"), "{{instance}} running"),
            _query(_gauge("sglang:num_queue_reqs"), "{{instance}} waiting"),
            width=_THIRD,
        ),
        _lines("KV pool in use", "percentunit", _query(_gauge("sglang:token_usage"), "{{instance}}"), width=_THIRD).max(
            1
        ),
        *(
            _lines(
                title,
                "s",
                _query(_quantile(0.5, histogram), "{{instance}} p50"),
                _query(_quantile(0.99, histogram), "{{instance}} p99"),
            )
            for title, histogram in (
                ("Time to first token", "sglang:time_to_first_token_seconds"),
                ("Inter-token latency", "sglang:inter_token_latency_seconds"),
            )
        ),
    ]


def build() -> str:
    """The dashboard as JSON."""
    made = (
        dashboard.Dashboard("SGLang adaptive speculation")
        .uid("sglang-adaptive-spec")
        .description("sglang-adaptive-spec: which mode decode steps run in, why, and what it does to the service.")
        .tags(["sglang"])
        .refresh("10s")
        .time("now-30m", "now")
        .tooltip(DashboardCursorSync.CROSSHAIR)
        .with_variable(dashboard.DatasourceVariable("datasource").label("Prometheus").type("prometheus"))
        .with_variable(
            dashboard.QueryVariable("instance")
            .label("Server")
            .datasource(_SOURCE)
            .query(f"label_values({_OURS}_mode, instance)")
            .refresh(VariableRefresh.ON_TIME_RANGE_CHANGED)
            .multi(True)
            .include_all(True)
            .all_value(".*")
        )
    )
    for title, panels in (
        ("Modes", _mode_panels()),
        ("What switching costs", _cost_panels()),
        ("Service", _sglang_panels()),
    ):
        made.with_row(dashboard.Row(title))
        for panel in panels:
            made.with_panel(panel)
    built = made.build()
    for variable in built.templating.list_val or []:
        # Of intervals only, but the SDK writes their defaults for every kind of variable.
        variable.auto = variable.auto_min = variable.auto_count = None
    for number, panel in enumerate(built.panels or [], start=1):
        panel.id_val = number
    return json.dumps(built, cls=JSONEncoder, indent=2) + "\n"


if __name__ == "__main__":
    PATH.write_text(build())

"""Keep SGLang's decode log alive through an interval without a verify step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch


def _report(plugin: Plugin, original: Callable[..., Any], reporter: Any, args: Any, kwargs: Any) -> Any:
    if plugin.engine is None or reporter.spec_num_forward_ct > 0:
        return original(*args, **kwargs)
    with plugin.release.without_spec_report(reporter):
        return original(*args, **kwargs)


PATCHES = (
    Patch(
        target="sglang.srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter.report_decode_stats",
        wrapper=_report,
        why="It divides by the verify steps since the last line, of which there may be none.",
        upstream="none",
        remove_when="The division is guarded upstream.",
    ),
)

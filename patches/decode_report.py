"""The plugin's metrics and the mode on the decode log line, and SGLang's own report kept true."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from sglang_adaptive_spec.activate import Plugin
from sglang_adaptive_spec.patching import Patch
from sglang_adaptive_spec.telemetry import ModeOnDecodeLine

_MODULE = "sglang.srt.managers.scheduler_components.metrics_reporter"
_MIXIN = "sglang.srt.observability.scheduler_metrics_mixin:SchedulerMetricsMixin"
"""To 0.5.12 the scheduler itself is the reporter, and its metrics exist before the worker does."""
_DECODE_LINE = "Decode batch"


def _begin(plugin: Plugin, original: Callable[..., Any], reporter: Any, args: Any, kwargs: Any) -> Any:
    begun = original(*args, **kwargs)
    if plugin.engine is not None:
        plugin.engine.publish_with(reporter)
        if plugin.engine.runtime is not None:
            # SGLang's line is one message, finished; a filter is what logging offers to add to one.
            module = type(reporter).report_decode_stats.__module__
            logging.getLogger(module).addFilter(ModeOnDecodeLine(_DECODE_LINE, plugin.engine.controller.steps))
    return begun


def _report(plugin: Plugin, original: Callable[..., Any], reporter: Any, args: Any, kwargs: Any) -> Any:
    if plugin.engine is None or reporter.spec_num_forward_ct > 0:
        return original(*args, **kwargs)
    with plugin.release.without_spec_report(reporter):
        return original(*args, **kwargs)


def _report_idle(plugin: Plugin, original: Callable[..., Any], reporter: Any, args: Any, kwargs: Any) -> Any:
    del reporter
    if plugin.engine is not None and plugin.engine.telemetry is not None:
        plugin.engine.telemetry.idle()
    return original(*args, **kwargs)


PATCHES = (
    Patch(
        target=f"{_MODULE}:SchedulerMetricsReporter.__post_init__",
        other_targets=("sglang.srt.managers.scheduler:Scheduler.init_overlap",),
        wrapper=_begin,
        why="From here on SGLang's own metrics and their labels exist, and the plugin's join them.",
        upstream="none",
        remove_when="SGLang lets a plugin add metrics, and fields to the decode log line.",
        for_plain=False,
    ),
    Patch(
        target=f"{_MODULE}:SchedulerMetricsReporter.report_decode_stats",
        other_targets=(f"{_MIXIN}.report_decode_stats",),
        wrapper=_report,
        why="It divides by the verify steps since the last line, of which there may be none.",
        upstream="none",
        remove_when="The division is guarded upstream.",
    ),
    Patch(
        target=f"{_MODULE}:SchedulerMetricsReporter._maybe_log_idle_metrics",
        other_targets=(
            "sglang.srt.managers.scheduler_runtime_checker_mixin:SchedulerRuntimeCheckerMixin._maybe_log_idle_metrics",
        ),
        wrapper=_report_idle,
        why="Metrics are published once a second while steps run; when there are no more, the last ones are due.",
        upstream="none",
        remove_when="SGLang lets a plugin add metrics.",
        for_plain=False,
    ),
)

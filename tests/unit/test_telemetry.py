"""What the plugin publishes, and when; the decode log line's mode."""

import logging
import math
from collections import Counter
from functools import partial
from pathlib import Path

import prometheus_client
import pytest

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.controller import Controller
from sglang_adaptive_spec.faults import Fault
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.policies import make_policy
from sglang_adaptive_spec.telemetry import METRICS, PREFIX, PUBLISH_SECONDS, ModeOnDecodeLine, Telemetry

LABELS = {"model_name": "tiny", "tp_rank": 0}
SETTINGS = Settings(disable_batch_threshold=4, min_dwell_steps=1)


class Published:
    """An engine's state, what publishes it, and a scrape of that."""

    def __init__(self, settings=SETTINGS):
        self.at = 100.0
        self.settings = settings
        self.controller = Controller(make_policy(settings))
        self.catch_ups = 0
        self.errors = []
        self.snapshots = 0
        self.registry = prometheus_client.CollectorRegistry()
        self.telemetry = Telemetry(
            self.snapshot,
            LABELS,
            partial(prometheus_client.Counter, registry=self.registry),
            partial(prometheus_client.Gauge, registry=self.registry),
            self.errors.append,
            now_seconds=lambda: self.at,
        )

    def snapshot(self):
        self.snapshots += 1
        return {
            "policy": self.settings.policy,
            "settings": self.settings.effective(),
            **self.controller.snapshot(),
            "step_seconds": {"spec": 0.02, "plain": None},
            "plain_memory_gib": 0.5,
            "catch_ups": self.catch_ups,
            "catch_up_tokens": 60,
            "catch_up_seconds": 0.25,
        }

    def step(self, mode=Mode.SPEC, running=1):
        self.controller.decide(running, lambda: True)
        self.controller.note_step(mode)
        self.controller.note_result(mode, running, 2 * running, running)
        self.telemetry.tick()

    def value(self, name, **labels):
        labels = LABELS | labels
        return self.registry.get_sample_value(PREFIX + name, {k: str(v) for k, v in labels.items()})


def test_the_values_are_those_of_the_snapshot():
    server = Published()
    for running in (1, 9, 9, 1):
        server.step(Mode.PLAIN if running == 9 else Mode.SPEC, running)
    server.controller.fault(Fault.CATCH_UP, "told")
    server.telemetry.publish()
    assert server.value("steps_total", mode="spec") == 2
    assert server.value("steps_total", mode="plain") == 2
    assert server.value("tokens_total", mode="plain") == 18
    assert server.value("switches_total", to_mode="plain", reason="load_rose") == 1
    assert server.value("switches_total", to_mode="spec", reason="load_fell") == 1
    assert server.value("mode", mode="spec") == 1
    assert server.value("mode", mode="plain") == 0
    assert server.value("policy", policy="threshold") == 1
    assert server.value("policy", policy="plain") == 0
    assert server.value("disable_batch_threshold") == 4
    assert server.value("accept_length") == 2
    assert server.value("accepted_tokens_total") == 4
    assert server.value("verified_requests_total") == 2
    assert server.value("catch_up_seconds_total") == 0.25
    assert server.value("faults_total", kind="catch_up") == 1
    assert server.value("disabled_by_faults") == 0
    assert server.value("plain_memory_bytes") == 2**29
    assert server.value("step_seconds", mode="spec") == 0.02
    assert math.isnan(server.value("step_seconds", mode="plain"))


def test_every_metric_has_a_value_from_the_start_or_a_label_that_is_yet_to_come():
    server = Published(Settings(policy="plain"))
    server.telemetry.publish()
    empty = {family.name for family in server.registry.collect() if not family.samples}
    assert empty == {PREFIX + name for name in ("switches", "faults")}
    assert math.isnan(server.value("disable_batch_threshold"))
    assert math.isnan(server.value("accept_length"))


def test_steps_are_published_once_a_second():
    server = Published()
    server.step()
    server.step()
    assert server.value("steps_total", mode="spec") == 1
    server.at += PUBLISH_SECONDS
    server.step()
    assert server.value("steps_total", mode="spec") == 3
    assert server.snapshots == 2


def test_a_server_that_falls_idle_publishes_its_last_steps_at_once():
    server = Published()
    server.step()
    server.step()
    for _ in range(5):
        server.telemetry.idle()
    assert server.value("steps_total", mode="spec") == 2
    assert server.snapshots == 2


def test_an_idle_server_goes_on_publishing_the_time():
    server = Published()
    server.telemetry.idle()
    before = server.value("mode_seconds_total", mode="spec")
    server.at += PUBLISH_SECONDS
    server.telemetry.idle()
    assert server.value("mode_seconds_total", mode="spec") > before


def test_what_can_not_be_published_is_said_and_not_tried_again():
    server = Published()
    server.controller.snapshot = lambda: 1 // 0
    server.step()
    server.at += PUBLISH_SECONDS
    server.step()
    server.telemetry.idle()
    server.telemetry.publish()
    assert [type(error) for error in server.errors] == [ZeroDivisionError]
    assert server.snapshots == 1


def test_every_metric_is_documented_as_it_is():
    page = (Path(__file__).parents[2] / "docs" / "metrics.md").read_text()
    rows = [[cell.strip() for cell in line.strip("|\n").split("|")] for line in page.splitlines() if PREFIX in line]
    documented = [
        (name.strip("`"), kind, tuple(filter(None, (label.strip("` ") for label in labels.split(",")))), text)
        for name, kind, labels, _, text in (row for row in rows if len(row) == 5)
    ]
    assert documented == [(metric.name, metric.kind, metric.labels, metric.help) for metric in METRICS]


# --- the decode log line ---------------------------------------------------------------------------------


@pytest.fixture
def line(caplog):
    """Logs SGLang's line after some steps, and says what became of it."""
    steps = Counter()
    logger = logging.getLogger("test.decode_line")
    mode = ModeOnDecodeLine("Decode batch", steps)
    logger.addFilter(mode)

    def log(message="Decode batch, #running-req: 3, #queue-req: 0", **ran):
        for name, count in ran.items():
            steps[Mode(name)] += count
        with caplog.at_level(logging.INFO, logger.name):
            logger.info(message)
        return caplog.records[-1].getMessage()

    yield log
    logger.removeFilter(mode)


@pytest.mark.parametrize(
    ("ran", "mode"),
    [
        ({"spec": 40}, "spec"),
        ({"plain": 40}, "plain"),
        ({"spec": 12, "plain": 28}, "mixed 12 spec/28 plain"),
    ],
)
def test_the_line_ends_with_the_mode(line, ran, mode):
    assert line(**ran) == f"Decode batch, #running-req: 3, #queue-req: 0, mode: {mode}"


def test_the_mode_is_of_the_steps_since_the_line_before(line):
    line(spec=40)
    assert line(plain=40).endswith("mode: plain")


def test_other_lines_stay_as_they_are(line):
    line(spec=4)
    assert line("Prefill batch, #new-seq: 1", plain=4) == "Prefill batch, #new-seq: 1"
    assert line().endswith("mode: plain")

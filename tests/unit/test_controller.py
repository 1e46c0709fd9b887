import json
import logging

import pytest

from sglang_adaptive_spec.clock import StepTimes
from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.controller import Controller
from sglang_adaptive_spec.faults import MOST_FAULTS, WINDOW_STEPS, Fault
from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies import FixedPolicy, ThresholdPolicy, make_policy

LOGGER = "sglang_adaptive_spec"


def fits() -> int:
    return 1


def fits_not() -> int:
    return 0


class FailingPolicy(ThresholdPolicy):
    """Decides as a threshold policy does, until more than ten requests run."""

    def decide(self, seen):
        if seen.running_requests > 10:
            raise ZeroDivisionError("more than ten")
        return super().decide(seen)


def drive(controller: Controller, loads, spec_steps_that_fit=fits) -> str:
    return "".join(controller.decide(running, spec_steps_that_fit).mode.value[0] for running in loads)


# --- counters --------------------------------------------------------------------------------------------


def test_steps_are_counted_by_mode():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    for mode in drive(controller, [1, 1, 9, 9, 9, 1]):
        assert sum(controller.steps.values()) < controller.decided_steps, "counted before its result was there"
        controller.note_step(Mode.SPEC if mode == "s" else Mode.PLAIN)
    assert controller.decided_steps == 6
    assert controller.steps == {Mode.SPEC: 3, Mode.PLAIN: 3}
    assert controller.mode is Mode.SPEC


def test_each_mode_has_the_time_it_was_the_current_one(monkeypatch):
    now = 100.0
    monkeypatch.setattr("sglang_adaptive_spec.controller.time.monotonic", lambda: now)
    controller = Controller(ThresholdPolicy(4, 3, 1))
    drive(controller, [1])
    now += 5
    drive(controller, [9])
    now += 2
    assert controller.mode_seconds() == {Mode.SPEC: 5, Mode.PLAIN: 2}
    drive(controller, [1])
    now += 1
    assert controller.mode_seconds() == {Mode.SPEC: 6, Mode.PLAIN: 2}
    assert controller.snapshot()["mode_seconds"] == {"spec": 6, "plain": 2}


def test_the_policy_hears_how_long_the_mode_has_lasted():
    controller = Controller(ThresholdPolicy(4, 3, 3))
    assert drive(controller, [9, 9, 9, 9, 1, 1, 1, 1]) == "sssppp" + "ss"


def test_only_verify_steps_make_the_accept_length():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    assert controller.snapshot()["accept_length"] is None
    controller.note_result(Mode.SPEC, requests=2, tokens=5, emitted_tokens=5)
    controller.note_result(Mode.PLAIN, requests=8, tokens=8, emitted_tokens=7)
    controller.note_result(Mode.SPEC, requests=2, tokens=3, emitted_tokens=1)
    assert controller.tokens == {Mode.SPEC: 6, Mode.PLAIN: 7}
    assert controller.verified_requests == 4
    assert controller.snapshot()["accept_length"] == 2.0


# --- switches --------------------------------------------------------------------------------------------


def test_a_switch_is_logged_once_with_from_to_reason_and_batch_size(caplog):
    controller = Controller(ThresholdPolicy(4, 3, 1))
    with caplog.at_level(logging.INFO, LOGGER):
        drive(controller, [2, 7, 7])
    assert [record.getMessage() for record in caplog.records] == [
        "adaptive-spec: spec -> plain (more requests run than the threshold), #running-req: 7, step 1"
    ]


def test_a_server_that_never_switches_logs_nothing(caplog):
    with caplog.at_level(logging.INFO, LOGGER):
        drive(Controller(FixedPolicy(Mode.PLAIN)), [1, 90, 1])
    assert not caplog.records


def test_switches_are_counted_by_reason_and_the_last_ten_are_kept():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    drive(controller, [1] + [9, 1] * 8)
    assert controller.switch_counts == {(Mode.PLAIN, Reason.LOAD_ROSE): 8, (Mode.SPEC, Reason.LOAD_FELL): 8}
    assert [switch.step for switch in controller.switches] == list(range(7, 17))
    assert controller.snapshot()["switches"] == 16


def test_a_new_policy_takes_over_from_the_current_mode():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    drive(controller, [1, 9])
    controller.policy = FixedPolicy(Mode.SPEC)
    assert drive(controller, [9, 9]) == "ss"
    assert controller.switch_counts[Mode.SPEC, Reason.FIXED] == 1


# --- KV pressure -----------------------------------------------------------------------------------------


def test_a_batch_that_can_not_speculate_for_want_of_slots_runs_plain():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    assert controller.decide(2, fits_not) == Decision(Mode.PLAIN, Reason.KV_PRESSURE)
    assert controller.switch_counts == {(Mode.PLAIN, Reason.KV_PRESSURE): 1}


def test_it_speculates_again_some_steps_after_slots_are_free():
    controller = Controller(ThresholdPolicy(4, 1, 1))
    controller.decide(2, fits_not)
    assert drive(controller, [2] * 20, fits) == "p" * 15 + "s" * 5


def test_a_shortage_of_slots_does_not_change_what_the_policy_wants():
    """Two requests are too many to resume at, and few enough to go on with."""
    controller = Controller(ThresholdPolicy(4, 1, 1))
    drive(controller, [2] * 40, fits_not)
    assert drive(controller, [2] * 20, fits)[-1] == "s"


def test_slots_are_not_asked_for_where_they_do_not_matter():
    def unexpected() -> int:
        raise AssertionError("an estimate walks all requests")

    assert drive(Controller(FixedPolicy(Mode.PLAIN)), [1, 2], unexpected) == "pp"
    assert drive(Controller(FixedPolicy(Mode.SPEC)), [1, 2], unexpected) == "ss"


@pytest.mark.parametrize(
    ("steps_that_fit", "asked_at"), [(1, list(range(40))), (3, list(range(0, 40, 3))), (99, [0, 32])]
)
def test_slots_are_asked_for_again_once_they_may_have_run_short_and_now_and_then(steps_that_fit, asked_at):
    controller = Controller(ThresholdPolicy(4, 3, 1))
    asked: list[int] = []

    def fit() -> int:
        asked.append(controller.decided_steps)
        return steps_that_fit

    assert drive(controller, [2] * 40, fit) == "s" * 40
    assert asked == asked_at
    controller.note_prefill()
    drive(controller, [2], fit)
    assert asked[-1] == 40


@pytest.mark.parametrize(
    ("settings", "can_drop"),
    [(Settings(policy="spec"), False), (Settings(policy="plain"), True), (Settings(disable_batch_threshold=4), True)],
)
def test_dropping_to_plain_needs_a_policy_that_built_it(settings, can_drop):
    assert Controller(make_policy(settings)).can_drop_to_plain is can_drop


# --- faults ----------------------------------------------------------------------------------------------


def test_a_failing_policy_costs_its_step_the_mode_and_no_more():
    controller = Controller(FailingPolicy(4, 3, 1))
    assert drive(controller, [9, 9, 11, 9, 9]) == "spspp"
    assert controller.switch_counts[Mode.SPEC, Reason.FAULT] == 1
    assert controller.faults.counts == {Fault.POLICY: 1}
    assert not controller.spec_only


def test_a_policy_that_keeps_failing_means_speculation_for_good():
    controller = Controller(FailingPolicy(4, 3, 1))
    assert drive(controller, [9] + [11, 9] * MOST_FAULTS + [9] * 4) == "s" + "sp" * (MOST_FAULTS - 1) + "s" * 6
    assert controller.spec_only
    assert controller.decide(9, fits) == Decision(Mode.SPEC, Reason.FAULT)


def test_a_kind_of_fault_is_said_once_with_its_error_and_so_is_the_end_of_switching(caplog):
    controller = Controller(FailingPolicy(4, 3, 1))
    with caplog.at_level(logging.ERROR, LOGGER):
        drive(controller, [11] * 5)
    assert controller.faults.counts == {Fault.POLICY: MOST_FAULTS}
    first, last = caplog.records
    assert "the policy failed" in first.getMessage()
    assert first.exc_info[0] is ZeroDivisionError
    assert f"{MOST_FAULTS} faults within {WINDOW_STEPS} decode steps" in last.getMessage()
    assert "as it would alone" in last.getMessage()


def test_each_kind_of_fault_is_said(caplog):
    controller = Controller(ThresholdPolicy(4, 3, 1))
    with caplog.at_level(logging.ERROR, LOGGER):
        for kind in (Fault.PLAIN_STEP, Fault.CATCH_UP, Fault.PLAIN_STEP, Fault.CATCH_UP):
            controller.fault(kind, f"a {kind.value} failed")
    said = [record.getMessage() for record in caplog.records]
    assert [any(kind in line for line in said) for kind in ("a plain_step failed", "a catch_up failed")] == [True] * 2
    assert len(said) == 3


@pytest.mark.parametrize(("gap_steps", "ends"), [(WINDOW_STEPS // 2 - 1, True), (WINDOW_STEPS // 2, False)])
def test_faults_far_apart_do_not_end_switching(gap_steps, ends):
    controller = Controller(ThresholdPolicy(4, 3, 1))
    for _ in range(MOST_FAULTS):
        controller.fault(Fault.PLAIN_STEP, "a plain step failed")
        drive(controller, [1] * gap_steps)
    assert controller.spec_only is ends
    # The window moves on: it is the last ones that count.
    controller.fault(Fault.PLAIN_STEP, "a plain step failed")
    controller.fault(Fault.PLAIN_STEP, "a plain step failed")
    assert controller.spec_only


def test_metrics_that_fail_end_no_switching():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    for _ in range(2 * MOST_FAULTS):
        controller.fault(Fault.TELEMETRY, "no metrics")
    assert not controller.spec_only


def test_after_repeated_faults_no_shortage_of_slots_leads_to_plain():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    for _ in range(MOST_FAULTS):
        controller.fault(Fault.PLAIN_STEP, "a plain step failed")
    assert not controller.can_drop_to_plain
    assert drive(controller, [9, 9], fits_not) == "ss"


# --- snapshot --------------------------------------------------------------------------------------------


def test_a_snapshot_is_plain_json():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    drive(controller, [1, 9, 1])
    for mode in (Mode.SPEC, Mode.PLAIN, Mode.SPEC):
        controller.note_step(mode)
    controller.note_result(Mode.SPEC, requests=2, tokens=5, emitted_tokens=4)
    controller.fault(Fault.CATCH_UP, "told")
    snapshot = json.loads(json.dumps(controller.snapshot()))
    assert snapshot.pop("mode_seconds").keys() == {"spec", "plain"}
    last = snapshot.pop("last_switches")
    assert snapshot == {
        "mode": "spec",
        "dry_run": False,
        "decided_mode": "spec",
        "steps": {"spec": 2, "plain": 1},
        "dry_run_steps": {"spec": 0, "plain": 0},
        "tokens": {"spec": 4, "plain": 0},
        "accepted_tokens": 5,
        "verified_requests": 2,
        "accept_length": 2.5,
        "switches": 2,
        "switches_by_reason": {
            "few enough requests run to resume": 1,
            "more requests run than the threshold": 1,
        },
        "switch_counts": [
            {"to": "plain", "reason": "more requests run than the threshold", "count": 1},
            {"to": "spec", "reason": "few enough requests run to resume", "count": 1},
        ],
        "faults": 1,
        "faults_by_kind": {"catch_up": 1},
        "spec_only": False,
        "explain": {},
    }
    assert [(s["step"], s["from"], s["to"], s["running_requests"]) for s in last] == [
        (1, "spec", "plain", 9),
        (2, "plain", "spec", 1),
    ]


# --- what the policy hears -------------------------------------------------------------------------------


class Listener(ThresholdPolicy):
    """Writes down what it hears; hears of more than ten requests with a fault."""

    heard: list = []

    def note_verify(self, requests, *tokens):
        self.heard.append(("verify", requests, *tokens))
        if requests > 10:
            raise ZeroDivisionError("more than ten")

    def note_step(self, mode, requests, context_tokens, *seconds):
        self.heard.append(("step", mode, requests, context_tokens, *seconds))

    def note_switch(self, mode, requests, context_tokens, seconds):
        self.heard.append(("switch", mode, requests, context_tokens, seconds))

    def explain(self):
        raise ZeroDivisionError("nothing to say")


@pytest.fixture
def listening():
    Listener.heard.clear()
    return Controller(Listener(4, 3, 1))


def test_the_policy_hears_of_verify_results(listening):
    listening.learn([], [(2, [5, 4])])
    assert Listener.heard == [("verify", 2, 5, 4)]


def test_the_policy_hears_of_steps_and_of_switches(listening):
    steps = StepTimes(Mode.PLAIN, Mode.PLAIN, 7, 900, [0.5, 0.25])
    switches = StepTimes(Mode.SPEC, Mode.PLAIN, 7, 900, [0.75, 1.0])
    listening.learn([steps, switches], [])
    assert Listener.heard == [
        ("step", Mode.PLAIN, 7, 900, 0.5, 0.25),
        ("switch", Mode.SPEC, 7, 900, 0.75),
        ("switch", Mode.SPEC, 7, 900, 1.0),
    ]


def test_a_policy_that_fails_to_listen_is_a_fault_like_any_other(listening):
    listening.learn([], [(11, [20])])
    listening.learn([], [(2, [5])])
    assert listening.faults.counts == {Fault.POLICY: 1}
    assert not listening.spec_only
    assert Listener.heard == [("verify", 11, 20), ("verify", 2, 5)]


def test_a_policy_that_can_not_explain_itself_fails_nobody(listening):
    assert "nothing to say" in listening.snapshot()["explain"]["error"]


def test_step_times_that_can_not_be_measured_are_said_and_end_no_switching(listening, caplog):
    for _ in range(MOST_FAULTS):
        listening.fault(Fault.MEASUREMENT, "something went wrong", RuntimeError("because"))
    assert not listening.spec_only
    assert "adaptive-spec: something went wrong. Please report this." in caplog.text


# --- dry run ---------------------------------------------------------------------------------------------


def test_a_dry_run_runs_every_step_as_sglang_would(caplog):
    controller = Controller(ThresholdPolicy(4, 3, 1), dry_run=True)
    with caplog.at_level(logging.INFO, LOGGER):
        assert drive(controller, [1, 9, 9, 1], fits_not) == "ssss"
    assert controller.dry_run_steps == {Mode.SPEC: 2, Mode.PLAIN: 2}
    assert caplog.messages[0].startswith("adaptive-spec (dry run): spec -> plain (")
    assert not controller.can_drop_to_plain
    assert controller.snapshot()["mode"] == "spec"


def test_the_time_of_a_dry_run_is_spent_speculating(monkeypatch):
    now = 100.0
    monkeypatch.setattr("sglang_adaptive_spec.controller.time.monotonic", lambda: now)
    controller = Controller(ThresholdPolicy(4, 3, 1), dry_run=True)
    drive(controller, [1, 9])
    now += 5
    controller.set_dry_run(False)
    now += 2
    assert controller.mode_seconds() == {Mode.SPEC: 5, Mode.PLAIN: 2}

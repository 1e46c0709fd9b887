import json
import logging

import pytest

from sglang_adaptive_spec.clock import StepTime
from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.controller import Controller
from sglang_adaptive_spec.modes import Decision, Mode, Reason
from sglang_adaptive_spec.policies import FixedPolicy, ThresholdPolicy, make_policy

LOGGER = "sglang_adaptive_spec.controller"


def fits() -> bool:
    return True


def fits_not() -> bool:
    return False


class FailingPolicy(ThresholdPolicy):
    """Decides as a threshold policy does, until more than ten requests run."""

    def decide(self, seen):
        if seen.running_requests > 10:
            raise ZeroDivisionError("more than ten")
        return super().decide(seen)


def drive(controller: Controller, loads, spec_fits=fits) -> str:
    return "".join(controller.decide(running, spec_fits).mode.value[0] for running in loads)


# --- counters --------------------------------------------------------------------------------------------


def test_steps_are_counted_by_mode():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    assert drive(controller, [1, 1, 9, 9, 9, 1]) == "sspp" + "ps"
    assert controller.steps == {Mode.SPEC: 3, Mode.PLAIN: 3}
    assert controller.mode is Mode.SPEC


def test_the_policy_hears_how_long_the_mode_has_lasted():
    controller = Controller(ThresholdPolicy(4, 3, 3))
    assert drive(controller, [9, 9, 9, 9, 1, 1, 1, 1]) == "sssppp" + "ss"


def test_only_verify_steps_make_the_accept_length():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    assert controller.snapshot()["accept_length"] is None
    controller.note_result(Mode.SPEC, requests=2, tokens=5)
    controller.note_result(Mode.PLAIN, requests=8, tokens=8)
    controller.note_result(Mode.SPEC, requests=2, tokens=3)
    assert controller.tokens == {Mode.SPEC: 8, Mode.PLAIN: 8}
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
    assert controller.switch_counts == {Reason.LOAD_ROSE: 8, Reason.LOAD_FELL: 8}
    assert [switch.step for switch in controller.switches] == list(range(7, 17))
    assert controller.snapshot()["switches"] == 16


def test_a_new_policy_takes_over_from_the_current_mode():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    drive(controller, [1, 9])
    controller.policy = FixedPolicy(Mode.SPEC)
    assert drive(controller, [9, 9]) == "ss"
    assert controller.switch_counts[Reason.FIXED] == 1


# --- KV pressure -----------------------------------------------------------------------------------------


def test_a_batch_that_can_not_speculate_for_want_of_slots_runs_plain():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    assert controller.decide(2, fits_not) == Decision(Mode.PLAIN, Reason.KV_PRESSURE)
    assert controller.switch_counts == {Reason.KV_PRESSURE: 1}


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
    def unexpected() -> bool:
        raise AssertionError("an estimate walks all requests")

    assert drive(Controller(FixedPolicy(Mode.PLAIN)), [1, 2], unexpected) == "pp"
    assert drive(Controller(FixedPolicy(Mode.SPEC)), [1, 2], unexpected) == "ss"


@pytest.mark.parametrize(
    ("settings", "can_drop"),
    [(Settings(policy="spec"), False), (Settings(policy="plain"), True), (Settings(disable_batch_threshold=4), True)],
)
def test_dropping_to_plain_needs_a_policy_that_built_it(settings, can_drop):
    assert Controller(make_policy(settings)).can_drop_to_plain is can_drop


# --- faults ----------------------------------------------------------------------------------------------


def test_a_failing_policy_means_speculation_for_good(caplog):
    controller = Controller(FailingPolicy(4, 3, 1))
    assert drive(controller, [9, 9, 11, 9, 9, 11]) == "sp" + "ssss"
    assert controller.decide(9, fits) == Decision(Mode.SPEC, Reason.FAULT)


def test_a_failing_policy_is_counted_once_and_said_once_with_its_error(caplog):
    controller = Controller(FailingPolicy(4, 3, 1))
    with caplog.at_level(logging.ERROR, LOGGER):
        drive(controller, [11] * 5)
    assert controller.faults == 1
    (record,) = caplog.records
    assert "the policy failed" in record.getMessage()
    assert "as it would alone" in record.getMessage()
    assert record.exc_info[0] is ZeroDivisionError


def test_after_a_fault_no_shortage_of_slots_leads_to_plain():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    controller.fault("a plain step failed")
    assert not controller.can_drop_to_plain
    assert drive(controller, [9, 9], fits_not) == "ss"


def test_every_fault_is_counted_but_only_the_first_is_said(caplog):
    controller = Controller(ThresholdPolicy(4, 3, 1))
    with caplog.at_level(logging.ERROR, LOGGER):
        controller.fault("first")
        controller.fault("second")
    assert controller.faults == 2
    assert ["first" in record.getMessage() for record in caplog.records] == [True]


# --- snapshot --------------------------------------------------------------------------------------------


def test_a_snapshot_is_plain_json():
    controller = Controller(ThresholdPolicy(4, 3, 1))
    drive(controller, [1, 9, 1])
    controller.note_result(Mode.SPEC, requests=2, tokens=5)
    controller.fault("told")
    snapshot = json.loads(json.dumps(controller.snapshot()))
    assert snapshot == controller.snapshot()
    last = snapshot.pop("last_switches")
    assert snapshot == {
        "mode": "spec",
        "dry_run": False,
        "decided_mode": "spec",
        "steps": {"spec": 2, "plain": 1},
        "dry_run_steps": {"spec": 0, "plain": 0},
        "tokens": {"spec": 5, "plain": 0},
        "verified_requests": 2,
        "accept_length": 2.5,
        "switches": 2,
        "switches_by_reason": {
            "few enough requests run to resume": 1,
            "more requests run than the threshold": 1,
        },
        "faults": 1,
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

    def note_verify(self, requests, tokens):
        self.heard.append(("verify", requests, tokens))
        if requests > 10:
            raise ZeroDivisionError("more than ten")

    def note_step(self, mode, requests, context_tokens, seconds):
        self.heard.append(("step", mode, requests, context_tokens, seconds))

    def note_switch(self, before, after, seconds):
        self.heard.append(("switch", before, after, seconds))

    def explain(self):
        raise ZeroDivisionError("nothing to say")


@pytest.fixture
def listening():
    Listener.heard.clear()
    return Controller(Listener(4, 3, 1))


def test_the_policy_hears_of_verify_results_alone(listening):
    listening.note_result(Mode.SPEC, requests=2, tokens=5)
    listening.note_result(Mode.PLAIN, requests=2, tokens=2)
    assert Listener.heard == [("verify", 2, 5)]


def test_the_policy_hears_of_steps_and_of_switches(listening):
    listening.learn(StepTime(Mode.PLAIN, 7, 0.5, after=Mode.PLAIN, number=3, context_tokens=900))
    listening.learn(StepTime(Mode.SPEC, 7, 0.75, after=Mode.PLAIN, number=4, context_tokens=900))
    assert Listener.heard == [("step", Mode.PLAIN, 7, 900, 0.5), ("switch", Mode.PLAIN, Mode.SPEC, 0.75)]


def test_a_policy_that_fails_to_listen_is_a_fault_like_any_other(listening):
    listening.note_result(Mode.SPEC, requests=11, tokens=20)
    listening.note_result(Mode.SPEC, requests=2, tokens=5)
    assert listening.faults == 1
    assert listening.spec_only
    assert Listener.heard == [("verify", 11, 20)]


def test_a_policy_that_can_not_explain_itself_fails_nobody(listening):
    assert "nothing to say" in listening.snapshot()["explain"]["error"]


def test_a_complaint_is_counted_and_leaves_both_modes(listening, caplog):
    listening.complain("something went wrong", RuntimeError("because"))
    assert (listening.faults, listening.spec_only) == (1, False)
    assert "something went wrong" in caplog.text


# --- dry run ---------------------------------------------------------------------------------------------


def test_a_dry_run_runs_every_step_as_sglang_would(caplog):
    controller = Controller(ThresholdPolicy(4, 3, 1), dry_run=True)
    with caplog.at_level(logging.INFO, LOGGER):
        assert drive(controller, [1, 9, 9, 1], fits_not) == "ssss"
    assert controller.steps == {Mode.SPEC: 4}
    assert controller.dry_run_steps == {Mode.SPEC: 2, Mode.PLAIN: 2}
    assert caplog.messages[0].startswith("adaptive-spec (dry run): spec -> plain (")
    assert not controller.can_drop_to_plain
    assert controller.snapshot()["mode"] == "spec"

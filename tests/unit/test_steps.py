import pytest

from sglang_adaptive_spec.engine.steps import StepPlan, settle_mode
from sglang_adaptive_spec.errors import PreparationMismatch
from sglang_adaptive_spec.modes import Mode


def plan(mode: Mode, prepared: Mode | None, batch_size: int = 10) -> StepPlan:
    return StepPlan(mode, batch_size, prepared=prepared)


@pytest.mark.parametrize("mode", Mode)
def test_a_step_runs_as_it_was_prepared(mode):
    assert settle_mode(plan(mode, mode), 10) == (mode, None)


@pytest.mark.parametrize(
    "stamped", [None, plan(Mode.PLAIN, None), plan(Mode.SPEC, None)], ids=["no plan", "plain plan", "spec plan"]
)
def test_a_step_that_sglang_prepared_alone_runs_as_sglang_prepared_it(stamped):
    mode, complaint = settle_mode(stamped, 10)
    assert mode is Mode.SPEC
    assert complaint == "a decode step was prepared without the plugin"


@pytest.mark.parametrize(("prepared", "turned"), [(Mode.PLAIN, Mode.SPEC), (Mode.SPEC, Mode.PLAIN)])
def test_a_mode_that_changed_after_preparation_is_ignored_and_told(prepared, turned):
    mode, complaint = settle_mode(plan(turned, prepared), 10)
    assert mode is prepared
    assert f"of 10 requests was prepared as {prepared.value} and turned into {turned.value}" in complaint
    assert "runs as prepared" in complaint


@pytest.mark.parametrize("prepared", Mode)
@pytest.mark.parametrize("arrived", [0, 9, 11, 160])
def test_other_requests_than_prepared_end_in_words_not_in_a_tensor_size(prepared, arrived):
    with pytest.raises(PreparationMismatch) as caught:
        settle_mode(plan(prepared, prepared), arrived)
    message = str(caught.value)
    assert f"prepared for 10 requests as a {prepared.value} step" in message
    assert f"with {arrived}" in message
    assert "KV slots belong to other requests" in message
    assert "between ScheduleBatch.prepare_for_decode and the worker" in message
    assert "tensor" not in message


def test_the_number_of_requests_is_checked_before_the_mode():
    with pytest.raises(PreparationMismatch):
        settle_mode(plan(Mode.SPEC, Mode.PLAIN), 11)

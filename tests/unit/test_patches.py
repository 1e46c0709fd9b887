"""The wrappers around SGLang's functions, on stand-ins for what they wrap."""

from types import SimpleNamespace

import pytest
from sglang_adaptive_spec.patches import PATCHES

from sglang_adaptive_spec.engine.steps import StepPlan
from sglang_adaptive_spec.modes import Decision, Mode, Reason

WITHOUT_ENGINE = SimpleNamespace(engine=None)


def wrapper_of(name: str):
    (patch,) = [patch for patch in PATCHES if patch.target.endswith(name)]
    return patch.wrapper


class Original:
    """SGLang's function: keeps what it was called with."""

    def __init__(self, answer: object = "sglang's answer") -> None:
        self.answer = answer
        self.calls: list[tuple] = []

    def __call__(self, *args, **kwargs):
        self.calls.append((args, kwargs))
        return self.answer


# --- silence ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    [
        "ScheduleBatch.prepare_for_decode",
        "EagleDraftInputV2Mixin.prepare_for_decode",
        "eagle_info_v2:get_alloc_reserve_per_decode",
        "schedule_batch:get_alloc_reserve_per_decode",
        "EAGLEWorkerV2.forward_batch_generation",
        "SchedulerBatchResultProcessor.process_batch_result_decode",
        "SchedulerMetricsReporter.report_decode_stats",
        "Scheduler.get_internal_state",
    ],
)
def test_without_an_engine_sglang_is_called_once_as_it_was_called(name):
    original = Original()
    answer = wrapper_of(name)(WITHOUT_ENGINE, original, "instance", ("batch",), {"more": 1})
    assert answer == "sglang's answer"
    assert original.calls == [(("batch",), {"more": 1})]


def test_a_batch_without_speculation_is_not_planned():
    plugin = SimpleNamespace(
        engine=SimpleNamespace(plan=lambda batch: pytest.fail("planned")),
        release=SimpleNamespace(is_speculative=lambda batch: False),
    )
    original = Original()
    wrapper_of("ScheduleBatch.prepare_for_decode")(plugin, original, "batch", (), {})
    assert len(original.calls) == 1


def test_a_speculative_batch_is_planned_before_sglang_prepares_it():
    order = []
    plugin = SimpleNamespace(
        engine=SimpleNamespace(plan=lambda batch: order.append(f"plan {batch}")),
        release=SimpleNamespace(is_speculative=lambda batch: True),
    )
    wrapper_of("ScheduleBatch.prepare_for_decode")(plugin, lambda: order.append("prepare"), "batch", (), {})
    assert order == ["plan batch", "prepare"]


# --- every declaration -----------------------------------------------------------------------------------


@pytest.mark.parametrize("patch", PATCHES, ids=lambda patch: patch.target.rpartition(":")[2])
def test_a_patch_says_why_it_is_there_and_when_it_goes(patch):
    module, _, name = patch.target.partition(":")
    assert module.startswith("sglang.srt.")
    assert name
    assert patch.why.endswith(".")
    assert patch.upstream == "none" or "#" in patch.upstream
    assert patch.remove_when.endswith(".")


def test_no_target_is_patched_twice():
    targets = [patch.target for patch in PATCHES]
    assert len(set(targets)) == len(targets)


# --- lengths ---------------------------------------------------------------------------------------------


def resolve(plan: StepPlan | None, *, needs_cpu: bool = True) -> tuple[SimpleNamespace, list[bool], SimpleNamespace]:
    """Resolve a batch's lengths: the batch, how SGLang's function found its switch, and the map."""
    batch = SimpleNamespace(plan=plan, seq_lens_cpu="stale", seq_lens_sum=7)
    future_map = SimpleNamespace(needs_cpu_seq_lens=needs_cpu)
    found = []
    plugin = SimpleNamespace(release=SimpleNamespace(plan_of=lambda batch: batch.plan))
    wrapper_of("FutureMap.resolve_seq_lens_cpu")(
        plugin, lambda batch: found.append(future_map.needs_cpu_seq_lens), future_map, (batch,), {}
    )
    return batch, found, future_map


def plan(mode: Mode, host_seq_lens=None) -> StepPlan:
    return StepPlan(Decision(mode, Reason.FIXED), 2, prepared=mode, host_seq_lens=host_seq_lens)


@pytest.mark.parametrize("needs_cpu", [True, False])
def test_lengths_the_host_knows_are_not_waited_for(needs_cpu):
    batch, found, future_map = resolve(plan(Mode.PLAIN, "known"), needs_cpu=needs_cpu)
    assert found == [False]
    assert batch.seq_lens_cpu == "known"
    assert batch.seq_lens_sum is None
    assert future_map.needs_cpu_seq_lens is needs_cpu


def test_a_plain_step_behind_a_verify_step_waits_once():
    batch, found, future_map = resolve(plan(Mode.PLAIN), needs_cpu=False)
    assert found == [True]
    assert batch.seq_lens_cpu == "stale"
    assert future_map.needs_cpu_seq_lens is False


@pytest.mark.parametrize("stamped", [None, plan(Mode.SPEC)], ids=["no plan", "spec"])
@pytest.mark.parametrize("needs_cpu", [True, False])
def test_other_steps_resolve_as_sglang_does(stamped, needs_cpu):
    batch, found, _ = resolve(stamped, needs_cpu=needs_cpu)
    assert found == [needs_cpu]
    assert batch.seq_lens_cpu == "stale"


# --- numbers ---------------------------------------------------------------------------------------------


def test_the_accept_length_of_a_request_counts_its_verify_steps_alone():
    meta_info = {"spec_verify_ct": 4, "spec_num_correct_drafts": 6, "spec_accept_length": 25.0}
    wrapper_of("_calculate_spec_decoding_metrics")(None, Original(), None, (meta_info,), {})
    assert meta_info["spec_accept_length"] == 2.5


def test_a_request_without_verify_steps_gets_no_accept_length():
    meta_info = {"completion_tokens": 100}
    wrapper_of("_calculate_spec_decoding_metrics")(None, Original(), None, (meta_info,), {})
    assert meta_info == {"completion_tokens": 100}

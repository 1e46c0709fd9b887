"""The wrappers around SGLang's functions, on stand-ins for what they wrap."""

import asyncio
import pickle
import subprocess
import sys
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
from fastapi import HTTPException

from sglang_adaptive_spec.engine.steps import StepPlan
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.patches import BEFORE_0_5_13, PATCHES
from sglang_adaptive_spec.request_steps import VerifySteps

WITHOUT_ENGINE = SimpleNamespace(engine=None, release=SimpleNamespace(is_speculative=lambda batch: False))


def wrapper_of(name: str):
    everywhere = dict.fromkeys((*PATCHES, *BEFORE_0_5_13))
    (patch,) = [patch for patch in everywhere if patch.target.endswith(name)]
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
        "ScheduleBatch.get_model_worker_batch",
        "ScheduleBatch.prepare_for_decode",
        "EagleDraftInputV2Mixin.prepare_for_decode",
        "eagle_info_v2:get_alloc_reserve_per_decode",
        "schedule_batch:get_alloc_reserve_per_decode",
        "EAGLEWorkerV2.forward_batch_generation",
        "SchedulerBatchResultProcessor.process_batch_result_decode",
        "SchedulerMetricsReporter.__post_init__",
        "SchedulerMetricsReporter.report_decode_stats",
        "SchedulerMetricsReporter._maybe_log_idle_metrics",
        "Scheduler.get_internal_state",
        "SchedulerWeightUpdaterManager.update_weights_from_disk",
    ],
)
def test_without_an_engine_sglang_is_called_once_as_it_was_called(name):
    original = Original()
    answer = wrapper_of(name)(WITHOUT_ENGINE, original, "instance", ("batch",), {"more": 1})
    assert answer == "sglang's answer"
    assert original.calls == [(("batch",), {"more": 1})]


def test_a_copy_of_a_batch_is_told_what_was_decided():
    told = []
    plugin = SimpleNamespace(engine="engine", release=SimpleNamespace(carry=lambda *batches: told.append(batches)))
    copied = wrapper_of("ScheduleBatch.get_model_worker_batch")(plugin, Original("copy"), "batch", (), {})
    assert copied == "copy"
    assert told == [("batch", "copy")]


@pytest.mark.parametrize(
    ("times", "asked", "answered"),
    [(1, 1, 1), (1, 5, 5), (2, 1, 1), (2, 4, 2), (2, 5, 3), (1, None, 7), (2, None, 7)],
)
def test_a_reserve_is_what_was_asked_for_however_often_sglang_adds_it(times, asked, answered):
    """In whole slots, never less; SGLang's own where none was asked for."""
    engine = SimpleNamespace(reserve_tokens=lambda: asked)
    plugin = SimpleNamespace(engine=engine, release=SimpleNamespace(reserve_times=times))
    reserve = wrapper_of("eagle_info_v2:get_alloc_reserve_per_decode")
    assert reserve(plugin, Original(7), None, (), {}) == answered


@pytest.mark.parametrize("as_method", [True, False])
def test_the_limit_of_running_requests_is_left_open_wherever_sglang_sets_it(as_method):
    arguments = SimpleNamespace(max_running_requests=None)

    @contextmanager
    def opened(server_args):
        assert server_args is arguments
        server_args.max_running_requests = 1
        yield
        server_args.max_running_requests = None

    release = SimpleNamespace(arguments=lambda server_args: server_args, request_limit_open=opened)
    plugin = SimpleNamespace(release=release, lifts_request_limit=True)
    seen = []
    instance, args = (arguments, ()) if as_method else (None, (arguments,))
    original = lambda *_: seen.append(arguments.max_running_requests)  # noqa: E731
    wrapper_of("speculative_hook:_handle_eagle_family")(plugin, original, instance, args, {})
    assert seen == [1]
    assert arguments.max_running_requests is None


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


def test_a_speculative_batch_on_a_server_whose_engine_never_started_ends_the_process(capsys):
    plugin = SimpleNamespace(engine=None, release=SimpleNamespace(is_speculative=lambda batch: True))
    original = Original()
    with pytest.raises(SystemExit):
        wrapper_of("ScheduleBatch.prepare_for_decode")(plugin, original, "batch", (), {})
    assert original.calls == []
    assert "Another plugin replaced SGLang's worker" in capsys.readouterr().err


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


@pytest.mark.parametrize(
    ("engine", "has_grammar", "needed"), [(None, True, False), ("e", True, True), ("e", False, False)]
)
def test_grammars_see_each_result_before_the_next_step(engine, has_grammar, needed):
    batch = SimpleNamespace(has_grammar=has_grammar)
    plugin = SimpleNamespace(engine=engine)
    assert wrapper_of("grammar_needs_sync")(plugin, Original(answer=False), batch, (), {}) is needed


@pytest.mark.parametrize(
    ("asked", "used"),
    [
        ({"adaptive_spec": {"policy": "plain"}}, {"policy": "plain"}),
        ({"adaptive_spec.policy.plain": 1}, {"policy": "plain"}),
        ({"adaptive_spec.dry_run": 0}, {"dry_run": False}),
        ({"adaptive_spec.dry_run": 1.0}, {"dry_run": True}),
        ({"adaptive_spec.dry_run": 7}, {"dry_run": 7}),
        (
            {"adaptive_spec.disable_batch_threshold": 32, "adaptive_spec.min_dwell_steps": 4},
            {"disable_batch_threshold": 32, "min_dwell_steps": 4},
        ),
    ],
)
def test_settings_are_taken_as_a_json_object_or_as_numbers_by_name(monkeypatch, asked, used):
    seen = []
    engine = SimpleNamespace(use=lambda *settings: seen.append(settings[0]), snapshot=dict)
    answers = SimpleNamespace(SetInternalStateReqOutput=lambda updated: updated)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.io_struct", answers)
    plugin = SimpleNamespace(engine=engine)
    request = SimpleNamespace(server_args=asked, rid=None)
    assert wrapper_of("Scheduler.set_internal_state")(plugin, Original(), None, (request,), {}) is True
    assert seen == [used]


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
    return StepPlan(mode, 2, prepared=mode, host_seq_lens=host_seq_lens)


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


def calculate(meta_info: dict, verify_steps: int) -> dict:
    """What SGLang's process that answers requests makes of a finished one."""
    wrapper = wrapper_of("_calculate_spec_decoding_metrics")
    # As it comes from the scheduler's process.
    received = pickle.loads(pickle.dumps(SimpleNamespace(spec_verify_ct=[0, verify_steps])))
    wrapper(None, Original(), None, (meta_info, received, 1), {})
    return meta_info


@pytest.mark.parametrize("drafts", ["spec_num_correct_drafts", "spec_accepted_drafts"])
def test_the_accept_length_of_a_request_counts_its_verify_steps_alone(drafts):
    meta_info = {"spec_verify_ct": 4, drafts: 6, "spec_accept_length": 25.0}
    assert calculate(meta_info, 4)["spec_accept_length"] == 2.5


def test_a_request_without_verify_steps_gets_no_accept_length():
    assert calculate({"completion_tokens": 100}, 0) == {"completion_tokens": 100}


def test_a_requests_plain_steps_travel_with_its_verify_steps():
    meta_info = {"spec_verify_ct": VerifySteps(4, 9), "spec_num_correct_drafts": 6}
    calculate(meta_info, VerifySteps(4, 9))
    assert meta_info["adaptive_spec_plain_steps"] == 9
    assert type(meta_info["spec_verify_ct"]) is int
    assert calculate({}, VerifySteps(0, 9)) == {"adaptive_spec_plain_steps": 9}


def test_plain_steps_are_read_by_a_process_without_torch_or_sglang():
    sent = pickle.dumps(VerifySteps(4, 9))
    code = (
        "import sys, pickle; got = pickle.load(sys.stdin.buffer); "
        "assert not {'torch', 'sglang', 'wrapt'} & set(sys.modules); print(got, got.plain_steps, got + 1)"
    )
    done = subprocess.run([sys.executable, "-c", code], input=sent, capture_output=True, check=True)
    assert done.stdout.split() == [b"4", b"9", b"5"]


# --- live control ----------------------------------------------------------------------------------------


def change(server_args: dict, use, rid: str | None = None) -> SimpleNamespace:
    """What a scheduler makes of a request to /set_internal_state."""
    plugin = SimpleNamespace(engine=SimpleNamespace(use=use, snapshot=lambda: {"policy": "plain"}))
    request = SimpleNamespace(server_args=server_args, rid=rid)
    return wrapper_of("Scheduler.set_internal_state")(plugin, Original(), None, (request,), {})


def test_settings_of_sglangs_own_are_sglangs():
    assert change({"pp_max_micro_batch_size": 4}, use=pytest.fail) == "sglang's answer"


def test_new_settings_are_put_in_charge_with_who_asked():
    asked = []
    answer = change({"adaptive_spec": {"policy": "plain"}}, lambda *what: asked.append(what), rid="on call")
    assert asked == [({"policy": "plain"}, "request on call")]
    assert answer.updated is True
    assert answer.server_args == {"adaptive_spec": {"policy": "plain"}}


@pytest.mark.parametrize(
    ("server_args", "said"),
    [
        ({"adaptive_spec": "plain"}, "adaptive_spec is 'plain'."),
        ({"adaptive_spec": None}, "adaptive_spec is None."),
        ({"adaptive_spec": {}}, "adaptive_spec is {}."),
        (
            {"adaptive_spec": {"policy": "plain"}, "pp_max_micro_batch_size": 4},
            "adaptive_spec can't change together with pp_max_micro_batch_size.",
        ),
    ],
    ids=str,
)
def test_what_can_not_be_read_changes_nothing(server_args, said):
    assert said in change(server_args, use=pytest.fail).updated["error"]


@pytest.mark.parametrize(
    ("error", "said"),
    [(Refusal("out of reach", "a reason", "a way out"), "out of reach"), (ZeroDivisionError("told"), "ZeroDivision")],
)
def test_a_refusal_and_a_fault_both_answer_with_an_error(error, said):
    def use(asked, by):
        raise error

    assert said in change({"adaptive_spec": {"policy": "plain"}}, use).updated["error"]


def ask(answers: list) -> object:
    async def sglang(request):
        return answers

    async def call():
        return await set_internal_state(None, sglang, SimpleNamespace(), ("request",), {})

    return asyncio.run(call())


set_internal_state = wrapper_of("TokenizerControlMixin.set_internal_state")


def test_an_answer_without_a_refusal_is_handed_on():
    assert ask([True, True]) == [True, True]


def test_a_refusal_by_any_scheduler_is_an_error_over_http():
    with pytest.raises(HTTPException) as caught:
        ask([True, {"error": "out of reach"}])
    assert (caught.value.status_code, caught.value.detail) == (400, "out of reach")


def test_calls_at_the_same_moment_take_turns():
    running, most = 0, 0

    async def sglang(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return [True]

    async def calls():
        manager = SimpleNamespace()
        together = (set_internal_state(None, sglang, manager, ("request",), {}) for _ in range(5))
        return await asyncio.gather(*together)

    assert asyncio.run(calls()) == [[True]] * 5
    assert most == 1


# --- weight updates --------------------------------------------------------------------------------------


@pytest.mark.parametrize("recaptures", [True, False])
@pytest.mark.parametrize("graph_sizes", [(1, 2), ()], ids=str)
def test_a_weight_update_that_would_leave_the_plain_graphs_behind_is_turned_away(recaptures, graph_sizes):
    plugin = SimpleNamespace(engine=SimpleNamespace(runtime=SimpleNamespace(graph_sizes=graph_sizes)))
    request, original = SimpleNamespace(recapture_cuda_graph=recaptures), Original()
    update = wrapper_of("SchedulerWeightUpdaterManager.update_weights_from_disk")
    answer = update(plugin, original, "updater", (request,), {})
    if recaptures and graph_sizes:
        assert original.calls == []
        assert not answer.success
        assert "the plain ones would go on" in answer.message
    else:
        assert answer == "sglang's answer"
        assert original.calls == [((request,), {})]

"""The engine on a stand-in for SGLang: which reserve, which path, which account, for each step."""

import json
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from sglang_adaptive_spec.calibration import Calibration
from sglang_adaptive_spec.config import DEFAULT_CATCH_UP_TOKENS, Settings
from sglang_adaptive_spec.engine.core import AdaptiveEngine
from sglang_adaptive_spec.engine.samples import HAND_ON_EVERY_STEPS
from sglang_adaptive_spec.errors import PreparationMismatch, Refusal
from sglang_adaptive_spec.faults import MOST_FAULTS, Fault
from sglang_adaptive_spec.modes import Mode, Reason
from sglang_adaptive_spec.releases.base import PlainRuntime, PrefillSize
from sglang_adaptive_spec.stopwatch import HostStopwatch

SGLANG_RESERVE = 99
MOST_ACCEPTED = 4
RUNTIME = PlainRuntime(
    "backend",
    "graphs",
    draft_sync=None,
    draft_ring_gib=0.5,
    memory_gib=1.25,
    build_seconds=2.0,
    graph_sizes=(1, 2, 4),
)
FIRST_LENGTH = 100

MOST_REQUESTS = 32
SECONDS = {Mode.SPEC: 0.02, Mode.PLAIN: 0.01}

AUTO = Settings(policy="auto")
PLAIN = Settings(policy="plain")
SPEC = Settings(policy="spec")
EVERY_OTHER = Settings(policy="alternate")
THRESHOLD = Settings(disable_batch_threshold=4, min_dwell_steps=1)


class FakeRelease:
    """Answers like an adapter, and writes down what it was asked to run."""

    def __init__(self) -> None:
        self.ran: list[str] = []
        self.fits = 1
        self.plain_error: Exception | None = None
        self.engine: AdaptiveEngine | None = None
        self.reserve_seen: list[int] = []
        self.catch_up_tokens: int | str | None = "not asked"
        self.caught_up: list[tuple[list[int], list[int]]] = []
        self.catch_up_error: Exception | None = None
        self.last_position_waits = False
        self.worker_refusal: Refusal | None = None
        self.measure_error: Exception | None = None
        self.limits: tuple[int, int] | None = None
        self.prefill_graphs = False
        self.ahead_error: Exception | None = None
        self.read_error: Exception | None = None
        self.left: dict[int, str] = {}
        self.warmed_up: list = []
        self.tp_size = 1
        self.free = 100.0
        self.broadcasts: list = []
        self.prepared_with: list[int | None] = []

    def check_reach(self, settings, most_requests, spec_graph_sizes):
        # On a server that only speculates, nobody asked for them.
        assert (most_requests, spec_graph_sizes) in [(MOST_REQUESTS, (1, 2, 4, 8)), (None, ())]
        if settings.disable_batch_threshold == 99:
            raise Refusal("99 is out of reach", "a reason", "a way out")

    def most_accepted_tokens(self, server_args):
        return MOST_ACCEPTED

    def batch_size(self, batch):
        return batch.requests

    def stamp(self, batch, plan):
        batch.plan = plan

    def plan_of(self, batch):
        return batch.plan

    def prepare_decode(self, batch):
        # SGLang's own preparation is wrapped, so it comes by the engine once more.
        self.engine.prepare(batch, lambda _: self.reserve_seen.append(reserve(self.engine)))

    def prepare_reserving(self, batch, reserve_tokens, upstream):
        self.prepared_with.append(reserve_tokens)
        return upstream(batch)

    def claim(self, batch):
        batch.claimed = True

    def host_seq_lens(self, batch):
        return batch.lengths.clone()

    def spec_steps_that_fit(self, batch):
        self.reserve_seen.append(reserve(self.engine))
        return self.fits

    def check_worker(self, worker):
        if self.worker_refusal:
            raise self.worker_refusal

    def build_plain_runtime(self, worker, catch_up_tokens):
        self.catch_up_tokens = catch_up_tokens
        return RUNTIME

    def most_requests(self, worker):
        return MOST_REQUESTS

    def spec_graph_sizes(self, worker):
        return (1, 2, 4, 8)

    def mean_context_tokens(self, batch):
        return int(batch.lengths.sum()) // batch.requests

    def free_gib(self, worker):
        return self.free

    def draft_ring_gib(self, worker, chunk_tokens):
        return chunk_tokens / 32

    def ranks(self, worker):
        return self.tp_size

    def rank(self, worker):
        return 0

    def from_rank_0(self, worker, value):
        self.broadcasts.append(value)
        return value

    def setup(self, worker):
        return {"model": "a model"}

    @contextmanager
    def idle_batch(self, worker, runtime, requests, context_tokens):
        def seconds_a_step(mode, steps):
            if self.measure_error:
                raise self.measure_error
            # The wrapped worker comes by the engine, which must let these steps pass.
            assert self.engine.run(worker, make_batch(requests), None, lambda: "sglang") == "sglang"
            return SECONDS[mode] * requests

        def catch_up(tokens):
            assert self.engine.run(worker, make_batch(requests), None, lambda: "sglang") == "sglang"
            if self.catch_up_error:
                raise self.catch_up_error
            self.warmed_up.append((requests, context_tokens, tokens))

        yield SimpleNamespace(
            requests=requests, context_tokens=context_tokens, seconds_a_step=seconds_a_step, catch_up=catch_up
        )

    def backlog_limits(self, runtime):
        return self.limits

    def draft_has_prefill_graphs(self, worker):
        return self.prefill_graphs

    def prefill_size(self, batch):
        longest_tokens = int(batch.lengths.max())
        return batch.prefill_tokens and PrefillSize(batch.prefill_tokens, batch.requests, longest_tokens)

    def prompts_go_on(self, batch):
        return batch.goes_on

    def run_prefill_ahead_of_draft(self, worker, runtime, batch, publish):
        self.ran.append("prefill ahead")
        if self.ahead_error:
            raise self.ahead_error
        return "prefilled ahead", f"prompts of {batch.first_row}", batch.lengths - 1

    def kv_slots(self, worker, req):
        return f"slots of {req.row}"

    def read_prompts(self, worker, runtime, prompts, left):
        self.ran.append(f"read {', '.join(prompts)}")
        self.left = dict(left)
        if self.read_error:
            raise self.read_error

    def rows_in_all(self, worker):
        return 64

    def context_tokens(self, worker):
        return 1000

    def rows(self, batch):
        return torch.arange(batch.first_row, batch.first_row + batch.requests)

    def positions(self, batch):
        return batch.lengths

    def draft_input(self, batch):
        return "draft input"

    def next_draft_input(self, result):
        return "next draft input"

    def catch_up(self, worker, runtime, batch, draft_input, due, *, drafts_next):
        if self.catch_up_error:
            raise self.catch_up_error
        self.ran.append(f"catch up for {draft_input}")
        self.caught_up.append(tuple(part.tolist() for part in due))
        return due[1] if drafts_next or not self.last_position_waits else (due[1] - 1).clamp(min=0)

    def limit_committed(self, req, true_length):
        req.kv_committed_len = true_length(req.row, req.kv_committed_len)

    def is_decode(self, batch):
        return batch.decode

    def run_plain_decode(self, worker, runtime, batch, publish):
        assert runtime is RUNTIME
        self.ran.append("plain decode")
        if self.plain_error:
            raise self.plain_error
        return SimpleNamespace(mode=Mode.PLAIN, tokens=batch.requests)

    def run_plain_prefill(self, worker, batch, publish):
        self.ran.append("plain prefill")

    def reserve_for_spec(self, worker, batch, prepare):
        self.ran.append("reserve for spec")
        prepare(batch)

    def mode_of_result(self, result):
        return result.mode

    def as_plain_result_batch(self, batch):
        return SimpleNamespace(**{**vars(batch), "looks_plain": True})

    def result_counts(self, batch, result):
        return batch.requests, result.tokens

    def output_tokens(self, batch):
        return batch.output_tokens

    def tokens_of(self, batch, result, reqs):
        return sum(result.tokens_each for req in reqs if req in batch.reqs)

    def expect_cuts(self, batch, result):
        if batch.has_grammar:
            result.may_be_cut = True

    def may_be_cut(self, result):
        return getattr(result, "may_be_cut", False)

    def row(self, req):
        return req.row

    def overshoot_tokens(self, req):
        return req.overshoot_tokens

    def report_plain_steps(self, req, plain_steps):
        req.plain_steps = plain_steps

    def stopwatch(self, worker):
        return HostStopwatch()

    def telemetry(self, reporter, snapshot, on_fault):
        return reporter(snapshot, on_fault) if reporter else None


def make_engine(
    settings: Settings, *, built: bool = True, limits: tuple[int, int] | None = None, prefill_graphs: bool = False
) -> AdaptiveEngine:
    release = FakeRelease()
    release.limits, release.prefill_graphs = limits, prefill_graphs
    engine = release.engine = AdaptiveEngine(settings, release, server_args=None)
    if built:
        engine.build(worker=None)
    return engine


def make_batch(requests: int = 2, *, decode: bool = True) -> SimpleNamespace:
    return SimpleNamespace(
        requests=requests,
        reqs=[leaving(row) for row in range(requests)],
        decode=decode,
        plan=None,
        lengths=torch.full((requests,), FIRST_LENGTH),
        output_tokens=0,
        has_grammar=False,
        claimed=False,
        prefill_tokens=None,
        first_row=0,
        goes_on=False,
    )


def leaving(row: int, length: int = FIRST_LENGTH) -> SimpleNamespace:
    """A request on its way out."""
    return SimpleNamespace(row=row, kv_committed_len=length, overshoot_tokens=0)


def asked(settings: Settings) -> dict:
    """Settings as somebody would ask for them on a running server."""
    return {"policy": settings.policy, **json.loads(settings.to_json())}


def reserve(engine: AdaptiveEngine) -> int:
    """What SGLang hears when it asks how many slots to ensure."""
    tokens = engine.reserve_tokens()
    return SGLANG_RESERVE if tokens is None else tokens


def faults(engine: AdaptiveEngine) -> dict[Fault, int]:
    return dict(engine.controller.faults.counts)


def prepare(engine: AdaptiveEngine, batch) -> int:
    """Plan and prepare a step as SGLang would; the slots it was told to ensure."""
    engine.plan(batch)
    return engine.prepare(batch, lambda _: reserve(engine))


def run(engine: AdaptiveEngine, batch):
    def sglang():
        engine.release.ran.append("sglang")
        return SimpleNamespace(mode=Mode.SPEC, tokens=3 * batch.requests)

    return engine.run(None, batch, None, sglang)


def process(engine: AdaptiveEngine, batch, result):
    return engine.process(batch, result, lambda seen, _: seen)


def step(engine: AdaptiveEngine, requests: int = 2) -> int:
    """One whole step without overlap: its result is processed before the next is prepared."""
    batch = make_batch(requests)
    slots = prepare(engine, batch)
    process(engine, batch, run(engine, batch))
    return slots


# --- reserve ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "claimed"), [(PLAIN, True), (SPEC, False)])
def test_the_token_of_a_plain_step_alone_is_committed_when_it_is_prepared(settings, claimed):
    prepare(make_engine(settings), batch := make_batch())
    assert batch.claimed is claimed


def test_a_steady_plain_phase_takes_one_slot_a_request():
    engine = make_engine(PLAIN)
    assert [step(engine) for _ in range(3)] == [1, 1, 1]


def test_a_speculative_step_takes_what_sglang_takes():
    assert step(make_engine(SPEC)) == SGLANG_RESERVE


def test_each_preparation_is_told_its_reserve():
    engine = make_engine(EVERY_OTHER)
    steps = [step(engine) for _ in range(2)]
    assert engine.release.prepared_with == [None, steps[1]]


def test_a_plain_step_behind_an_outstanding_verify_step_covers_all_it_may_accept():
    engine = make_engine(EVERY_OTHER)
    verify, plain, later = make_batch(), make_batch(), make_batch()
    assert prepare(engine, verify) == SGLANG_RESERVE
    result = run(engine, verify)
    assert prepare(engine, plain) == MOST_ACCEPTED
    run(engine, plain)
    process(engine, verify, result)
    engine.use({"policy": "plain"})
    assert prepare(engine, later) == 1


def test_a_plain_step_after_a_processed_verify_step_takes_one_slot():
    engine = make_engine(EVERY_OTHER)
    assert [step(engine) for _ in range(4)] == [SGLANG_RESERVE, 1, SGLANG_RESERVE, 1]


def test_a_verify_step_that_has_not_run_yet_does_not_count_as_outstanding():
    engine = make_engine(EVERY_OTHER)
    prepare(engine, make_batch())
    assert prepare(engine, make_batch()) == 1


@pytest.mark.parametrize(
    ("settings", "estimate"), [(SPEC, SGLANG_RESERVE), (PLAIN, 1), (THRESHOLD, 1), (EVERY_OTHER, 1)]
)
def test_between_steps_the_estimate_is_the_least_the_batch_may_need(settings, estimate):
    assert reserve(make_engine(settings)) == estimate


def break_for_good(engine: AdaptiveEngine) -> None:
    for _ in range(MOST_FAULTS):
        engine.controller.fault(Fault.PLAIN_STEP, "told")


def test_after_repeated_faults_the_estimate_is_sglangs():
    engine = make_engine(THRESHOLD)
    break_for_good(engine)
    assert reserve(engine) == SGLANG_RESERVE


def test_whether_speculation_fits_is_asked_of_sglangs_reserve():
    engine = make_engine(THRESHOLD)
    engine.plan(make_batch())
    assert engine.release.reserve_seen == [SGLANG_RESERVE]


def test_a_batch_that_does_not_fit_is_planned_plain():
    engine = make_engine(THRESHOLD)
    engine.release.fits = 0
    assert engine.plan(make_batch()).mode is Mode.PLAIN
    assert engine.controller.switches[-1].reason is Reason.KV_PRESSURE


def test_the_pool_is_looked_at_again_when_it_may_have_run_short_and_after_a_prefill():
    engine = make_engine(THRESHOLD)
    engine.release.fits = 3
    for _ in range(3):
        step(engine)
    assert len(engine.release.reserve_seen) == 1
    step(engine)
    assert len(engine.release.reserve_seen) == 2
    prefill(engine, 8)
    engine.release.fits = 0
    assert engine.plan(make_batch()).mode is Mode.PLAIN
    assert engine.controller.switches[-1].reason is Reason.KV_PRESSURE


def test_preparations_nest():
    engine = make_engine(PLAIN)
    outer, inner = make_batch(), make_batch()
    engine.plan(outer)
    engine.plan(inner)
    inner.plan.reserve_tokens = 7

    def upstream(_):
        return [reserve(engine), engine.prepare(inner, lambda _: reserve(engine)), reserve(engine)]

    assert engine.prepare(outer, upstream) == [1, 7, 1]


def test_a_failed_preparation_leaves_neither_its_reserve_nor_a_prepared_plan():
    engine = make_engine(THRESHOLD)
    batch = make_batch()
    engine.plan(batch)

    def out_of_memory(_):
        assert reserve(engine) == SGLANG_RESERVE
        raise MemoryError

    with pytest.raises(MemoryError):
        engine.prepare(batch, out_of_memory)
    assert reserve(engine) == 1
    assert batch.plan.prepared is None


def test_a_batch_without_a_plan_is_left_to_sglang():
    assert make_engine(THRESHOLD).prepare(make_batch(), lambda _: "as ever") == "as ever"


# --- lengths ---------------------------------------------------------------------------------------------


def test_a_plain_step_knows_its_lengths_unless_a_verify_result_is_outstanding():
    engine = make_engine(EVERY_OTHER)
    verify, behind, steady = make_batch(), make_batch(), make_batch(3)
    prepare(engine, verify)
    result = run(engine, verify)
    prepare(engine, behind)
    process(engine, verify, result)
    engine.use({"policy": "plain"})
    prepare(engine, steady)
    assert behind.plan.host_seq_lens is None
    assert steady.plan.host_seq_lens.tolist() == [FIRST_LENGTH] * 3


def test_a_speculative_step_asks_for_lengths_where_something_may_wait_for_the_draft():
    engine = make_engine(EVERY_OTHER)
    asked = []
    for _ in range(4):
        batch = make_batch()
        prepare(engine, batch)
        process(engine, batch, run(engine, batch))
        asked.append((batch.plan.mode, batch.plan.host_seq_lens is not None))
    # The third one catches up with the second; before the first there was nothing.
    assert asked == [(Mode.SPEC, False), (Mode.PLAIN, True), (Mode.SPEC, True), (Mode.PLAIN, True)]


# --- run -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("settings", "ran"), [(PLAIN, ["plain decode"]), (SPEC, ["sglang"])])
def test_a_step_runs_on_the_path_of_its_mode_alone(settings, ran):
    engine = make_engine(settings)
    step(engine)
    assert engine.release.ran == ran
    assert faults(engine) == {}


def test_a_failed_plain_step_is_run_again_speculatively():
    engine = make_engine(PLAIN)
    engine.release.plain_error = RuntimeError("no kernel")
    batch = make_batch()
    assert prepare(engine, batch) == 1
    assert run(engine, batch).mode is Mode.SPEC
    assert engine.release.ran == ["plain decode", "reserve for spec", "sglang"]
    # Once to see whether there is room, once to take it.
    assert engine.release.reserve_seen == [SGLANG_RESERVE] * 2


def test_a_step_behind_a_repeated_one_covers_all_it_may_accept():
    engine = make_engine(PLAIN)
    engine.release.plain_error = RuntimeError("no kernel")
    batch = make_batch()
    prepare(engine, batch)
    run(engine, batch)
    assert prepare(engine, make_batch()) == MOST_ACCEPTED


def test_a_fault_costs_one_step_its_mode_and_repeated_ones_end_switching():
    engine = make_engine(PLAIN)
    engine.release.plain_error = RuntimeError("no kernel")
    assert [step(engine) for _ in range(MOST_FAULTS)] == [1] * MOST_FAULTS
    assert engine.release.ran == ["plain decode", "reserve for spec", "sglang"] * MOST_FAULTS
    assert [step(engine) for _ in range(3)] == [SGLANG_RESERVE] * 3
    assert engine.release.ran[3 * MOST_FAULTS :] == ["sglang"] * 3
    assert faults(engine) == {Fault.PLAIN_STEP: MOST_FAULTS}
    assert engine.snapshot()["spec_only"]


def test_a_server_that_let_the_draft_go_teaches_it_new_prompts_once_it_speculates_for_good():
    engine = make_engine(PLAIN)
    run(engine, make_batch(decode=False))
    break_for_good(engine)
    run(engine, make_batch(decode=False))
    assert engine.release.ran == ["plain prefill", "sglang"]


def test_a_server_that_speculates_for_good_takes_no_new_settings():
    engine = make_engine(THRESHOLD)
    break_for_good(engine)
    with pytest.raises(Refusal, match="since repeated faults"):
        engine.use({"policy": "plain"})


def test_a_failed_plain_step_leaves_nothing_waiting_for_the_draft():
    engine = flipping_engine(3)
    length = grow(engine, 1)
    note = engine._ledger.note

    def noted_and_failed(rows, positions):
        note(rows, positions)
        raise RuntimeError("injected")

    engine._ledger.note = noted_and_failed
    length = grow(engine, 1, length)
    engine._ledger.note = note
    grow(engine, 1, length)
    # The failed step was SGLang's own in the end, which the draft saw; the ring has nothing of it.
    assert engine.release.caught_up == [([FIRST_LENGTH] * 2, [1, 1])]
    assert engine._ledger.true_length(0, length) == length


def test_a_step_prepared_without_the_plugin_is_sglangs():
    engine = make_engine(PLAIN)
    run(engine, make_batch())
    assert engine.release.ran == ["sglang"]
    assert faults(engine) == {Fault.PREPARATION: 1}


def test_a_mode_that_changed_after_preparation_runs_as_prepared():
    engine = make_engine(EVERY_OTHER)
    batch = make_batch()
    prepare(engine, batch)
    engine.plan(other := make_batch())
    assert other.plan.mode is Mode.PLAIN
    batch.plan.mode = other.plan.mode
    run(engine, batch)
    assert engine.release.ran == ["sglang"]
    assert faults(engine) == {Fault.PREPARATION: 1}


@pytest.mark.parametrize("settings", [PLAIN, SPEC])
def test_a_batch_that_changed_after_preparation_does_not_run(settings):
    engine = make_engine(settings)
    batch = make_batch(10)
    prepare(engine, batch)
    batch.requests = 2
    with pytest.raises(PreparationMismatch, match="prepared for 10 requests"):
        run(engine, batch)
    assert engine.release.ran == []


@pytest.mark.parametrize(
    ("settings", "ran"), [(PLAIN, "plain prefill"), (SPEC, "sglang"), (THRESHOLD, "sglang"), (EVERY_OTHER, "sglang")]
)
def test_a_prefill_skips_the_draft_only_where_nothing_will_ever_draft(settings, ran):
    engine = make_engine(settings)
    run(engine, make_batch(decode=False))
    assert engine.release.ran == [ran]


def test_a_prefill_leaves_no_verify_result_outstanding():
    engine = make_engine(EVERY_OTHER)
    run(engine, make_batch(decode=False))
    prepare(engine, make_batch())
    assert prepare(engine, make_batch()) == 1


# --- results ---------------------------------------------------------------------------------------------


def test_sglang_sees_a_plain_result_as_it_would_without_speculation():
    engine = make_engine(PLAIN)
    batch = make_batch(5)
    seen = process(engine, batch, SimpleNamespace(mode=Mode.PLAIN, tokens=5))
    assert seen.looks_plain
    assert not hasattr(batch, "looks_plain")
    assert engine.controller.tokens == {Mode.PLAIN: 5}
    assert engine.controller.verified_requests == 0


def test_sglang_sees_a_speculative_result_untouched():
    engine = make_engine(SPEC)
    batch = make_batch(5)
    assert process(engine, batch, SimpleNamespace(mode=Mode.SPEC, tokens=12)) is batch
    assert engine.controller.accepted_tokens == 12
    assert engine.controller.verified_requests == 5


def test_tokens_are_those_that_clients_get():
    """With overlap: a request ends with a result while the next step, with it, is under way."""
    engine = make_engine(THRESHOLD)
    batch, (ending, *_) = (first := make_batch(3)), first.reqs

    def sglang(seen, _):
        ending.overshoot_tokens = 2
        engine.before_release(ending)

    def later(mode, tokens_each):
        process(engine, batch, SimpleNamespace(mode=mode, tokens=3 * tokens_each, tokens_each=tokens_each))
        return engine.controller.tokens[mode]

    engine.process(batch, SimpleNamespace(mode=Mode.SPEC, tokens=9), sglang)
    assert engine.controller.tokens == {Mode.SPEC: 7}
    assert later(Mode.PLAIN, 1) == 2
    assert later(Mode.PLAIN, 1) == 2 + 3
    engine.before_release(ending)
    assert later(Mode.SPEC, 4) == 7 + 8


def test_tokens_that_a_grammar_cuts_off_are_no_ones():
    engine = make_engine(SPEC)
    batch = make_batch(3)
    batch.has_grammar = True
    prepare(engine, batch)
    launched = SimpleNamespace(mode=Mode.SPEC, tokens=9)
    result = engine.run(None, batch, None, lambda: launched)

    def sglang(seen, _):
        batch.output_tokens += 7

    engine.process(batch, result, sglang)
    assert engine.controller.tokens == {Mode.SPEC: 7}


def test_a_leaving_request_says_how_many_plain_steps_it_took():
    engine = make_engine(PLAIN)
    early, late = leaving(0), leaving(1)
    run(engine, make_batch(2, decode=False))
    step(engine)
    batch = make_batch()
    prepare(engine, batch)
    result = run(engine, batch)
    # Retracted: the step under way gives it nothing.
    engine.before_release(early)
    assert early.plain_steps == 1
    process(engine, batch, result)
    engine.before_release(late)
    assert late.plain_steps == 2
    # Somebody else's rows now.
    run(engine, make_batch(2, decode=False))
    engine.before_release(late)
    assert late.plain_steps == 0


def test_a_plain_step_that_failed_is_no_plain_step():
    engine = make_engine(PLAIN)
    engine.release.plain_error = RuntimeError("no kernel")
    step(engine)
    engine.before_release(request := leaving(0))
    assert request.plain_steps == 0


def test_more_results_than_steps_do_not_hide_an_outstanding_one():
    engine = make_engine(EVERY_OTHER)
    process(engine, make_batch(), SimpleNamespace(mode=Mode.SPEC, tokens=2))
    verify = make_batch()
    prepare(engine, verify)
    run(engine, verify)
    assert prepare(engine, make_batch()) == MOST_ACCEPTED


# --- build and control -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "tokens"),
    [(PLAIN, None), (THRESHOLD, DEFAULT_CATCH_UP_TOKENS), (EVERY_OTHER, DEFAULT_CATCH_UP_TOKENS)],
)
def test_the_draft_is_kept_true_where_speculation_may_resume(settings, tokens):
    engine = make_engine(settings)
    assert engine.runtime is RUNTIME
    assert engine.release.catch_up_tokens == tokens


def test_nothing_is_built_for_a_policy_that_never_runs_plain():
    engine = make_engine(SPEC)
    assert engine.runtime is None
    assert engine.release.catch_up_tokens == "not asked"


@pytest.mark.parametrize("settings", [PLAIN, SPEC])
def test_a_model_that_can_not_be_served_is_refused_before_anything_is_built(settings):
    engine = make_engine(settings, built=False)
    engine.release.worker_refusal = Refusal("this model", "a reason", "a way out")
    with pytest.raises(Refusal, match="this model"):
        engine.build(worker=None)
    assert engine.runtime is None


@pytest.mark.parametrize("wanted", [AUTO, PLAIN, THRESHOLD, EVERY_OTHER])
def test_a_server_without_plain_graphs_refuses_a_policy_that_needs_them(wanted):
    engine = make_engine(SPEC)
    with pytest.raises(Refusal) as caught:
        engine.use(asked(wanted))
    assert "can't run plain steps" in caught.value.what
    assert "'spec'" in caught.value.why
    assert "'auto' or 'threshold'" in caught.value.remedy
    assert engine.settings is SPEC


@pytest.mark.parametrize("wanted", [SPEC, AUTO, THRESHOLD, EVERY_OTHER])
def test_a_server_that_let_the_draft_go_refuses_to_return_to_it(wanted):
    engine = make_engine(PLAIN)
    with pytest.raises(Refusal) as caught:
        engine.use(asked(wanted))
    assert "can't return to speculation" in caught.value.what
    assert "'plain'" in caught.value.why
    assert "'auto' or 'threshold'" in caught.value.remedy
    assert step(engine) == 1


@pytest.mark.parametrize(("wanted", "slots"), [(PLAIN, 1), (SPEC, SGLANG_RESERVE)])
def test_new_settings_hold_from_the_next_step(wanted, slots):
    engine = make_engine(THRESHOLD)
    step(engine)
    engine.use(json.loads(wanted.to_json()))
    assert step(engine) == slots
    assert engine.snapshot()["policy"] == wanted.policy


def test_a_held_server_goes_back_to_what_it_was():
    engine = make_engine(THRESHOLD)
    engine.use({"policy": "plain"})
    engine.use({"policy": "threshold"})
    assert engine.settings == THRESHOLD


def test_the_same_fixed_policy_may_be_asked_for_again():
    for settings in (PLAIN, SPEC):
        make_engine(settings).use(json.loads(settings.to_json()))


def test_a_snapshot_is_plain_json():
    engine = make_engine(THRESHOLD)
    step(engine)
    snapshot = json.loads(json.dumps(engine.snapshot()))
    assert snapshot.keys() == engine.snapshot().keys()
    assert snapshot["policy"] == "threshold"
    assert snapshot["settings"] == engine.settings.effective()
    assert snapshot["plain_memory_gib"] == 1.25
    assert snapshot["plain_graph_sizes"] == [1, 2, 4]
    assert snapshot["steps"] == {"spec": 1, "plain": 0}


def test_a_snapshot_without_plain_graphs_says_so():
    snapshot = make_engine(SPEC).snapshot()
    assert snapshot["plain_memory_gib"] == 0.0
    assert snapshot["plain_graph_sizes"] == []


# --- the draft across plain phases -----------------------------------------------------------------------

CHUNK = 4


def flipping_engine(period_steps: int, limits: tuple[int, int] | None = None) -> AdaptiveEngine:
    settings = Settings(policy="alternate", alternate_period_steps=period_steps, catch_up_tokens=CHUNK)
    engine = make_engine(settings, limits=limits)
    for _ in range(period_steps):
        step(engine)
    assert engine.release.ran == ["sglang"] * period_steps
    engine.release.ran.clear()
    return engine


def grow(engine: AdaptiveEngine, steps: int, length: int = FIRST_LENGTH, requests: int = 2) -> int:
    """Decode steps of one batch whose requests grow by a token each; the length reached."""
    for _ in range(steps):
        batch = make_batch(requests)
        batch.lengths += length - FIRST_LENGTH
        prepare(engine, batch)
        process(engine, batch, run(engine, batch))
        length += 1
    return length


def test_the_draft_catches_up_before_it_drafts_again():
    engine = flipping_engine(3)
    grow(engine, 4)
    assert engine.release.ran == ["plain decode"] * 3 + ["catch up for draft input", "sglang"]
    assert engine.release.caught_up == [([FIRST_LENGTH] * 2, [3, 3])]
    assert engine.snapshot()["catch_up_tokens"] == 6


def test_a_full_chunk_is_caught_up_with_in_the_plain_phase():
    engine = flipping_engine(9)
    grow(engine, 9)
    chunk = ["plain decode"] * CHUNK + ["catch up for next draft input"]
    assert engine.release.ran == chunk * 2 + ["plain decode"]
    assert engine.release.caught_up == [([FIRST_LENGTH] * 2, [CHUNK] * 2), ([FIRST_LENGTH + CHUNK] * 2, [CHUNK] * 2)]


def test_the_last_position_of_a_chunk_may_wait_for_the_draft_to_draft():
    engine = flipping_engine(CHUNK + 2)
    engine.release.last_position_waits = True
    grow(engine, CHUNK + 3)
    first, second = engine.release.caught_up
    assert first == ([FIRST_LENGTH] * 2, [CHUNK] * 2)
    assert second == ([FIRST_LENGTH + CHUNK - 1] * 2, [3] * 2)
    assert engine.snapshot()["catch_up_tokens"] == 2 * (CHUNK - 1 + 3)
    assert not engine._ledger.waits(torch.arange(2))


def test_nothing_waits_after_speculative_steps():
    engine = flipping_engine(2)
    length = grow(engine, 2)
    grow(engine, 2, length)
    assert engine.release.ran == ["plain decode"] * 2 + ["catch up for draft input"] + ["sglang"] * 2


def test_a_prefill_leaves_nothing_waiting_in_its_rows():
    engine = flipping_engine(3)
    length = grow(engine, 2)
    run(engine, make_batch(decode=False))
    engine.release.ran.clear()
    grow(engine, 2, length)
    assert engine.release.caught_up == [([FIRST_LENGTH + 2] * 2, [1, 1])]


# --- prompts that the draft reads later ------------------------------------------------------------------


def plain_engine() -> AdaptiveEngine:
    """In plain mode for the next steps, with room for prompts of 12 tokens or 4 requests."""
    engine = flipping_engine(3, limits=(12, 4))
    prepare(engine, make_batch())
    assert engine.controller.mode is Mode.PLAIN
    return engine


def prefill(engine: AdaptiveEngine, tokens: int, requests: int = 1, first_row: int = 0) -> object:
    batch = make_batch(requests, decode=False)
    batch.prefill_tokens, batch.first_row = tokens, first_row
    return run(engine, batch)


def test_prompts_of_plain_mode_wait_until_the_draft_drafts():
    engine = plain_engine()
    assert prefill(engine, 3, requests=2) == "prefilled ahead"
    assert prefill(engine, 4, first_row=2) == "prefilled ahead"
    grow(engine, 3)
    drafted = ["read prompts of 0, prompts of 2", "catch up for draft input", "sglang"]
    assert engine.release.ran == ["prefill ahead"] * 2 + ["plain decode"] * 2 + drafted
    # From the prompt's last position on: it takes a whole forward to draft from it.
    assert engine.release.caught_up == [([FIRST_LENGTH - 1] * 2, [3, 3])]
    assert engine.snapshot()["deferred_prompts"] == 3
    assert faults(engine) == {}


def test_a_request_that_decodes_no_plain_step_is_drafted_from_its_prompts_last_position():
    engine = plain_engine()
    grow(engine, 2)
    prefill(engine, 3, requests=2)
    engine.use({"policy": "spec"})
    engine.release.ran.clear()
    grow(engine, 1)
    assert engine.release.ran == ["read prompts of 0", "catch up for draft input", "sglang"]
    assert engine.release.caught_up == [([FIRST_LENGTH - 1] * 2, [1, 1])]


def test_prompts_are_read_before_drafting_even_where_no_position_waits_any_more():
    engine = plain_engine()
    prefill(engine, 3, requests=2)
    engine._ledger.give_up(torch.arange(2))
    engine.use({"policy": "spec"})
    engine.release.ran.clear()
    grow(engine, 1)
    assert engine.release.ran == ["read prompts of 0", "sglang"]


@pytest.mark.parametrize(("tokens", "requests"), [(6, 1), (2, 2)])
def test_a_full_backlog_is_read_first(tokens, requests):
    engine = plain_engine()
    for _ in range(3):
        prefill(engine, tokens, requests)
    assert engine.release.ran == ["prefill ahead"] * 2 + ["read prompts of 0, prompts of 0", "prefill ahead"]


@pytest.mark.parametrize("tokens", [7, None])
def test_a_long_prompt_or_a_batch_of_another_kind_is_read_at_once(tokens):
    engine = plain_engine()
    prefill(engine, 3)
    prefill(engine, tokens)
    assert engine.release.ran == ["prefill ahead", "read prompts of 0", "sglang"]


def test_while_the_server_speculates_the_second_of_two_prefills_in_a_row_waits():
    engine = make_engine(THRESHOLD, limits=(12, 4))
    # The length of the first one's request is open, once it has speculated.
    prefill(engine, 3)
    prefill(engine, 3, first_row=1)
    speculated = make_batch(2)
    prepare(engine, speculated)
    run(engine, speculated)
    drafted = ["read prompts of 1", "catch up for draft input", "sglang"]
    assert engine.release.ran == ["sglang", "prefill ahead", *drafted]
    prefill(engine, 3, first_row=2)
    prefill(engine, 3, first_row=3)
    engine.release.ran.clear()
    joined = make_batch(4)
    prepare(engine, joined)
    run(engine, joined)
    assert engine.release.ran == [drafted[0].replace("1", "3"), *drafted[1:]]
    first, second = engine.release.caught_up
    assert (first[1], second[1]) == ([0, 1], [0, 0, 0, 1])
    assert second[0][3] == FIRST_LENGTH - 1
    assert faults(engine) == {}


def test_where_the_draft_reads_prompts_by_graphs_none_waits_while_the_server_speculates():
    engine = make_engine(THRESHOLD, limits=(12, 4), prefill_graphs=True)
    for row in range(3):
        prefill(engine, 3, first_row=row)
    assert engine.release.ran == ["sglang"] * 3


def test_the_next_chunk_of_a_prompt_does_not_wait_while_the_server_speculates():
    engine = make_engine(THRESHOLD, limits=(12, 4))
    chunk = make_batch(1, decode=False)
    chunk.prefill_tokens, chunk.goes_on = 3, True
    run(engine, chunk)
    prefill(engine, 3)
    assert engine.release.ran == ["sglang"] * 2


def test_a_prompt_does_not_wait_where_no_catch_up_has_room_behind_it():
    engine = plain_engine()
    batch = make_batch(1, decode=False)
    batch.prefill_tokens, batch.lengths = 3, torch.tensor([engine.release.context_tokens(None) - CHUNK + 2])
    run(engine, batch)
    assert engine.release.ran == ["sglang"]
    batch.lengths -= 1
    run(engine, batch)
    assert engine.release.ran == ["sglang", "prefill ahead"]


def test_what_waits_is_given_up_where_a_batch_comes_prepared_by_somebody_else():
    engine = flipping_engine(3)
    length = grow(engine, 2)
    batch = make_batch()
    batch.lengths += length - FIRST_LENGTH
    run(engine, batch)
    assert engine.release.ran == ["plain decode"] * 2 + ["sglang"]
    assert faults(engine) == {Fault.PREPARATION: 1}
    engine.before_release(request := leaving(0, length))
    assert request.kv_committed_len == FIRST_LENGTH


@pytest.mark.parametrize("settings", [SPEC, replace(THRESHOLD, dry_run=True), THRESHOLD])
def test_where_sglang_is_to_run_as_it_would_alone_no_prompt_waits(settings):
    engine = make_engine(settings, limits=(12, 4))
    if settings is THRESHOLD:
        engine.use({"policy": "spec"})
    for _ in range(2):
        prefill(engine, 3)
    assert engine.release.ran == ["sglang"] * 2


def test_what_a_leaving_request_puts_into_the_radix_cache_is_read_by_the_next_forward():
    engine = plain_engine()
    prefill(engine, 3, requests=2)
    engine.before_release(leaving(1, FIRST_LENGTH))
    assert engine.release.ran == ["prefill ahead"], "results are processed beside a forward that may be under way"
    grow(engine, 1)
    assert engine.release.ran == ["prefill ahead", "read prompts of 0", "plain decode"]
    assert engine.release.left == {1: "slots of 1"}


def test_a_prefill_that_fails_ahead_of_the_draft_is_sglangs():
    engine = plain_engine()
    engine.release.ahead_error = RuntimeError("injected")
    prefill(engine, 3)
    assert engine.release.ran == ["prefill ahead", "sglang"]
    assert faults(engine) == {Fault.PLAIN_STEP: 1}
    assert engine._ledger.true_length(0, 50) == 50


def test_prompts_that_the_draft_can_not_read_cost_acceptance_and_no_request():
    engine = plain_engine()
    engine.release.read_error = RuntimeError("injected")
    prefill(engine, 3, requests=2)
    grow(engine, 3)
    assert engine.release.ran[-1] == "sglang"
    assert faults(engine) == {Fault.CATCH_UP: 1}


def test_a_leaving_request_keeps_what_the_draft_has_seen():
    engine = flipping_engine(3)
    length = grow(engine, 2)
    waiting, up_to_date = leaving(0, length), leaving(5, 70)
    engine.before_release(waiting)
    engine.before_release(up_to_date)
    assert (waiting.kv_committed_len, up_to_date.kv_committed_len) == (FIRST_LENGTH, 70)
    assert waiting.plain_steps == 2


def test_a_failed_catch_up_costs_acceptance_and_no_request():
    engine = flipping_engine(2)
    engine.release.catch_up_error = RuntimeError("no kernel")
    grow(engine, 4)
    assert engine.release.ran == ["plain decode"] * 2 + ["sglang"] * 2
    assert faults(engine) == {Fault.CATCH_UP: 1}


def test_what_a_failed_catch_up_left_out_never_reaches_the_radix_cache():
    engine = flipping_engine(2)
    engine.release.catch_up_error = RuntimeError("no kernel")
    length = grow(engine, 3)
    engine.release.catch_up_error = None
    # Later catch-ups are of later tokens: the gap stays.
    length = grow(engine, 4, length)
    engine.before_release(request := leaving(0, length))
    assert request.kv_committed_len == FIRST_LENGTH
    # The row's next request starts afresh.
    run(engine, make_batch(decode=False))
    engine.before_release(request := leaving(0, length))
    assert request.kv_committed_len == length


def test_a_failed_catch_up_leaves_the_result_of_its_plain_step():
    engine = flipping_engine(CHUNK)
    engine.release.catch_up_error = RuntimeError("no memory")
    length = grow(engine, CHUNK - 1)
    batch = make_batch()
    batch.lengths += length - FIRST_LENGTH
    prepare(engine, batch)
    assert run(engine, batch).mode is Mode.PLAIN
    assert faults(engine) == {Fault.CATCH_UP: 1}


def test_near_the_context_limit_nothing_waits_for_lengths_that_nobody_knows():
    """Overlap leaves a verify result outstanding at the second speculative step, and no host-known lengths."""
    engine = flipping_engine(2)
    grow(engine, 2, length=1000 - CHUNK + 1)
    first, second = make_batch(), make_batch()
    for batch in (first, second):
        prepare(engine, batch)
        run(engine, batch)
    assert second.plan.host_seq_lens is None
    assert faults(engine) == {}


@pytest.mark.parametrize(("free_gib", "tokens"), [(4.0, 32), (3.9, 16), (1.0, 8), (0.1, 4)])
def test_fewer_tokens_wait_where_memory_is_short(free_gib, tokens):
    release = FakeRelease()
    release.free = free_gib
    engine = release.engine = AdaptiveEngine(THRESHOLD, release, server_args=None)
    engine.build(worker=None)
    assert release.catch_up_tokens == engine.catch_up_chunk_tokens == tokens


def test_a_number_of_waiting_tokens_that_was_asked_for_is_not_lowered_but_refused():
    release = FakeRelease()
    release.free = 0.1
    settings = Settings(disable_batch_threshold=4, catch_up_tokens=64)
    engine = release.engine = AdaptiveEngine(settings, release, server_args=None)
    with pytest.raises(Refusal, match="64 tokens a request waiting for the draft would take"):
        engine.build(worker=None)


def test_a_chunk_as_long_as_the_context_is_refused():
    with pytest.raises(Refusal, match="1000 tokens are to wait"):
        make_engine(Settings(policy="alternate", catch_up_tokens=1000))


def test_a_failed_plain_step_without_room_to_speculate_is_tried_again():
    engine = make_engine(THRESHOLD)
    engine.release.fits = 0
    batch = make_batch()
    assert prepare(engine, batch) == 1
    failures = iter([RuntimeError("once")])
    original = engine.release.run_plain_decode

    def flaky(*arguments):
        for error in failures:
            raise error
        return original(*arguments)

    engine.release.run_plain_decode = flaky
    assert run(engine, batch).mode is Mode.PLAIN
    assert engine.release.ran == ["plain decode"]
    assert faults(engine) == {Fault.PLAIN_STEP: 1}


def test_a_draft_never_used_again_is_never_brought_up_to_date():
    engine = make_engine(PLAIN)
    grow(engine, 3 * CHUNK)
    assert engine.release.caught_up == []
    engine.before_release(request := leaving(0, 50))
    assert request.kv_committed_len == 50


def test_a_server_that_never_takes_plain_steps_counts_by_results():
    """The patches that decide are off there."""
    engine = make_engine(SPEC)
    batch = make_batch()
    process(engine, batch, SimpleNamespace(mode=Mode.SPEC, tokens=5))
    assert engine.snapshot()["steps"] == {"spec": 1, "plain": 0}
    assert engine.snapshot()["accepted_tokens"] == 5


def test_a_threshold_out_of_reach_is_refused_on_a_running_server():
    engine = make_engine(THRESHOLD)
    with pytest.raises(Refusal, match="out of reach"):
        engine.use({"disable_batch_threshold": 99})
    assert engine.settings == THRESHOLD


# --- times -----------------------------------------------------------------------------------------------


def test_the_first_step_of_a_switch_is_timed():
    engine = make_engine(Settings(policy="alternate", alternate_period_steps=2))
    for _ in range(5):
        step(engine)
    switches = engine.snapshot()["last_switches"]
    assert [(s["step"], s["to"]) for s in switches] == [(2, "plain"), (4, "spec")]
    assert all(s["first_step_seconds"] > 0 for s in switches)


def test_a_switch_behind_a_prefill_has_no_time():
    engine = make_engine(Settings(policy="alternate", alternate_period_steps=2))
    step(engine)
    step(engine)
    run(engine, make_batch(decode=False))
    step(engine)
    assert [s["first_step_seconds"] for s in engine.snapshot()["last_switches"]] == [None]
    assert engine.snapshot()["step_seconds"]["spec"] > 0
    assert engine.snapshot()["step_seconds"]["plain"] is None


# --- start -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("settings", [THRESHOLD, AUTO, EVERY_OTHER])
def test_the_draft_catches_up_with_made_up_requests_at_start_so_that_no_real_one_waits_for_kernels(settings):
    engine = make_engine(settings)
    tokens = engine.catch_up_chunk_tokens
    assert engine.release.warmed_up == [(requests, max(256, tokens), tokens) for requests in (1, 16, MOST_REQUESTS)]
    assert engine.snapshot()["catch_ups"] == 0
    assert faults(engine) == {}


@pytest.mark.parametrize("settings", [PLAIN, SPEC])
def test_a_draft_that_never_catches_up_is_not_warmed_up_for_it(settings):
    assert make_engine(settings).release.warmed_up == []


def test_a_fault_while_warming_up_is_told_and_leaves_both_modes_in_use():
    release = FakeRelease()
    release.catch_up_error = RuntimeError("no kernel")
    engine = release.engine = AdaptiveEngine(AUTO, release, server_args=None)
    engine.build(worker=None)
    assert faults(engine) == {Fault.CATCH_UP: 1}
    assert not engine.controller.spec_only
    assert engine.snapshot()["measured_sizes"] == 4


# --- the policy that measures ----------------------------------------------------------------------------


def test_step_times_are_measured_at_start_on_the_graphs_that_both_modes_have():
    engine = make_engine(AUTO)
    measured = {(row["mode"], row["requests"]): row["start_up_seconds"] for row in engine.snapshot()["step_costs"]}
    # 8 is no plain graph's size, but where the speculative ones end.
    assert measured == {
        (mode.value, requests): pytest.approx(SECONDS[mode] * requests) for mode in Mode for requests in (1, 2, 4, 8)
    }
    assert engine.snapshot()["measured_sizes"] == 4
    assert faults(engine) == {}
    assert engine.snapshot()["steps"] == {"spec": 0, "plain": 0}


@pytest.mark.parametrize("settings", [THRESHOLD, PLAIN, SPEC, EVERY_OTHER])
def test_other_policies_measure_nothing_at_start(settings):
    assert make_engine(settings).snapshot()["step_costs"] == []


def test_a_fault_while_measuring_is_told_and_leaves_the_table_empty_and_both_modes_in_use():
    release = FakeRelease()
    release.measure_error = RuntimeError("no kernel")
    engine = release.engine = AdaptiveEngine(AUTO, release, server_args=None)
    engine.build(worker=None)
    assert engine.snapshot()["step_costs"] == []
    assert faults(engine) == {Fault.MEASUREMENT: 1}
    assert not engine.controller.spec_only
    step(engine)
    assert engine.release.ran == ["sglang"]


def test_speculation_stops_where_its_graphs_do():
    engine = make_engine(AUTO)
    step(engine, requests=9)
    step(engine, requests=9)
    assert engine.release.ran == ["plain decode"] * 2
    assert engine.controller.switches[0].reason is Reason.NO_SPEC_GRAPH


def test_what_serving_takes_reaches_the_policy(monkeypatch):
    engine = make_engine(AUTO)
    heard = []
    monkeypatch.setattr(engine.controller.policy, "note_step", lambda *step: heard.append(step))
    for _ in range(HAND_ON_EVERY_STEPS + 1):
        step(engine, requests=2)
    # The first step follows nothing, and the last one is yet to be heard of.
    told = [(Mode.SPEC, 2, FIRST_LENGTH)] * (HAND_ON_EVERY_STEPS - 1)
    assert [(mode, requests, context) for mode, requests, context, *steps in heard for _ in steps] == told
    assert all(seconds > 0 for _, _, _, *steps in heard for seconds in steps)


def test_a_policy_that_waits_for_what_a_step_shows_hears_of_it_before_the_next(monkeypatch):
    engine = make_engine(AUTO)
    heard = []
    monkeypatch.setattr(engine.controller.policy, "note_verify", lambda *verify: heard.append(verify))
    for attentive, told in ((False, 0), (True, 1), (False, 1), (True, 3)):
        monkeypatch.setattr(type(engine.controller.policy), "attentive", attentive)
        step(engine, requests=2)
        assert sum(len(tokens) for _, *tokens in heard) == told


def test_a_step_whose_result_waits_while_a_prefill_is_launched_teaches_nothing(monkeypatch):
    engine = make_engine(AUTO)
    heard = []
    monkeypatch.setattr(engine.controller.policy, "note_step", lambda *step: heard.append(step))
    for _ in range(2 * HAND_ON_EVERY_STEPS):
        step(engine)
        prepare(engine, batch := make_batch())
        result = run(engine, batch)
        run(engine, make_batch(decode=False))
        process(engine, batch, result)
    assert heard == []


def test_the_context_is_looked_at_anew_after_a_prefill():
    """Another request may have taken the place of one that left: as many, and of another length."""
    engine = make_engine(AUTO)
    looks = []
    engine.release.mean_context_tokens = lambda batch: looks.append(batch) or 100
    for _ in range(5):
        step(engine, requests=2)
    assert len(looks) == 1
    prefill(engine, 8)
    step(engine, requests=2)
    assert len(looks) == 2


@pytest.mark.parametrize("other", [{"min_dwell_steps": 17}, {"dry_run": True}, {"dry_run": False}])
def test_a_hold_lasts_until_somebody_asks_who_decides(other):
    engine = make_engine(AUTO)
    engine.use({"policy": "plain"})
    engine.use(other)
    assert engine.snapshot()["policy"] == "plain"
    assert step(engine) == 1
    assert not engine.controller.dry_run
    engine.use({"policy": "auto"})
    settings = engine.snapshot()["settings"]
    assert {name: settings[name] for name in other} == other


def test_a_threshold_ends_a_hold():
    engine = make_engine(THRESHOLD)
    engine.use({"policy": "plain"})
    engine.use({"disable_batch_threshold": 5})
    assert engine.snapshot()["policy"] == "threshold"


def test_what_one_policy_has_not_heard_the_next_one_does_not():
    engine = make_engine(AUTO)
    for _ in range(HAND_ON_EVERY_STEPS + 3):
        step(engine, requests=2)
    engine.use({"disable_batch_threshold": 3})
    step(engine, requests=2)
    engine.use({"policy": "auto"})
    engine.plan(make_batch(2))
    assert engine.snapshot()["explain"]["accept_length"] is None


def test_step_times_are_kept_while_a_server_that_measures_is_held():
    engine = make_engine(AUTO)
    engine.use({"policy": "plain"})
    for _ in range(2 * HAND_ON_EVERY_STEPS + 1):
        step(engine, requests=2)
    (row,) = (row for row in engine.snapshot()["step_costs"] if row["served_steps"])
    assert (row["mode"], row["requests"], row["served_steps"]) == ("plain", 2, 24)


def test_a_policy_that_goes_by_nothing_measured_is_told_no_times():
    engine = make_engine(THRESHOLD)
    for _ in range(20):
        step(engine, requests=2)
    assert engine.snapshot()["step_costs"] == []


def test_several_ranks_share_step_times_seldom_and_before_a_decision():
    release = FakeRelease()
    release.tp_size = 2
    engine = release.engine = AdaptiveEngine(AUTO, release, server_args=None)
    engine.build(worker=None)
    release.broadcasts.clear()  # of the start
    for _ in range(130):
        step(engine, requests=2)
    assert [sum(len(alike.seconds) for alike in shared) for shared in release.broadcasts] == [63, 64]


def test_a_dry_run_decides_and_reports_and_changes_nothing():
    engine = make_engine(Settings(disable_batch_threshold=4, min_dwell_steps=1, dry_run=True))
    slots = [step(engine, requests) for requests in (2, 9, 9, 2)]
    assert slots == [SGLANG_RESERVE] * 4
    assert engine.release.ran == ["sglang"] * 4
    snapshot = engine.snapshot()
    assert snapshot["dry_run"]
    assert snapshot["mode"] == "spec"
    assert snapshot["steps"] == {"spec": 4, "plain": 0}
    assert snapshot["dry_run_steps"] == {"spec": 2, "plain": 2}
    assert snapshot["switches"] == 2
    assert reserve(engine) == SGLANG_RESERVE


def test_a_dry_run_may_end_on_a_running_server():
    engine = make_engine(Settings(disable_batch_threshold=4, min_dwell_steps=1, dry_run=True))
    step(engine, 9)
    engine.use({"dry_run": False})
    step(engine, 9)
    assert engine.release.ran == ["sglang", "plain decode"]


def saved_costs(path, setup) -> str:
    costs = {"steps": [{"mode": "spec", "requests": 4, "context_tokens": 1024, "seconds": 0.5}]}
    Calibration(setup, costs, None).save(path)
    return str(path)


def test_saved_step_times_are_used_instead_of_measuring(tmp_path):
    path = saved_costs(tmp_path / "costs.json", {"model": "a model"})
    engine = make_engine(Settings(costs=path))
    (row,) = engine.snapshot()["step_costs"]
    assert row["start_up_seconds"] == 0.5
    assert engine.costs_origin == f"step times from {path}"


def test_step_times_of_another_setup_are_refused_before_graphs_are_captured(tmp_path):
    path = saved_costs(tmp_path / "costs.json", {"model": "another"})
    engine = make_engine(Settings(costs=path), built=False)
    with pytest.raises(Refusal, match="model: 'another' there, 'a model' here"):
        engine.build(worker=None)
    assert engine.release.catch_up_tokens == "not asked"


# --- telemetry -------------------------------------------------------------------------------------------


class Listener:
    """What an engine publishes with."""

    def __init__(self, snapshot, on_fault):
        self.snapshot, self.on_fault, self.ticks = snapshot, on_fault, 0

    def tick(self):
        self.ticks += 1


def test_every_processed_step_is_told_to_what_publishes_them():
    engine = make_engine(THRESHOLD)
    engine.publish_with(Listener)
    step(engine)
    assert engine.telemetry.ticks == 1
    assert engine.telemetry.snapshot()["steps"]["spec"] == 1


def test_a_fault_of_telemetry_ends_no_switching():
    engine = make_engine(THRESHOLD)
    engine.publish_with(Listener)
    for _ in range(MOST_FAULTS):
        engine.telemetry.on_fault(OSError("disk full"))
    assert faults(engine) == {Fault.TELEMETRY: MOST_FAULTS}
    assert not engine.controller.spec_only


def test_a_server_without_metrics_publishes_nothing():
    engine = make_engine(THRESHOLD)
    engine.publish_with(None)
    step(engine)
    assert engine.telemetry is None

"""To 0.5.12 the worker gets a copy of the batch: what was decided goes with it, and slots are what was asked for."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.engine.steps import StepPlan
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.releases import families

OLDER = ["Sglang0511", "Sglang0512"]


@pytest.fixture(params=OLDER)
def adapter(request):
    return families.load_adapter(request.param)


def request_of(committed: int, allocated: int, row: int = 0) -> SimpleNamespace:
    return SimpleNamespace(kv_committed_len=committed, kv_allocated_len=allocated, req_pool_idx=row)


def sglang_prepares(batch: SimpleNamespace, half_reserve: int) -> None:
    """What preparation does with lengths; 0.5.11 does so without max(), which is the harder case."""
    for req in batch.reqs:
        slots = req.kv_committed_len + 2 * half_reserve - req.kv_allocated_len
        assert slots >= 0, "less than is allocated already"
        req.kv_allocated_len += slots
        req.kv_committed_len += 1


@pytest.mark.parametrize("reserve_tokens", [1, 4, 5])
def test_a_plain_step_allocates_what_it_needs_and_gives_nothing_back(adapter, reserve_tokens):
    batch = SimpleNamespace(reqs=[request_of(7, 7), request_of(7, 8), request_of(7, 30)])
    # As the wrapped function answers.
    half_reserve = -(-reserve_tokens // adapter.reserve_times)
    adapter.prepare_reserving(batch, reserve_tokens, lambda batch: sglang_prepares(batch, half_reserve))
    assert [req.kv_allocated_len for req in batch.reqs] == [max(each, 7 + reserve_tokens) for each in (7, 8, 30)]
    assert [req.kv_committed_len for req in batch.reqs] == [8, 8, 8]


def test_a_speculative_step_allocates_what_sglang_says(adapter):
    batch = SimpleNamespace(reqs=[request_of(7, 9)])
    adapter.prepare_reserving(batch, None, lambda batch: sglang_prepares(batch, 4))
    assert (batch.reqs[0].kv_allocated_len, batch.reqs[0].kv_committed_len) == (15, 8)


def test_a_failed_preparation_leaves_lengths_as_they_were(adapter):
    batch = SimpleNamespace(reqs=[request_of(7, 7)])

    def out_of_memory(_):
        raise RuntimeError

    with pytest.raises(RuntimeError):
        adapter.prepare_reserving(batch, 1, out_of_memory)
    assert batch.reqs[0].kv_committed_len == 7


def prepared(adapter, mode: Mode) -> SimpleNamespace:
    batch = SimpleNamespace(
        reqs=[request_of(7, 9, row=3), request_of(9, 9, row=5)],
        seq_lens=torch.tensor([7, 9]),
        req_pool_indices=torch.tensor([3, 5]),
        req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(6 * 12, dtype=torch.int32).view(6, 12)),
    )
    adapter.stamp(batch, StepPlan(mode, 2))
    adapter.prepare_reserving(batch, None, lambda _: None)
    return batch


@pytest.mark.parametrize("mode", Mode)
def test_the_copy_says_what_was_decided_for_the_batch(adapter, mode):
    batch = prepared(adapter, mode)
    copied = SimpleNamespace(reqs=batch.reqs)
    adapter.carry(batch, copied)
    assert adapter.plan_of(copied) is adapter.plan_of(batch)


def test_the_copy_knows_the_rows_of_requests_that_have_left_since(adapter):
    batch = prepared(adapter, Mode.SPEC)
    # A grammar: the step before is processed between this one's preparation and its launch.
    batch.reqs[0].req_pool_idx = None
    copied = SimpleNamespace(reqs=batch.reqs)
    adapter.carry(batch, copied)
    assert adapter.rows(copied).tolist() == [3, 5]


def test_a_prefill_has_the_rows_of_its_requests(adapter):
    copied = SimpleNamespace(reqs=[request_of(0, 0, row=2)])
    adapter.carry(SimpleNamespace(), copied)
    assert adapter.rows(copied).tolist() == [2]
    assert adapter.plan_of(copied) is None


def test_lengths_behind_a_plain_step_are_made_before_it_runs(adapter):
    """On the scheduler's stream, so nothing has to be waited for."""
    batch = prepared(adapter, Mode.PLAIN)
    copied = SimpleNamespace(reqs=batch.reqs, seq_lens=batch.seq_lens)
    adapter.carry(batch, copied)
    lengths = adapter._next_lengths(copied)
    assert lengths is adapter._next_lengths(copied)
    draft_input = SimpleNamespace(verify_done="an event of the verify step before")
    adapter._hand_on(draft_input, "tokens", lengths)
    assert (draft_input.new_seq_lens.tolist(), draft_input.verify_done) == ([8, 10], None)
    assert getattr(draft_input, adapter.last_tokens) == "tokens"


def test_a_plain_steps_slots_are_those_of_its_launch(adapter):
    """Whatever the scheduler puts into a row afterwards, while the step is still to run."""
    batch = prepared(adapter, Mode.PLAIN)
    copied = SimpleNamespace(reqs=batch.reqs)
    adapter.carry(batch, copied)
    pool = batch.req_to_token_pool
    pool.req_to_token[3] = 0
    assert adapter._slots(copied, pool).tolist() == [3 * 12 + 7, 5 * 12 + 9]


def test_what_needs_the_batch_itself_finds_it_behind_the_copy(adapter):
    adapter._spec_reserve_tokens = 8
    pool = SimpleNamespace(available_size=lambda: 64, page_size=1)
    batch = prepared(adapter, Mode.PLAIN)
    batch.token_to_kv_pool_allocator, batch.sampling_info = pool, "sampling"
    copied = SimpleNamespace(reqs=batch.reqs)
    adapter.carry(batch, copied)
    assert adapter.spec_steps_that_fit(copied) == 64 // (2 * 9)

    instead = StepPlan(Mode.SPEC, 2)
    adapter.stamp(copied, instead)
    for req in batch.reqs:
        req.decode_batch_idx = 1
    seen = []
    adapter.reserve_for_spec(None, copied, seen.append)
    assert seen == [batch]
    assert adapter.plan_of(batch) is instead
    assert batch.sampling_info == "sampling"


ARGUMENTS = {"speculative_eagle_topk": 1, "disable_overlap_schedule": False}


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({}, None),
        # SGLang switches the overlap schedule off for a tree.
        ({"speculative_eagle_topk": 4, "disable_overlap_schedule": True}, "--speculative-eagle-topk above 1 is"),
        ({"disable_overlap_schedule": True}, "--disable-overlap-schedule, or SGLANG_ENABLE_SPEC_V2=0, is"),
    ],
)
def test_what_an_older_worker_would_run_is_refused(adapter, given, refused, monkeypatch):
    monkeypatch.setattr("sglang_adaptive_spec.releases.refusals_0_5_14.UNSERVED_MODELS", ())
    others = {feature.flag for feature in families.load_adapter("Sglang0513").unserved}
    adapter.unserved = tuple(feature for feature in adapter.unserved if feature.flag not in others)
    graphs = SimpleNamespace(decode=SimpleNamespace(backend="disabled", bs=None))
    rest = {"speculative_algorithm": "EAGLE3", "cuda_graph_config": graphs, "max_running_requests": None}
    arguments = SimpleNamespace(**rest, **(ARGUMENTS | given))
    settings = Settings.from_mapping({"policy": "plain"})
    if refused is None:
        adapter.preflight(arguments, settings)
        return
    with pytest.raises(Refusal, match=r"0\.5\.13") as caught:
        adapter.preflight(arguments, settings)
    assert f"{refused} not served" in str(caught.value)

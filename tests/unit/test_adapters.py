"""Where families differ: who commits a plain step's token, and where a request keeps its lengths."""

import sys
from functools import wraps
from types import SimpleNamespace

import pytest
import torch

from sglang_adaptive_spec.engine.steps import StepPlan
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.releases import families
from sglang_adaptive_spec.releases.arguments import Arguments

COMMITTED_BY_SGLANG = {"Sglang0511", "Sglang0512", "Sglang0513", "Sglang0514"}
KV_APART = {"Sglang0519"}


@pytest.fixture(params=families.ADAPTERS)
def adapter(request):
    return families.load_adapter(request.param)


def requests(adapter, *lengths: int) -> list[SimpleNamespace]:
    kept = [SimpleNamespace(kv_committed_len=length, req_pool_idx=row) for row, length in enumerate(lengths)]
    apart = type(adapter).__name__ in KV_APART
    return [SimpleNamespace(kv=kv) if apart else kv for kv in kept]


def lengths(batch) -> list[int]:
    return [getattr(req, "kv", req).kv_committed_len for req in batch.reqs]


def prepared(adapter, mode: Mode) -> SimpleNamespace:
    """A batch whose two requests had 5 and 9 positions committed, after its preparation in a mode."""
    batch = SimpleNamespace(reqs=requests(adapter, 5, 9))
    adapter.stamp(batch, StepPlan(mode, 2))
    if type(adapter).__name__ in COMMITTED_BY_SGLANG:
        for req in batch.reqs:
            req.kv_committed_len += 1
    if mode is Mode.PLAIN:
        adapter.claim(batch)
    return batch


def test_a_prepared_plain_step_has_its_token_committed_once(adapter):
    assert lengths(prepared(adapter, Mode.PLAIN)) == [6, 10]


@pytest.mark.parametrize("mode", Mode)
def test_the_host_knows_the_lengths_before_the_step(adapter, mode):
    assert adapter.host_seq_lens(prepared(adapter, mode)).tolist() == [5, 9]


def test_preparing_a_plain_step_once_more_for_speculation_leaves_what_speculation_commits(adapter):
    batch = prepared(adapter, Mode.PLAIN)
    batch.sampling_info = None
    for req in batch.reqs:
        req.decode_batch_idx = 1

    def prepare(batch):
        for req in batch.reqs:
            req.decode_batch_idx += 1
            if type(adapter).__name__ in COMMITTED_BY_SGLANG:
                req.kv_committed_len += 1

    adapter.reserve_for_spec(None, batch, prepare)
    assert lengths(batch) == ([6, 10] if type(adapter).__name__ in COMMITTED_BY_SGLANG else [5, 9])
    assert [req.decode_batch_idx for req in batch.reqs] == [1, 1]


def test_who_has_ended_before_a_step_is_prepared_once_more_gets_no_slots(adapter):
    batch = prepared(adapter, Mode.PLAIN)
    batch.sampling_info = None
    batch.req_pool_indices = batch.req_pool_indices_cpu = batch.adaptive_spec_rows = torch.tensor([1, 2])
    pool = SimpleNamespace(req_to_token=torch.ones((3, 16), dtype=torch.int32))
    adapter._kv(batch.reqs[1]).req_pool_idx = None
    for req in batch.reqs:
        req.decode_batch_idx = 1
    before, seen = lengths(batch), []
    adapter.reserve_for_spec(SimpleNamespace(req_to_token_pool=pool), batch, lambda batch: seen.extend(lengths(batch)))
    assert seen[0] == before[0]
    # However few slots it holds.
    assert seen[1] + 2**20 < 0
    assert lengths(batch) == [length - 1 for length in before]
    assert pool.req_to_token.sum(1).tolist() == [16, 16, 0]


def test_a_leaving_request_keeps_what_the_draft_has_seen(adapter):
    (req,) = requests(adapter, 9)
    adapter.limit_committed(req, lambda row, length: length - 4)
    assert lengths(SimpleNamespace(reqs=[req])) == [5]


@pytest.mark.parametrize("name", families.ADAPTERS)
def test_a_plain_step_behind_a_verify_step_has_room_for_whatever_that_accepts(name, monkeypatch):
    """SGLang to 0.5.14 has committed one slot of the verify step in advance, so the reserve counts from there."""
    adapter = families.load_adapter(name)
    monkeypatch.setattr(type(adapter), "arguments", lambda self, arguments: arguments)
    most = adapter.most_accepted_tokens(SimpleNamespace(speculative_num_steps=3))
    committed = 5 + (name in COMMITTED_BY_SGLANG)
    position_of_the_plain_token = 5 + 3 + 1
    assert committed + most >= position_of_the_plain_token + 1


def test_arguments_can_be_seen_with_other_values_and_stay_as_they_are():
    own = SimpleNamespace(steps=3, topk=1)
    seen = Arguments(own, {"topk": None})
    assert (seen.steps, seen.topk) == (3, None)
    assert own.topk == 1


@pytest.mark.parametrize(
    ("free", "by_sglangs_count", "steps"),
    [(72, False, 3), (71, False, 2), (24, False, 1), (23, True, 1), (23, False, 0), (0, False, 0)],
)
def test_steps_fit_as_long_as_each_may_take_its_reserve_and_a_page(adapter, free, by_sglangs_count, steps):
    adapter._spec_reserve_tokens = 8
    pool = SimpleNamespace(available_size=lambda: free, page_size=4)
    batch = SimpleNamespace(
        reqs=[None, None], token_to_kv_pool_allocator=pool, check_decode_mem=lambda: by_sglangs_count
    )
    assert adapter.spec_steps_that_fit(batch) == steps


def test_what_speculation_reserves_is_sglangs_own_number(adapter, monkeypatch):
    """Not that of the wrapped names, which answer for the mode that a batch may run in."""

    def half():
        return 4

    @wraps(half)
    def wrapped():
        return 1

    # To 0.5.12 the function itself is wrapped, and the reserve is twice its answer.
    stand_in = SimpleNamespace(get_alloc_len_per_decode=wrapped)
    monkeypatch.setitem(sys.modules, "sglang.srt.managers.utils", stand_in)
    for module, tokens in (("mem_cache.common", 8), ("mem_cache.allocation_sizing", 8), ("managers.schedule_batch", 1)):
        stand_in = SimpleNamespace(get_alloc_reserve_per_decode=lambda tokens=tokens: tokens)
        monkeypatch.setitem(sys.modules, f"sglang.srt.{module}", stand_in)
    assert adapter._spec_reserve_tokens == 8


@pytest.mark.parametrize(
    ("graphs", "returns_hidden", "seen"),
    [(True, False, ("FULL", "graphs")), (False, False, (None, None)), (True, True, (None, None))],
)
def test_prefills_of_the_policy_plain_replay_sglangs_graphs_unless_clients_get_hidden_states(
    adapter, monkeypatch, graphs, returns_hidden, seen
):
    """Captured with the states that the draft reads, they fit a prefill that asks for these."""
    if not adapter.plain_prefills_by_graph:
        pytest.skip("prefills of the policy plain run eagerly there")
    ran = []

    def forward(batch, capture_hidden_mode=None):
        mode = capture_hidden_mode or getattr(batch, "capture_hidden_mode", None)
        ran.append((mode if mode is None else mode.name, getattr(runner, adapter.prefill_graphs)))
        return SimpleNamespace(logits_output=SimpleNamespace(hidden_states="states"))

    args = SimpleNamespace(enable_return_hidden_states=returns_hidden)
    monkeypatch.setattr(type(adapter), "arguments", lambda self, server_args: args)
    monkeypatch.setattr(type(adapter), "_undrafted", lambda self, worker, batch, publish, result: result)
    monkeypatch.setattr(type(adapter), "_no_algorithm", None, raising=False)
    runner = SimpleNamespace(server_args=args, model=torch.nn.Linear(1, 1), **{adapter.prefill_graphs: "graphs"})
    draft = SimpleNamespace(**{adapter.prefill_graphs: "graphs" if graphs else None})
    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=runner, forward_batch_generation=forward),
        draft_worker=SimpleNamespace(draft_runner=draft),
    )
    batch = SimpleNamespace(**dict.fromkeys((*adapter.step_fields, "spec_info", "spec_algorithm")))
    result = adapter.run_plain_prefill(worker, batch, None)
    assert ran == [seen]
    assert (result.logits_output.hidden_states is None) is (seen[1] is not None)
    assert getattr(runner, adapter.prefill_graphs) == "graphs"

"""The draft comes back warm: a plain phase costs no acceptance afterwards, not even through the radix cache."""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import mean

import pytest

from tests.engine.acceptance import (
    AFTER_TOKENS,
    LEAST_RATIO,
    LONG,
    SHORT,
    THRESHOLD,
    accept_length,
    after_a_plain_phase,
    generate,
    generate_all,
    held_plain_until_all_decode,
    prefilled_during_a_plain_phase,
    running,
    through_the_radix_cache,
    token_ids,
)
from tests.engine.load import Request, differences, run_load
from tests.engine.saboteur import install
from tests.engine.serving import CHAIN, CHAINS_ONLY, MODELS, PROMPTS_MAY_WAIT, SPECULATION, TREE, Server, serve
from tests.models.mimo import write_mimo
from tests.models.prompts import heldout_prompts

pytestmark = pytest.mark.engine

NEVER_CATCHES_UP = """
def register():
    from sglang_adaptive_spec.releases.sglang_0_5_14 import Sglang0514
    Sglang0514.catch_up = lambda self, *arguments, drafts_next: arguments[-1][1]
"""
# Lets the draft read each prompt at once as well, spoils what it wrote, and compares with what it writes later on.
READS_TWICE = """
def register():
    import copy
    from sglang_adaptive_spec.releases.sglang_0_5_14 import Sglang0514
    ahead, read, wanted = Sglang0514.run_prefill_ahead_of_draft, Sglang0514.read_prompts, []

    def states(worker):
        pool = worker.draft_worker.draft_runner.token_to_kv_pool
        return pool.get_key_buffer(0), pool.get_value_buffer(0)

    def run_ahead(self, worker, runtime, batch, publish):
        answer = ahead(self, worker, runtime, batch, publish)
        prompts, slots = answer[1], batch.out_cache_loc.clone()
        once = copy.copy(prompts.batch)
        once.input_ids, once.chunked_req_next_prompt_token = once.input_ids.clone(), None
        with self._draft_contexts(worker.draft_worker):
            worker.draft_worker._draft_extend_for_prefill(once, prompts.hidden, prompts.tails)
        wanted.append((slots, [each[slots].clone() for each in states(worker)]))
        for each in states(worker):
            each[slots] = 7.0
        return answer

    def read_all(self, worker, runtime, prompts, left):
        read(self, worker, runtime, prompts, left)
        for slots, before in wanted:
            off = max(float((a - b[slots]).abs().max()) for a, b in zip(before, states(worker)))
            print(f"witness: {len(slots)} positions off by {off:.1e}", flush=True)
        wanted.clear()

    Sglang0514.run_prefill_ahead_of_draft, Sglang0514.read_prompts = run_ahead, read_all
"""


SHAPES = {"chain": CHAIN} if CHAINS_ONLY else {"chain": CHAIN, "tree": TREE}


@pytest.fixture(scope="module", params=SHAPES.values(), ids=SHAPES)
def server(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    log = tmp_path_factory.mktemp("draft") / "log"
    with serve(log, [*SPECULATION, *request.param], settings=THRESHOLD) as server:
        yield server
        assert server.state()["faults"] == 0


@pytest.fixture(scope="module", params=["EAGLE", "MTP"])
def of_another_kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    """Drafts that read the target's last states: a model of its own, and a layer of the target's checkpoint."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "EAGLE":
        kind = ["--speculative-algorithm=EAGLE", f"--speculative-draft-model-path={MODELS / 'draft_eagle'}"]
    else:
        kind = ["--speculative-algorithm=NEXTN", f"--model-path={write_mimo(folder / 'mimo')}"]
    arguments = [*kind, "--speculative-num-steps=3", *CHAIN]
    with serve(folder / "log", arguments, settings=THRESHOLD) as server:
        yield server
        assert server.state()["faults"] == 0


@pytest.mark.supports("Models and drafts", "EAGLE-3", since="0.1.0")
@pytest.mark.parametrize("steps", [5, 64, 500])
def test_a_plain_phase_costs_no_acceptance(server: Server, steps: int) -> None:
    assert after_a_plain_phase(server, steps) >= LEAST_RATIO


def test_requests_prefilled_during_a_plain_phase_draft_as_well(server: Server) -> None:
    assert prefilled_during_a_plain_phase(server) >= LEAST_RATIO


@pytest.mark.supports("Allocation and cache", "radix cache, prefixes found in it", since="0.1.0")
def test_a_prefix_generated_in_plain_steps_costs_no_acceptance(server: Server) -> None:
    assert through_the_radix_cache(server) >= LEAST_RATIO


def test_drafts_of_other_kinds_come_back_warm(of_another_kind: Server) -> None:
    assert after_a_plain_phase(of_another_kind, 64) >= LEAST_RATIO
    assert prefilled_during_a_plain_phase(of_another_kind) >= LEAST_RATIO
    assert through_the_radix_cache(of_another_kind) >= LEAST_RATIO


@pytest.mark.supports("Models and drafts", "EAGLE, and a layer of the target's checkpoint (MTP, NEXTN)", since="0.1.0")
def test_drafts_of_other_kinds_change_no_token(
    of_another_kind: Server, load: list[Request], reference: list[list[int]]
) -> None:
    """The target is the same in all kinds of pairs, so the tokens are."""
    assert of_another_kind.use(policy="alternate", alternate_period_steps=3)
    before = of_another_kind.state()["steps"]
    assert differences(load, reference, run_load(of_another_kind, load)) == []
    after = of_another_kind.state()["steps"]
    assert min(after[mode] - before[mode] for mode in after) >= 6, "too few steps in one of the modes to show anything"
    assert of_another_kind.use(**THRESHOLD)
    assert of_another_kind.used_tokens() == 0


@pytest.mark.supports(
    "Control", "weights updated from disk under way", since="0.1.0", note="not `recapture_cuda_graph`"
)
@pytest.mark.parametrize("of_another_kind", ["MTP"], indirect=True)
def test_weights_can_be_updated_between_flips(
    of_another_kind: Server, load: list[Request], reference: list[list[int]]
) -> None:
    """With MTP: SGLang reads the weights of target and draft from the one checkpoint."""
    server = of_another_kind
    assert server.use(policy="alternate", alternate_period_steps=3)
    path = server.client.get("/get_model_info").raise_for_status().json()["model_path"]
    before = server.state()["steps"]
    with ThreadPoolExecutor(1) as pool:
        running = pool.submit(run_load, server, load)
        updated = server.client.post("/update_weights_from_disk", json={"model_path": path})
        assert updated.json()["success"], updated.text
        assert differences(load, reference, running.result()) == []
    assert differences(load, reference, run_load(server, load)) == []
    after = server.state()["steps"]
    assert min(after[mode] - before[mode] for mode in after) >= 6
    assert server.use(**THRESHOLD)
    assert server.used_tokens() == 0


@pytest.mark.soak
def test_without_the_catch_up_acceptance_is_lost(tmp_path: Path) -> None:
    """What the tests above would say if nothing kept the draft true."""
    env = install(tmp_path / "saboteur", NEVER_CATCHES_UP)
    with serve(tmp_path / "log", [*SPECULATION, *CHAIN], settings=THRESHOLD, env=env) as server:
        lost = {"64 steps": after_a_plain_phase(server, 64), "radix": through_the_radix_cache(server)}
    assert max(lost.values()) < LEAST_RATIO, lost


@pytest.mark.skipif(not PROMPTS_MAY_WAIT, reason="here the draft reads each prompt at once")
@pytest.mark.parametrize(
    "layout", [CHAIN, (*TREE, "--page-size=16", "--attention-backend=triton")], ids=["chain", "tree-page16"]
)
def test_the_draft_writes_later_what_it_would_have_written_at_once(layout: tuple[str, ...], tmp_path: Path) -> None:
    """Held against each other directly: a tiny draft's acceptance hardly depends on the prompt."""
    env = install(tmp_path / "saboteur", READS_TWICE)
    arguments = [*SPECULATION, *layout, "--prefill-max-requests=1"]
    with serve(tmp_path / "log", arguments, settings=THRESHOLD, env=env) as server:
        # Few tokens, so that all may wait however they come; and nothing in common, or one of two that come together
        # gives its KV slots back and nobody writes there any more. The second time with a prefix in the radix cache.
        texts = [token_ids(text)[:19] for text in heldout_prompts(LONG + SHORT, seed=9)]
        for tokens in (8, 20):
            held_plain_until_all_decode(server, [[100 + i, *ids][:tokens] for i, ids in enumerate(texts)])
        # The mode is that of the last step, and the requests may all have ended in plain mode.
        generate(server, [3, 4], 2)
        waited = server.state()["deferred_prompts"]
        # Never more than speculate. One of them does so already, and all but the next follow on another prefill.
        at_once = [([200 + i, *ids], AFTER_TOKENS) for i, ids in enumerate(texts[SHORT:])]
        assert server.use(**THRESHOLD)
        plain_steps = server.state()["steps"]["plain"]
        with ThreadPoolExecutor(1) as pool:
            older = pool.submit(generate, server, [300], 900)
            while not running(server):
                assert not older.done()
            behind_others = generate_all(server, at_once)
            assert not older.done()
            older.result()
        state = server.state()
        found = re.findall(r"witness: (\d+) positions off by (\S+)", server.log)
        server.used_tokens()
        assert server.use(policy="spec")
        as_sglang_would = generate_all(server, at_once)
        assert server.state()["deferred_prompts"] == state["deferred_prompts"]
    assert state["faults"] == 0
    assert waited >= 2 * len(texts)
    assert (state["deferred_prompts"] - waited, state["steps"]["plain"]) == (len(at_once) - 1, plain_steps)
    kept, whole = (mean(map(accept_length, answers)) for answers in (behind_others, as_sglang_would))
    assert kept >= LEAST_RATIO * whole
    # More than the first time alone gives. A generated token may lengthen a prefix by chance.
    assert sum(int(positions) for positions, _ in found) > 12 * len(texts)
    # States go up to 30, and products of few rows are summed in another order.
    assert max(float(off) for _, off in found) < 1e-4

"""The CPU engine itself: its kernels against definitions, and greedy tokens with and without speculation.

Everything that the other engine tests say rests on this one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from sglang_cpu_engine import random_models
from sglang_cpu_engine.attention import plan as planning
from sglang_cpu_engine.attention.attend import attend
from sglang_cpu_engine.kernels import accept, cache_locs, grammar, pages, sampling, tree

from tests.engine.serving import Server, serve

# ---- start-up


def _run_python(code: str, **env: str) -> str:
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env={**os.environ, **env}, check=True, capture_output=True, text=True).stdout.strip()


def test_start_up_sets_the_environment_and_imports_nothing_heavy() -> None:
    heavy = "sorted({'torch', 'sglang', 'ctypes', 'numpy', 'wrapt'} & set(sys.modules))"
    env = {name: value for name, value in os.environ.items() if name not in ("TRITON_INTERPRET", "SGLANG_CPU_ENGINE")}
    code = f"import os, sys; print(os.environ['TRITON_INTERPRET'], {heavy})"
    command = [sys.executable, "-c", code]
    assert subprocess.run(command, env=env, check=True, capture_output=True, text=True).stdout.strip() == "1 []"


def test_the_engine_can_be_switched_off() -> None:
    code = "import sys; print(sum('PostImportFinder' in repr(finder) for finder in sys.meta_path))"
    assert _run_python(code, SGLANG_CPU_ENGINE="0") == "0"
    assert _run_python(code, SGLANG_CPU_ENGINE="1") == "1"


# ---- tree: root 0; children 1 and 2 (candidates 0 and 1 of the first step); node 3 continues node 2
#      (candidate 4: beam 1 + 1, so the third beam, is the second beam's first child), node 4 continues node 3

TOPK, DEPTH, NODES = 2, 3, 5
# Beam b > 0 continues candidate PARENTS[b]: beams 1, 2 after the first step are candidates 0, 1; beams 3, 4
# after the second are candidates 2 + 2 and 2 + 0.
PARENTS = torch.tensor([[-1, 0, 1, 4, 2]])
SELECTED = torch.tensor([[0, 1, 4, 6]])
PARENT_OF = [0, 0, 0, 2, 3]


def _build(seq_lens: list[int]) -> dict[str, torch.Tensor]:
    bs, lengths = len(seq_lens), torch.tensor(seq_lens)
    out = {
        "mask": torch.full((int((lengths + NODES).sum()) * NODES,), True),
        "positions": torch.empty(bs * NODES, dtype=torch.long),
        "index": torch.full((bs, NODES), -1),
        "next": torch.full((bs, NODES), -1),
        "sibling": torch.full((bs, NODES), -1),
    }
    tree.build_tree(PARENTS.repeat(bs, 1), SELECTED.repeat(bs, 1), lengths, *out.values(), TOPK, DEPTH, NODES)
    return out


def test_tree_links_parents_to_children_in_order() -> None:
    out = _build([3, 7])
    assert out["next"].tolist() == [[1, -1, 3, 4, -1]] * 2
    assert out["sibling"].tolist() == [[-1, 2, -1, -1, -1]] * 2
    assert out["index"].flatten().tolist() == list(range(10))
    assert out["positions"].tolist() == [3, 4, 4, 5, 6, 7, 8, 8, 9, 10]


def test_tree_mask_shows_the_prefix_and_the_ancestors() -> None:
    seq_lens = [3, 7]
    mask = _build(seq_lens)["mask"]
    for seq_len, block in zip(seq_lens, mask.split([(s + NODES) * NODES for s in seq_lens]), strict=True):
        rows = block.view(NODES, seq_len + NODES)
        assert rows[:, :seq_len].all()
        for node in range(NODES):
            seen, ancestor = {node}, node
            while ancestor:
                ancestor = PARENT_OF[ancestor]
                seen.add(ancestor)
            assert rows[node, seq_len:].nonzero().flatten().tolist() == sorted(seen)


def test_greedy_verification_follows_the_targets_choices() -> None:
    out = _build([3, 7])
    candidates = torch.tensor([[10, 11, 12, 13, 14]] * 2)
    # first request: 12 after the root, 13 after that, then something else; second request: nothing fits
    choice = torch.tensor([[12, 0, 13, 99, 0], [55, 12, 13, 14, 0]])
    predicts = torch.zeros(10, dtype=torch.int32)
    accept_index = torch.full((2, DEPTH + 1), -1, dtype=torch.int32)
    accepted = torch.zeros(2, dtype=torch.int32)
    tree.verify_tree_greedy(
        predicts, accept_index, accepted, candidates, out["index"], out["next"], out["sibling"], choice
    )
    assert accept_index.tolist() == [[0, 2, 3, -1], [5, -1, -1, -1]]
    assert accepted.tolist() == [2, 0]
    assert predicts[[0, 2, 3]].tolist() == [12, 13, 99]
    assert predicts[5] == 55


# ---- sampling


def test_renormalized_probabilities_keep_the_likeliest_tokens() -> None:
    probs = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
    torch.testing.assert_close(
        sampling.top_k_renorm_prob(probs, torch.tensor([2])), torch.tensor([[0, 4 / 7, 3 / 7, 0]])
    )
    torch.testing.assert_close(sampling.top_k_renorm_prob(probs, torch.tensor([1 << 30])), probs)
    torch.testing.assert_close(
        sampling.top_p_renorm_prob(probs, torch.tensor([0.6])), torch.tensor([[0, 4 / 7, 3 / 7, 0]])
    )
    torch.testing.assert_close(sampling.top_p_renorm_prob(probs, torch.tensor([1.0])), probs)


def test_tree_sampling_draws_the_first_token_from_the_target_distribution() -> None:
    bs = 4000
    generator = torch.Generator().manual_seed(0)
    out = _build([1] * bs)
    candidates = torch.tensor([[0, 1, 2, 1, 0]] * bs)
    target = torch.tensor([0.1, 0.5, 0.15, 0.25]).expand(bs, NODES, 4).clone()
    predicts = torch.zeros(bs * NODES, dtype=torch.int32)
    sampling.tree_speculative_sampling(
        predicts,
        torch.full((bs, DEPTH + 1), -1, dtype=torch.int32),
        torch.zeros(bs, dtype=torch.int32),
        candidates,
        out["index"],
        out["next"],
        out["sibling"],
        torch.rand(bs, NODES, generator=generator),
        torch.rand(bs, generator=generator),
        target,
        torch.zeros_like(target),
    )
    drawn = predicts.view(bs, NODES)[:, 0].bincount(minlength=4) / bs
    torch.testing.assert_close(drawn, target[0, 0], atol=0.03, rtol=0)


def test_grammar_mask_forbids_tokens_whose_bit_is_clear() -> None:
    logits = torch.zeros(1, 40)
    grammar.apply_vocab_mask(logits, torch.tensor([[0b101, -1]], dtype=torch.int32))
    assert (logits[0] == 0).nonzero().flatten().tolist() == [0, 2, *range(32, 40)]


# ---- KV slots


@pytest.mark.parametrize("page_size", [4, 16])
def test_page_allocation_fills_begun_pages_first(page_size: int) -> None:
    generator = torch.Generator().manual_seed(page_size)
    prefix = torch.randint(0, 40, (8,), generator=generator)
    seq_lens = prefix + torch.randint(0, 40, (8,), generator=generator)
    last_loc = torch.where(prefix > 0, 1000 * page_size * (torch.arange(8) + 1) + (prefix - 1) % page_size, -1)
    free = 1 + torch.randperm(200, generator=generator)
    out = torch.empty(int((seq_lens - prefix).sum()), dtype=torch.long)
    pages.alloc_extend(prefix, seq_lens, last_loc, free, out, 8, page_size)

    unused = free.tolist()
    expected = []
    for start, end, last in zip(prefix.tolist(), seq_lens.tolist(), last_loc.tolist(), strict=True):
        slot = last
        for position in range(start, end):
            slot = slot + 1 if position % page_size else unused.pop(0) * page_size
            expected.append(slot)
    assert out.tolist() == expected


def test_cache_locations_are_written_and_read_per_request() -> None:
    table = torch.zeros(4, 10, dtype=torch.int32)
    rows, start, end = torch.tensor([2, 0]), torch.tensor([1, 4]), torch.tensor([3, 4])
    cache_locs.assign_req_to_token_pool(rows, table, start, end, torch.tensor([7, 8]))
    assert table.nonzero().tolist() == [[2, 1], [2, 2]]
    got = cache_locs.make_extend_cache_locs(rows, table, torch.tensor([1, 0]), torch.tensor([3, 2]), 2, 2, "cpu")
    assert got.tolist() == [7, 8, 0, 0]
    assert cache_locs.get_last_loc(table, rows, torch.tensor([2, 0])).tolist() == [7, -1]


def test_accepted_tokens_and_slots_move_to_the_front() -> None:
    bonus = torch.empty(2, dtype=torch.int32)
    accept.fill_bonus_tokens(torch.tensor([[1, 2, 3], [4, 5, 6]]), torch.tensor([3, 1]), bonus, 3)
    assert bonus.tolist() == [3, 4]
    slots = torch.zeros(4, dtype=torch.long)
    accept.fill_accept_out_cache_loc(torch.tensor([[0, -1], [3, 2]]), torch.arange(10, 14), slots, 4)
    assert slots.tolist() == [10, 13, 12, 0]


# ---- attention

HEADS, KV_HEADS, DIM, SCALE = 4, 2, 8, 0.3


def _naive_attention(query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """One query, [heads, dim], over all of keys and values, [n, kv_heads, dim]."""
    group = HEADS // KV_HEADS
    heads = []
    for head in range(HEADS):
        weights = torch.softmax(keys[:, head // group] @ query[head] * SCALE, 0)
        heads.append(weights @ values[:, head // group])
    return torch.cat(heads)


def _pools(slots: int = 200) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Keys, values, and a request-to-token table of 3 requests whose slots are in no order."""
    generator = torch.Generator().manual_seed(0)
    keys, values = torch.randn(2, slots, KV_HEADS, DIM, generator=generator).unbind()
    return keys, values, torch.randperm(slots, generator=generator)[:180].view(3, 60).int()


def _check(plan: planning.Plan, table: torch.Tensor, seen: list[list[tuple[int, int]]]) -> None:
    """`seen`: for each query, the (row, position) pairs that it may attend to."""
    keys, values, _ = _pools()
    query = torch.randn(len(seen) + 1, HEADS, DIM)
    got = attend(query, keys, values, plan, SCALE)
    assert got[len(seen) :].abs().sum() == 0  # padding
    for i, pairs in enumerate(seen):
        slots = torch.tensor([int(table[row, position]) for row, position in pairs])
        torch.testing.assert_close(got[i], _naive_attention(query[i], keys[slots], values[slots]))


def test_attention_of_decode_and_extend_is_causal() -> None:
    table = _pools()[2]
    rows, lengths = torch.tensor([2, 0]), torch.tensor([5, 9])
    _check(
        planning.plan_decode(table, rows, lengths),
        table,
        [[(2, p) for p in range(5)], [(0, p) for p in range(9)]],
    )
    _check(
        planning.plan_extend(table, rows, lengths, torch.tensor([5, 2])),
        table,
        [[(2, p) for p in range(i + 1)] for i in range(5)] + [[(0, p) for p in range(i + 1)] for i in (7, 8)],
    )
    _check(
        planning.plan_draft_extend(table, rows, lengths, num_queries=3),
        table,
        [[(2, p) for p in range(i + 1)] for i in (2, 3, 4)] + [[(0, p) for p in range(i + 1)] for i in (6, 7, 8)],
    )


def test_attention_of_verify_follows_the_tree() -> None:
    table = _pools()[2]
    seq_lens = [3, 7]
    mask = _build(seq_lens)["mask"]
    seen = []
    for row, seq_len in zip((2, 0), seq_lens, strict=True):
        for node in range(NODES):
            path, ancestor = [node], node
            while ancestor:
                ancestor = PARENT_OF[ancestor]
                path.append(ancestor)
            seen.append([(row, p) for p in range(seq_len)] + [(row, seq_len + n) for n in path])
    _check(planning.plan_verify(table, torch.tensor([2, 0]), torch.tensor(seq_lens), NODES, mask), table, seen)


@pytest.mark.parametrize("page_size", [1, 4])
def test_attention_of_a_draft_step_stays_in_its_branch(page_size: int) -> None:
    table = _pools()[2]
    seq_lens, topk, steps, step = [3, 8], 2, 3, 1
    seen = []
    for row, seq_len in zip((2, 0), seq_lens, strict=True):
        for branch in range(topk):
            if page_size == 1:
                start = seq_len + branch * steps
            else:
                begun = seq_len % page_size
                start = seq_len + branch * -(-(begun + steps) // page_size) * page_size
            seen.append([(row, p) for p in [*range(seq_len), *range(start, start + step + 1)]])
    plan = planning.plan_draft_step(
        table, torch.tensor([2, 0]), torch.tensor(seq_lens), step, topk=topk, num_steps=steps, page_size=page_size
    )
    _check(plan, table, seen)


# ---- the whole server

CHAIN = ("--speculative-num-steps=3", "--speculative-eagle-topk=1", "--speculative-num-draft-tokens=4")
TREE = ("--speculative-num-steps=3", "--speculative-eagle-topk=4", "--speculative-num-draft-tokens=8")
NO_OVERLAP = "--disable-overlap-schedule"
# topk > 1 with page size > 1 is allowed for a few backend names only; "triton" is the one a CPU may have.
PAGES_AND_TREE = ("--page-size=16", "--attention-backend=triton")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("models")
    random_models.write_target(directory / "target")
    random_models.write_eagle3_draft(directory / "EAGLE3")
    random_models.write_eagle_draft(directory / "EAGLE")
    return directory


def _tokens(models: Path, log: Path, *arguments: str, env: dict[str, str] | None = None) -> list[list[int]]:
    """Greedy tokens of requests that differ in length, share prefixes, and begin alone and together."""
    fixed = (f"--model-path={models / 'target'}", "--skip-tokenizer-init", "--chunked-prefill-size=48")
    with serve(log, (*fixed, *arguments), env={"SGLANG_CPU_ENGINE_FORK": "1", **(env or {})}) as server:
        return _ask(server, requests=1) + _ask(server, requests=16)


def _ask(server: Server, requests: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(requests)
    shared = torch.randint(2, 64, (33,), generator=generator).tolist()
    prompts, sampling_params = [], []
    for i in range(requests):
        own = torch.randint(2, 64, (1 + 5 * i,), generator=generator).tolist()
        prompts.append(shared * (i % 3) + own)
        sampling_params.append({"temperature": 0, "max_new_tokens": 4 + 3 * i, "ignore_eos": True})
    body = {"input_ids": prompts, "sampling_params": sampling_params}
    answers = server.client.post("/generate", json=body).raise_for_status().json()
    return [answer["output_ids"] for answer in answers]


@pytest.fixture(scope="module")
def plain_tokens(models: Path, tmp_path_factory: pytest.TempPathFactory) -> list[list[int]]:
    return _tokens(models, tmp_path_factory.mktemp("plain") / "server.log")


@pytest.mark.engine
@pytest.mark.parametrize(
    ("algorithm", "arguments", "env"),
    [
        pytest.param("EAGLE3", CHAIN, {"SGLANG_CPU_ENGINE_FORK": "0"}, id="chain"),
        pytest.param("EAGLE3", (*CHAIN, "--page-size=16", NO_OVERLAP), {}, id="chain-pages-no-overlap"),
        pytest.param(
            "EAGLE",
            (*TREE, NO_OVERLAP, "--disable-radix-cache"),
            {"SGLANG_CPU_ENGINE_NEEDS_CPU_SEQ_LENS": "0"},
            id="tree-no-overlap",
        ),
        pytest.param(
            "EAGLE3",
            (*TREE, *PAGES_AND_TREE),
            {"SGLANG_TEST_RETRACT": "1", "SGLANG_CPU_ENGINE_NEEDS_CPU_SEQ_LENS": "0"},
            id="tree-pages-retraction",
        ),
    ],
)
def test_speculation_does_not_change_greedy_tokens(
    models: Path,
    plain_tokens: list[list[int]],
    tmp_path: Path,
    algorithm: str,
    arguments: tuple[str, ...],
    env: dict[str, str],
) -> None:
    speculation = (f"--speculative-algorithm={algorithm}", f"--speculative-draft-model-path={models / algorithm}")
    assert _tokens(models, tmp_path / "server.log", *speculation, *arguments, env=env) == plain_tokens

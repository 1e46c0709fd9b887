"""Kinds of models other than the tiny trained pair, with random weights: flips change no token of theirs."""

from __future__ import annotations

import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from sglang_cpu_engine import random_models

from tests.engine.saboteur import install
from tests.engine.serving import CHAIN, CHAINS_ONLY, TREE, Server, serve

pytestmark = pytest.mark.engine

# What no checkpoint fills is whatever the memory held: right one day, wrong the next, and with or without the plugin.
ALL_WEIGHTS_ARE_READ = """
def register():
    import torch
    from sglang.srt.model_executor.model_runner import ModelRunner
    load = ModelRunner.load_model

    def load_into_nans(self, *args, **kwargs):
        torch.use_deterministic_algorithms(True)  # fills new memory with NaN
        loaded = load(self, *args, **kwargs)
        torch.use_deterministic_algorithms(False)
        unread = [name for name, each in self.model.named_parameters() if each.isnan().any()]
        assert not unread or self.is_draft_worker, f"no checkpoint fills {unread}"  # a draft shares some
        return loaded

    ModelRunner.load_model = load_into_nans
"""
# Goes on with the above: says what is drafted from which prefix, by request and length. A true draft drafts the same
# however it came there.
SAYS_WHAT_IT_DRAFTS = """
    from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
    draft = EagleDraftWorker.draft

    def say(self, batch):
        drafted = draft(self, batch)
        trees = drafted.draft_token.view(len(batch.reqs), -1).tolist()
        for req, length, tokens in zip(batch.reqs, batch.seq_lens.tolist(), trees, strict=True):
            print("witness:", hash(tuple(req.origin_input_ids)), length, *tokens, flush=True)
        return drafted

    EagleDraftWorker.draft = say
"""


def drafts(log: str) -> dict[tuple[str, str], str]:
    """What was drafted, by request and length."""
    return {(request, length): tokens for request, length, tokens in re.findall(r"witness: (\S+) (\d+) (.*)", log)}


def answers(server: Server) -> list[list[int]]:
    """Greedy tokens of requests that differ in length and share prefixes, all in one call."""
    generator = torch.Generator().manual_seed(7)
    shared = torch.randint(2, 64, (33,), generator=generator).tolist()
    prompts = [shared * (i % 3) + torch.randint(2, 64, (1 + 7 * i,), generator=generator).tolist() for i in range(12)]
    sampling = [{"temperature": 0, "max_new_tokens": 8 + 5 * i, "ignore_eos": True} for i in range(12)]
    body = {"input_ids": prompts, "sampling_params": sampling}
    got = server.client.post("/generate", json=body).raise_for_status().json()
    return [answer["output_ids"] for answer in got]


@pytest.mark.supports(
    "Models and drafts", "mixture of experts (Qwen3-MoE)", "Qwen3: norms on queries and keys", since="0.1.0"
)
def test_a_mixture_of_experts_with_query_and_key_norms(tmp_path: Path) -> None:
    target = random_models.write_qwen3_moe_target(tmp_path / "target")
    draft = random_models.write_eagle3_draft(tmp_path / "draft")
    model = [f"--model-path={target}", "--skip-tokenizer-init"]
    speculation = ["--speculative-algorithm=EAGLE3", f"--speculative-draft-model-path={draft}"]
    speculation += ["--speculative-num-steps=3", *CHAIN]
    settings = {"policy": "alternate", "alternate_period_steps": 2}
    whole = install(tmp_path / "whole", ALL_WEIGHTS_ARE_READ)
    with (
        serve(tmp_path / "flips", [*model, *speculation], settings=settings, env=whole) as flipping,
        serve(tmp_path / "reference", model) as reference,
        ThreadPoolExecutor() as pool,
    ):
        wanted = pool.submit(answers, reference)
        assert answers(flipping) == wanted.result()
        state = flipping.state()
        assert min(state["steps"].values()) >= 10
        assert state["faults"] == 0
        assert flipping.used_tokens() == 0


def deepseek_v3_with_mtp(folder: Path) -> list[str]:
    target = random_models.write_deepseek_v3(folder / "target")
    return [f"--model-path={target}", "--speculative-algorithm=NEXTN", *CHAIN]


def deepseek_v2_with_eagle3(folder: Path) -> list[str]:
    target = random_models.write_deepseek_v2_target(folder / "target")
    draft = random_models.write_eagle3_draft(folder / "draft")
    layout = [*(CHAIN if CHAINS_ONLY else TREE), "--page-size=16", "--attention-backend=triton"]
    arguments = [f"--model-path={target}", "--speculative-algorithm=EAGLE3", f"--speculative-draft-model-path={draft}"]
    return [*arguments, *layout]


@pytest.mark.supports(
    "Models and drafts",
    "latent attention (MLA): DeepSeek-V3 with its MTP layer, DeepSeek-V2 with EAGLE-3",
    since="0.1.0",
)
@pytest.mark.parametrize(
    ("kind", "accepted"), [(deepseek_v3_with_mtp, 1.2), (deepseek_v2_with_eagle3, 1.0)], ids=["V3-MTP", "V2-EAGLE3"]
)
def test_latent_attention(kind: Callable[[Path], list[str]], accepted: float, tmp_path: Path) -> None:
    target, *speculation = [*kind(tmp_path), "--speculative-num-steps=3"]
    model = [target, "--skip-tokenizer-init"]
    # Fewer tokens wait than the longer of the phases below leaves, so that the draft also follows within one.
    settings = {"policy": "alternate", "catch_up_tokens": 8}
    witness = install(tmp_path / "witness", ALL_WEIGHTS_ARE_READ + SAYS_WHAT_IT_DRAFTS)
    with (
        serve(tmp_path / "flips", [*model, *speculation], settings=settings, env=witness) as flipping,
        serve(tmp_path / "reference", model) as reference,
    ):
        wanted = answers(reference)
        assert flipping.use(policy="spec")
        assert answers(flipping) == wanted
        always = drafts(flipping.log)
        for period in (2, 20):
            assert flipping.use(policy="alternate", alternate_period_steps=period)
            assert flipping.used_tokens() == 0
            before, begun = flipping.state()["steps"], len(flipping.log)
            assert answers(flipping) == wanted
            after = flipping.state()["steps"]
            assert min(after[mode] - before[mode] for mode in after) >= 10
            drafted = drafts(flipping.log[begun:])
            both = drafted.keys() & always.keys()
            assert len(both) >= 50
            assert [each for each in both if drafted[each] != always[each]] == []
        state = flipping.state()
        assert state["accept_length"] > accepted
        assert state["faults"] == 0
        assert flipping.used_tokens() == 0

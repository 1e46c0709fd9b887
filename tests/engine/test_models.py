"""Kinds of models other than the tiny trained pair, with random weights: flips change no token of theirs."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from sglang_cpu_engine import random_models

from tests.engine.saboteur import install
from tests.engine.serving import CHAIN, Server, serve

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

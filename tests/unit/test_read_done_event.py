"""The event that says when a plain step has read what the scheduler may write next."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_adaptive_spec.releases.base import PlainRuntime
from sglang_adaptive_spec.releases.sglang_0_5_14 import Sglang0514

RUNTIME = PlainRuntime(None, None, None, draft_ring_gib=0.0, memory_gib=0.0, build_seconds=0.0, graph_sizes=())
EVENT = "war_fastpath_read_done_event"


class DraftInput:
    def __init__(self) -> None:
        self.bonus_tokens = torch.tensor([3, 4])


@pytest.mark.parametrize("own", ["the plain step's", None], ids=["graph", "eager"])
def test_the_scheduler_never_waits_for_an_earlier_steps_event(own: str | None) -> None:
    """An eager step leaves none; SGLang then waits for the whole forward."""
    target = SimpleNamespace(req_to_token_pool=SimpleNamespace(req_to_token=torch.arange(20).reshape(2, 10)))
    setattr(target, EVENT, "a verify step's")
    draft = SimpleNamespace(**{EVENT: "a draft's"})

    class Adapter(Sglang0514):
        def _plain_view(self, batch: Any) -> Any:
            return nullcontext()

        def _on_runtime(self, runner: Any, runtime: Any) -> Any:
            return nullcontext()

        def _run_target(self, worker: Any, batch: Any, hidden_mode: Any) -> Any:
            if own:
                setattr(target, EVENT, own)
            return SimpleNamespace(next_token_ids=torch.tensor([5, 6]))

    worker = SimpleNamespace(
        target_worker=SimpleNamespace(model_runner=target), draft_worker=SimpleNamespace(draft_runner=draft)
    )
    batch = SimpleNamespace(
        spec_info=DraftInput(),
        seq_lens=torch.tensor([2, 4]),
        seq_lens_cpu=torch.tensor([2, 4]),
        req_pool_indices=torch.tensor([0, 1]),
    )
    Adapter().run_plain_decode(worker, RUNTIME, batch, publish=None)
    assert batch.out_cache_loc.tolist() == [2, 14]
    assert (getattr(draft, EVENT), getattr(target, EVENT)) == (own, None)

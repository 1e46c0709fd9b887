"""The made-up requests that steps are tried on."""

import pytest
import torch

from sglang_adaptive_spec.releases.step_bench import IdleBatch


@pytest.mark.parametrize(
    ("context_tokens", "tokens", "first", "count"), [(256, 32, 224, 32), (20, 32, 0, 20), (256, 1, 255, 1)]
)
def test_a_catch_up_covers_the_last_tokens_of_each_request(context_tokens, tokens, first, count):
    ran: list = []
    idle = IdleBatch(
        requests=3,
        context_tokens=context_tokens,
        run=lambda mode: None,
        run_catch_up=lambda due: ran.append(due),
        synchronize=lambda: ran.append("waited"),
    )
    idle.catch_up(tokens)
    (starts, counts), waited = ran
    assert starts.tolist() == [first] * 3
    assert counts.tolist() == [count] * 3
    assert starts.dtype == counts.dtype == torch.int64
    assert waited == "waited"

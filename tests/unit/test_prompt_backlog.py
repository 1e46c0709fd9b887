from types import SimpleNamespace

import torch

from sglang_adaptive_spec.engine.prompt_backlog import PromptBacklog
from sglang_adaptive_spec.releases.prompts_0_5_14 import Prompts, keep, merged


def test_a_backlog_is_full_by_tokens_or_by_requests():
    backlog = PromptBacklog(most_tokens=100, most_requests=3)
    assert not backlog
    assert backlog.has_room(100, 3)
    backlog.add("a", [4, 5], 60)
    assert backlog
    assert backlog.has_room(40, 1)
    assert not backlog.has_room(41, 1)
    assert not backlog.has_room(1, 2)


def test_a_batch_of_half_of_it_or_less_waits():
    backlog = PromptBacklog(most_tokens=100, most_requests=3)
    assert backlog.takes(50, 3)
    assert not backlog.takes(51, 1)
    assert not backlog.takes(10, 4)


def test_it_is_urgent_once_a_request_left_whose_prompt_waits():
    backlog = PromptBacklog(most_tokens=100, most_requests=3)
    backlog.add("a", [4, 5], 60)
    assert [backlog.holds(row) for row in (4, 5, 7)] == [True, True, False]
    assert not backlog.is_urgent
    backlog.leaves(5, "its slots")
    assert backlog.is_urgent
    assert not backlog.holds(5), "the row may be another request's from now on"
    assert backlog.take() == (["a"], {5: "its slots"})
    assert not backlog
    assert not backlog.is_urgent
    assert backlog.has_room(100, 3)


# --- as one batch ----------------------------------------------------------------------------------------

REQ_TO_TOKEN = torch.arange(60).reshape(3, 20) + 100


def prompts(rows: list[int], prefix: list[int], lengths: list[int], state: float) -> Prompts:
    slots = [REQ_TO_TOKEN[row, start : start + n] for row, start, n in zip(rows, prefix, lengths, strict=True)]
    batch = SimpleNamespace(
        input_ids=torch.cat(slots) + 1000,
        req_pool_indices=torch.tensor(rows),
        req_pool_indices_cpu=torch.tensor(rows),
        seq_lens=torch.tensor(prefix) + torch.tensor(lengths),
        seq_lens_cpu=torch.tensor(prefix) + torch.tensor(lengths),
        orig_seq_lens=torch.tensor(lengths, dtype=torch.int32),
        out_cache_loc=torch.cat(slots),
        reqs=[f"request {row}" for row in rows],
        extend_lens=lengths,
        prefix_lens=prefix,
        extend_logprob_start_lens=None,
        multimodal_inputs=[None] * len(rows),
        sampling_info="somebody's",
        chunked_req_next_prompt_token=4,
        return_logprob=True,
        is_prefill_only=True,
    )
    tokens = sum(lengths)
    return Prompts(batch, torch.full((tokens, 2), state), torch.tensor(rows), rows)


def test_prompts_become_one_batch():
    batch, hidden, tails = merged([prompts([0, 1], [0, 4], [3, 2], 1.0), prompts([2], [5], [4], 2.0)], REQ_TO_TOKEN, {})
    assert batch.reqs == ["request 0", "request 1", "request 2"]
    assert (batch.extend_lens, batch.prefix_lens) == ([3, 2, 4], [0, 4, 5])
    assert (batch.extend_num_tokens, batch.seq_lens_sum) == (9, 3 + 6 + 9)
    assert batch.seq_lens.tolist() == [3, 6, 9]
    assert batch.out_cache_loc.tolist() == [100, 101, 102, 124, 125, 145, 146, 147, 148]
    assert (batch.input_ids - 1000).tolist() == batch.out_cache_loc.tolist()
    assert hidden[:, 0].tolist() == [1.0] * 5 + [2.0] * 4
    assert tails.tolist() == [0, 1, 2]
    assert batch.chunked_req_next_prompt_token is None
    assert not batch.return_logprob
    assert not batch.is_prefill_only
    assert batch.req_pool_indices_cpu.tolist() == [0, 1, 2]


def test_a_slot_that_was_given_back_is_written_to_no_more():
    changed = REQ_TO_TOKEN.clone()
    changed[0, 1] = 777  # the radix cache held this position already
    changed[2, :] = 888  # left, and somebody else has the row by now
    waiting = [prompts([0], [0], [3], 1.0), prompts([2], [5], [3], 2.0)]
    # Before it left, position 6 had become the radix cache's, and its last position was not committed.
    left = {2: torch.cat([REQ_TO_TOKEN[2, :6], torch.tensor([999])])}
    assert merged(waiting, changed, left)[0].out_cache_loc.tolist() == [100, 0, 102, 145, 0, 0]


def test_what_is_kept_does_not_change_with_the_batch():
    batch = prompts([0, 1], [0, 4], [3, 2], 1.0).batch
    kept = keep(batch, SimpleNamespace(**vars(batch)))
    for name in ("seq_lens", "seq_lens_cpu", "out_cache_loc"):
        getattr(batch, name).add_(1)
    batch.reqs.clear()
    batch.multimodal_inputs.append("another's")
    assert kept.seq_lens_cpu.tolist() == [3, 6]
    assert kept.out_cache_loc.tolist() == [100, 101, 102, 124, 125]
    assert len(kept.reqs) == len(kept.multimodal_inputs) == 2
    assert kept.sampling_info is None
    read, _, _ = merged([Prompts(kept, torch.zeros(5, 2), torch.tensor([0, 1]), [0, 1])], REQ_TO_TOKEN, {})
    assert read.seq_lens.tolist() == read.seq_lens_cpu.tolist() == [3, 6]
    assert read.req_pool_indices.tolist() == [0, 1]

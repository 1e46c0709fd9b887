"""What a decode step takes on a started SGLang that serves nothing yet.

The steps are real: SGLang's own worker runs draft, verify and draft-extend, or a plain step, on a batch of made-up
requests whose rows and KV slots are taken for the moment and given back. So graphs, eager parts (the draft-extend of
fa3), sampling and what the host needs to launch all of it are in the figure; the scheduler's own share is not.
"""

from __future__ import annotations

import copy
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from sglang_adaptive_spec.modes import Mode


@dataclass(frozen=True)
class IdleBatch:
    """Decode steps on made-up requests of one length.

    Attributes:
        requests: Requests in the batch.
        context_tokens: Length of each before the step; every step starts from there again.
        run: Launches one step of a mode, waiting on the host for what a served step would wait for.
        run_catch_up: Launches a catch-up of the draft over first positions and counts, ``[requests]`` int64 each.
        synchronize: Waits for all that was launched.
    """

    requests: int
    context_tokens: int
    run: Callable[[Mode], None]
    run_catch_up: Callable[[tuple[torch.Tensor, torch.Tensor]], None]
    synchronize: Callable[[], None]

    def seconds_a_step(self, mode: Mode, steps: int) -> float:
        """Launch some steps in a row and divide the time by their number."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.run(mode)
        self.synchronize()
        return (time.perf_counter() - start) / steps

    def catch_up(self, tokens: int) -> None:
        """Let the draft see the last tokens of each request, as after so many plain steps, and wait for it."""
        counts = torch.full((self.requests,), min(tokens, self.context_tokens), dtype=torch.int64)
        self.run_catch_up((self.context_tokens - counts, counts))
        self.synchronize()


@dataclass(frozen=True)
class Steps:
    """What the steps of a started server are made of; the adapter knows where its family keeps it.

    Attributes:
        worker: SGLang's speculative worker, before the first request.
        run_plain: Runs a plain step on a batch.
        run_spec: Runs a speculative step on a batch, and tells of the lengths that its verify step made.
        catch_up: Lets the draft see positions of a batch's requests, given as first ones and counts.
        overlaps: Whether the scheduler works on one step while the next one runs.
        needs_lengths: Whether a speculative step needs its requests' lengths on the host.
        reserve_tokens: KV slots of a request past its length that a speculative step may write to.
        draft_hidden: Size and type of the states that a draft starts from.
        last_tokens: What a draft input calls the tokens that it starts from.
        read_done_event: A runner's attribute that says when its step has read the shared buffers.
    """

    worker: Any
    run_plain: Callable[[Any], Any]
    run_spec: Callable[[Any, Callable[[Any], None]], Any]
    catch_up: Callable[[Any, tuple[torch.Tensor, torch.Tensor]], Any]
    overlaps: bool
    needs_lengths: bool
    reserve_tokens: int
    draft_hidden: tuple[int, torch.dtype]
    last_tokens: str
    read_done_event: str


@contextmanager
def idle_batch(served: Steps, requests: int, context_tokens: int) -> Iterator[IdleBatch | None]:
    """Take rows and KV slots for a batch, and give them back; None where there is no room even for short requests.

    Args:
        served: What the steps are made of.
        requests: How many.
        context_tokens: Their length, if the pool allows; shorter otherwise.
    """
    from sglang.srt.utils.common import DynamicGradMode

    worker = served.worker
    draft, target = worker.draft_worker.draft_runner, worker.target_worker.model_runner
    allocator, rows = target.token_to_kv_pool_allocator, target.req_to_token_pool
    width = _row_tokens(served, requests, context_tokens)
    free_rows = rows.free_slots[:requests]
    if width is None or len(free_rows) < requests:
        yield None
        return
    saved = rows.req_to_token[free_rows, :width].clone()
    slots = allocator.alloc(requests * width)
    try:
        rows.req_to_token[free_rows, :width] = slots.view(requests, width).to(rows.req_to_token.dtype)
        with DynamicGradMode():
            context = width - served.reserve_tokens
            batch = _made_up_batch(served, free_rows, context)

            def run_catch_up(due: tuple[torch.Tensor, torch.Tensor]) -> None:
                served.catch_up(_copied(batch), due)

            yield IdleBatch(requests, context, _Runner(served, batch), run_catch_up, _synchronizer(worker))
    finally:
        _synchronizer(worker)()
        rows.req_to_token[free_rows, :width] = saved
        allocator.free(slots)
        # The scheduler's write barrier must not take them for the events of its own first step.
        for runner in (draft, target):
            setattr(runner, served.read_done_event, None)


class _Runner:
    """One step after another on the same batch."""

    def __init__(self, served: Steps, batch: Any) -> None:
        self._served = served
        self._batch = batch
        self._lengths_known: Any = None

    def __call__(self, mode: Mode) -> None:
        batch = _copied(self._batch)
        if mode is Mode.PLAIN:
            result = self._served.run_plain(batch)
        else:
            self._resolve_lengths(batch)
            result = self._served.run_spec(batch, self._publish)
            # To 0.5.12 the event that says so comes with the result.
            self._lengths_known = getattr(result.next_draft_input, "verify_done", None) or self._lengths_known
        if not self._served.overlaps:
            result.next_token_ids.cpu()

    def _resolve_lengths(self, batch: Any) -> None:
        """As FutureMap.resolve_seq_lens_cpu: wait for the verify step before (not its draft-extend), or do without."""
        if self._lengths_known is not None:
            self._lengths_known.synchronize()
        if self._served.overlaps and not self._served.needs_lengths:
            batch.seq_lens_cpu = batch.seq_lens_sum = None

    def _publish(self, new_seq_lens: Any) -> None:
        if self._served.overlaps and self._served.needs_lengths and new_seq_lens.is_cuda:
            self._lengths_known = torch.cuda.Event()
            self._lengths_known.record()


def _copied(batch: Any) -> Any:
    """The batch and its draft input for a step that changes them."""
    copied = copy.copy(batch)
    copied.spec_info = copy.copy(batch.spec_info)
    return copied


def _synchronizer(worker: Any) -> Callable[[], None]:
    synchronize: Callable[[], None] = torch.get_device_module(worker.device).synchronize
    return synchronize


def _row_tokens(served: Steps, requests: int, context_tokens: int) -> int | None:
    """Slots for each request, whole pages of them."""
    runner, reserve = served.worker.target_worker.model_runner, served.reserve_tokens
    allocator, row = runner.token_to_kv_pool_allocator, int(runner.req_to_token_pool.req_to_token.shape[1])
    shared = allocator.available_size() // requests
    width = min(context_tokens + reserve, runner.model_config.context_len, row, shared)
    width = width // allocator.page_size * allocator.page_size
    return width if width > reserve else None


def _made_up_batch(served: Steps, rows: Sequence[int], context_tokens: int) -> Any:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    worker, runner = served.worker, served.worker.target_worker.model_runner
    config, device, requests = runner.model_config, worker.device, len(rows)
    sampling = SamplingParams(temperature=0, max_new_tokens=1)
    sampling.normalize(None)
    reqs = [Req(f"adaptive-spec-{row}", "", array("q", [0]), sampling, vocab_size=config.vocab_size) for row in rows]
    batch = ScheduleBatch.init_new(
        reqs=reqs,
        req_to_token_pool=runner.req_to_token_pool,
        token_to_kv_pool_allocator=runner.token_to_kv_pool_allocator,
        tree_cache=None,
        model_config=config,
        enable_overlap=served.overlaps,
        spec_algorithm=runner.spec_algorithm,
    )
    batch.forward_mode = ForwardMode.DECODE
    batch.req_pool_indices_cpu = torch.tensor(rows, dtype=torch.int64)
    batch.req_pool_indices = batch.req_pool_indices_cpu.to(device)
    batch.seq_lens_cpu = torch.full((requests,), context_tokens, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = requests * context_tokens
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, config.vocab_size)
    hidden_size, dtype = served.draft_hidden
    batch.spec_info = EagleDraftInput(
        topk_p=torch.ones((requests, worker.topk), dtype=torch.float32, device=device),
        topk_index=torch.zeros((requests, worker.topk), dtype=torch.int64, device=device),
        hidden_states=torch.zeros((requests, hidden_size), dtype=dtype, device=device),
        num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1,
        **{served.last_tokens: torch.zeros((requests,), dtype=torch.int32, device=device)},
    )
    return batch

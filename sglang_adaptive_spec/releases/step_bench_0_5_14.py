"""What a decode step takes on a started SGLang 0.5.14 that serves nothing yet.

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
        synchronize: Waits for all that was launched.
    """

    requests: int
    context_tokens: int
    run: Callable[[Mode], None]
    synchronize: Callable[[], None]

    def seconds_a_step(self, mode: Mode, steps: int) -> float:
        """Launch some steps in a row and divide the time by their number."""
        self.synchronize()
        start = time.perf_counter()
        for _ in range(steps):
            self.run(mode)
        self.synchronize()
        return (time.perf_counter() - start) / steps


@contextmanager
def idle_batch(
    worker: Any, run_plain: Callable[[Any], Any], requests: int, context_tokens: int
) -> Iterator[IdleBatch | None]:
    """Take rows and KV slots for a batch, and give them back; None where there is no room even for short requests.

    Args:
        worker: SGLang's speculative worker, before the first request.
        run_plain: Runs a plain step on a batch.
        requests: How many.
        context_tokens: Their length, if the pool allows; shorter otherwise.
    """
    from sglang.srt.utils.common import DynamicGradMode

    allocator, rows = worker.token_to_kv_pool_allocator, worker.req_to_token_pool
    width = _row_tokens(worker, requests, context_tokens)
    free_rows = rows.free_slots[:requests]
    if width is None or len(free_rows) < requests:
        yield None
        return
    pages = allocator.backup_state()
    saved = rows.req_to_token[free_rows, :width].clone()
    draft, target = worker.draft_worker.draft_runner, worker.target_worker.model_runner
    try:
        slots = allocator.alloc(requests * width)
        rows.req_to_token[free_rows, :width] = slots.view(requests, width).to(rows.req_to_token.dtype)
        with DynamicGradMode():
            context = width - _reserve_tokens(worker)
            batch = _made_up_batch(worker, free_rows, context)
            yield IdleBatch(requests, context, _Runner(worker, batch, run_plain), _synchronizer(worker))
    finally:
        _synchronizer(worker)()
        rows.req_to_token[free_rows, :width] = saved
        allocator.restore_state(pages)
        # The scheduler's write barrier must not take them for the events of its own first step.
        draft.war_fastpath_read_done_event = target.war_fastpath_read_done_event = None


class _Runner:
    """One step after another on the same batch."""

    def __init__(self, worker: Any, batch: Any, run_plain: Callable[[Any], Any]) -> None:
        from sglang.srt.managers.overlap_utils import decide_needs_cpu_seq_lens

        self._worker = worker
        self._batch = batch
        self._run_plain = run_plain
        self._overlaps = not worker.server_args.disable_overlap_schedule
        self._needs_lengths = decide_needs_cpu_seq_lens(worker.server_args, worker.spec_v2_attn_backends)
        self._lengths_known: Any = None

    def __call__(self, mode: Mode) -> None:
        batch = copy.copy(self._batch)
        batch.spec_info = copy.copy(batch.spec_info)
        if mode is Mode.PLAIN:
            result = self._run_plain(batch)
        else:
            self._resolve_lengths(batch)
            result = self._worker.forward_batch_generation(batch, on_publish=self._publish)
        if not self._overlaps:
            result.next_token_ids.cpu()

    def _resolve_lengths(self, batch: Any) -> None:
        """As FutureMap.resolve_seq_lens_cpu: wait for the verify step before (not its draft-extend), or do without."""
        if self._lengths_known is not None:
            self._lengths_known.synchronize()
        if self._overlaps and not self._needs_lengths:
            batch.seq_lens_cpu = batch.seq_lens_sum = None

    def _publish(self, new_seq_lens: Any) -> None:
        if self._overlaps and self._needs_lengths and new_seq_lens.is_cuda:
            self._lengths_known = torch.cuda.Event()
            self._lengths_known.record()


def _synchronizer(worker: Any) -> Callable[[], None]:
    synchronize: Callable[[], None] = torch.get_device_module(worker.device).synchronize
    return synchronize


def _reserve_tokens(worker: Any) -> int:
    from sglang.srt.mem_cache.common import get_alloc_reserve_per_decode

    return int(get_alloc_reserve_per_decode(worker.server_args)) + 1


def _row_tokens(worker: Any, requests: int, context_tokens: int) -> int | None:
    """Slots for each request, whole pages of them."""
    page, reserve = worker.token_to_kv_pool_allocator.page_size, _reserve_tokens(worker)
    longest = worker.target_worker.model_runner.model_config.context_len
    shared = worker.token_to_kv_pool_allocator.available_size() // requests
    width = min(context_tokens + reserve, longest, int(worker.req_to_token_pool.req_to_token.shape[1]), shared)
    width = width // page * page
    return width if width > reserve else None


def _made_up_batch(worker: Any, rows: Sequence[int], context_tokens: int) -> Any:
    from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
    from sglang.srt.model_executor.forward_batch_info import ForwardMode
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo
    from sglang.srt.sampling.sampling_params import SamplingParams
    from sglang.srt.speculative.eagle_info import EagleDraftInput

    config, device, requests = worker.target_worker.model_config, worker.device, len(rows)
    sampling = SamplingParams(temperature=0, max_new_tokens=1)
    sampling.normalize(None)
    reqs = [Req(f"adaptive-spec-{row}", "", array("q", [0]), sampling, vocab_size=config.vocab_size) for row in rows]
    batch = ScheduleBatch.init_new(
        reqs=reqs,
        req_to_token_pool=worker.req_to_token_pool,
        token_to_kv_pool_allocator=worker.token_to_kv_pool_allocator,
        tree_cache=None,
        model_config=config,
        enable_overlap=not worker.server_args.disable_overlap_schedule,
        spec_algorithm=worker.speculative_algorithm,
    )
    batch.forward_mode = ForwardMode.DECODE
    batch.req_pool_indices_cpu = torch.tensor(rows, dtype=torch.int64)
    batch.req_pool_indices = batch.req_pool_indices_cpu.to(device)
    batch.seq_lens_cpu = torch.full((requests,), context_tokens, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(device)
    batch.orig_seq_lens = batch.seq_lens.to(torch.int32)
    batch.seq_lens_sum = requests * context_tokens
    batch.sampling_info = SamplingBatchInfo.from_schedule_batch(batch, config.vocab_size)
    draft = worker.draft_worker
    batch.spec_info = EagleDraftInput(
        topk_p=torch.ones((requests, worker.topk), dtype=torch.float32, device=device),
        topk_index=torch.zeros((requests, worker.topk), dtype=torch.int64, device=device),
        hidden_states=torch.zeros(
            (requests, EagleDraftInput.hidden_size_for(draft)), dtype=EagleDraftInput.dtype_for(draft), device=device
        ),
        bonus_tokens=torch.zeros((requests,), dtype=torch.int32, device=device),
        num_tokens_per_req=1,
        num_tokens_for_logprob_per_req=1,
    )
    return batch

"""SGLang 0.5.12: the worker gets a copy of the batch, and the scheduler goes on with what the draft's input says."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cached_property
from typing import Any

from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.patching import Patch
from sglang_adaptive_spec.releases.reads import ARGUMENTS, BATCH, DRAFT_INPUT, REQUEST, WORKER, attributes
from sglang_adaptive_spec.releases.refusals_0_5_14 import UNSERVED, Unserved
from sglang_adaptive_spec.releases.sglang_0_5_13 import Sglang0513
from sglang_adaptive_spec.releases.sglang_0_5_14 import STEP_FIELDS, acceptance_kept, host_tensor, swapped

_PLAN = "adaptive_spec_plan"
_ROWS = "adaptive_spec_rows"
_NEXT_LENGTHS = "adaptive_spec_next_lengths"
_SCHEDULED = "adaptive_spec_scheduled"
_SLOTS = "adaptive_spec_slots"

_COPY = "sglang.srt.managers.schedule_batch:ModelWorkerBatch"
_SCHEDULER = "sglang.srt.managers.scheduler:Scheduler"
RESULTS = "sglang.srt.managers.scheduler_output_processor_mixin:SchedulerOutputProcessorMixin"
_FUTURES = "sglang.srt.managers.overlap_utils:FutureMap"
_METRICS = "sglang.srt.observability.scheduler_metrics_mixin:SchedulerMetricsMixin"
_ALLOCATOR = "sglang.srt.mem_cache.allocator:BaseTokenToKVPoolAllocator"
_NAMES_IN_THE_COPY = {"extend_lens": "extend_seq_lens", "prefix_lens": "extend_prefix_lens"}

_LATER_PLACES = (
    "sglang.srt.managers.overlap_utils:",
    "sglang.srt.managers.scheduler_components.",
    "sglang.srt.mem_cache.allocator.base:",
    "sglang.srt.observability.metrics_collector:_StatLoggerDIMixin",
)
_LATER = {
    f"{_SCHEDULER}._forward_isolation",
    f"{WORKER}.spec_v2_attn_backends",
    "sglang.srt.managers.utils:GenerationBatchResult.new_seq_lens",
    *attributes(
        {
            ARGUMENTS: "max_speculative_num_draft_tokens",
            BATCH: "capture_hidden_mode req_pool_indices_cpu",
        }
    ),
}

OTHER_WORKER = "Before 0.5.13 SGLang runs an older worker then, which this plugin does not know."


def _is_later(entry: str) -> bool:
    return entry in _LATER or entry.startswith(_LATER_PLACES) or "allocation_sizing:get_alloc_len_per_decode" in entry


class Sglang0512(Sglang0513):
    """The adapter for 0.5.12."""

    unserved: tuple[Unserved, ...] = (
        *UNSERVED,
        Unserved(
            "--speculative-eagle-topk above 1",
            lambda a: (a.speculative_eagle_topk or 1) > 1,
            OTHER_WORKER,
            "Draft in chains (--speculative-eagle-topk 1), or install SGLang 0.5.13 or newer.",
        ),
        Unserved(
            "--disable-overlap-schedule, or SGLANG_ENABLE_SPEC_V2=0,",
            lambda a: a.disable_overlap_schedule and (a.speculative_eagle_topk or 1) == 1,
            OTHER_WORKER,
            "Leave the overlap schedule on, or install SGLang 0.5.13 or newer.",
        ),
    )
    step_fields = tuple(_NAMES_IN_THE_COPY.get(name, name) for name in STEP_FIELDS)
    reserve_times = 2
    reads: tuple[str, ...] = (
        *(entry for entry in Sglang0513.reads if not _is_later(entry)),
        *attributes(
            {
                BATCH: "req_to_token_pool",
                _COPY: "capture_hidden_mode extend_num_tokens extend_prefix_lens extend_seq_lens forward_mode "
                "has_grammar input_ids is_extend_in_batch out_cache_loc req_pool_indices reqs return_logprob seq_lens "
                "seq_lens_cpu seq_lens_sum spec_algorithm spec_info",
                DRAFT_INPUT: "new_seq_lens verify_done",
                REQUEST: "kv_allocated_len return_hidden_states",
                "sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode": "NULL",
                _METRICS: "current_scheduler_metrics_enabled enable_metrics metrics_collector "
                "spec_num_forward_ct stats",
            }
        ),
    )
    relies_on: tuple[str, ...] = (
        *(entry for entry in Sglang0513.relies_on if not _is_later(entry)),
        f"{_ALLOCATOR}.alloc",
        f"{_ALLOCATOR}.available_size",
        f"{_ALLOCATOR}.free",
        f"{BATCH}.maybe_wait_verify_done",
        f"{BATCH}.is_spec_v2",
        f"{_FUTURES}.resolve_future",
        f"{_FUTURES}.store_to_map_for_new_batch",
        f"{_METRICS}.init_metrics",
        f"{RESULTS}._resolve_spec_overlap_tokens",
        f"{_SCHEDULER}.record_batch_in_overlap",
        "sglang.srt.server_args:ServerArgs._handle_speculative_decoding",
    )

    @property
    def patches(self) -> tuple[Patch, ...]:
        patches: tuple[Patch, ...] = importlib.import_module("sglang_adaptive_spec.patches").BEFORE_0_5_13
        return patches

    # --- the batch and the copy of it that the worker gets -----------------------------------------------

    def prepare_reserving(self, batch: Any, reserve_tokens: int | None, upstream: Callable[[Any], Any]) -> Any:
        # A grammar lets results be processed before the worker gets the batch: a request may have left its row by then.
        setattr(batch, _ROWS, _rows(batch))
        if reserve_tokens is None:
            return upstream(batch)
        # SGLang allocates up to twice a number past the committed length, so what is odd goes into that length.
        twice = reserve_tokens + reserve_tokens % 2
        shifts = [
            max(req.kv_allocated_len, req.kv_committed_len + reserve_tokens) - twice - req.kv_committed_len
            for req in batch.reqs
        ]
        _shift(batch.reqs, shifts)
        try:
            return upstream(batch)
        finally:
            _shift(batch.reqs, [-shift for shift in shifts])

    def carry(self, batch: Any, copied: Any) -> None:
        plan = self.plan_of(batch)
        if plan is None:
            return
        setattr(copied, _PLAN, plan)
        setattr(copied, _ROWS, getattr(batch, _ROWS))
        setattr(copied, _SCHEDULED, batch)
        if plan.mode is Mode.PLAIN:
            # Made here, on the scheduler's stream: it need not wait for the step to know the lengths, and by the time
            # that the step runs it may have given the row of a request that ended to another one.
            setattr(copied, _NEXT_LENGTHS, super()._next_lengths(batch))
            setattr(copied, _SLOTS, super()._slots(batch, batch.req_to_token_pool))

    def rows(self, batch: Any) -> Any:
        known = getattr(batch, _ROWS, None)
        return _rows(batch) if known is None else known

    def spec_steps_that_fit(self, batch: Any) -> int:
        return super().spec_steps_that_fit(_scheduled(batch))

    def reserve_for_spec(self, worker: Any, batch: Any, prepare: Callable[[Any], Any]) -> None:
        scheduled, plan = _scheduled(batch), self.plan_of(batch)
        if plan is not None:
            self.stamp(scheduled, plan)
        super().reserve_for_spec(worker, scheduled, prepare)

    @cached_property
    def _spec_reserve_tokens(self) -> int:
        from sglang.srt.managers.utils import get_alloc_len_per_decode

        return self.reserve_times * int(inspect.unwrap(get_alloc_len_per_decode)())

    # --- the worker --------------------------------------------------------------------------------------

    def _undrafted(self, worker: Any, batch: Any, publish: Any, result: Any) -> Any:
        undrafted = super()._undrafted(worker, batch, publish, result)
        undrafted.next_draft_input.new_seq_lens = batch.seq_lens
        return undrafted

    def _slots(self, batch: Any, pool: Any) -> Any:
        known = getattr(batch, _SLOTS, None)
        return super()._slots(batch, pool) if known is None else known

    def _next_lengths(self, batch: Any) -> Any:
        known = getattr(batch, _NEXT_LENGTHS, None)
        return super()._next_lengths(batch) if known is None else known

    def _sum(self, lengths: Any) -> int | None:
        return int(lengths.sum())

    def _hand_on(self, draft_input: Any, tokens: Any, new_seq_lens: Any) -> None:
        super()._hand_on(draft_input, tokens, new_seq_lens)
        draft_input.new_seq_lens = new_seq_lens
        # Nobody has to wait for these lengths.
        draft_input.verify_done = None

    def _run_target(self, worker: Any, batch: Any, hidden_mode: Any) -> Any:
        if hidden_mode is None:
            hidden_mode = _hidden_mode_asked_for(batch)
        return super()._run_target(worker, batch, hidden_mode)

    def _of_width(self, tokens: int) -> dict[str, int]:
        return {"speculative_num_draft_tokens": tokens, "speculative_num_steps": tokens - 1}

    def _as_worker_gets(self, batch: Any) -> Any:
        copied = batch.get_model_worker_batch()
        # A served batch has its last prefill's there; only their device is looked at.
        copied.input_ids = copied.seq_lens
        return copied

    def _run_spec(self, worker: Any, batch: Any, publish: Callable[[Any], None]) -> Any:
        del publish
        return worker.forward_batch_generation(self._as_worker_gets(batch))

    def _needs_lengths(self, worker: Any) -> bool:
        # Whatever the attention backend is.
        del worker
        return True

    def _buffer_limits(self, runner: Any) -> tuple[int | None, int, int]:
        arguments = runner.server_args
        step = int(arguments.speculative_num_draft_tokens)
        return arguments.chunked_prefill_size, int(arguments.max_prefill_tokens), step

    # --- results: the scheduler itself reports -----------------------------------------------------------

    @contextmanager
    def without_spec_report(self, reporter: Any) -> Iterator[None]:
        with swapped(reporter, spec_algorithm=self._no_algorithm), self._keeping_acceptance(reporter):
            yield

    def _keeping_acceptance(self, reporter: Any) -> AbstractContextManager[None]:
        return acceptance_kept(reporter) if reporter.enable_metrics else nullcontext()

    def _metric_classes(self, collector: Any) -> tuple[Any, Any]:
        del collector
        return None, None


def _rows(batch: Any) -> Any:
    # One that has ended has none; whoever still needs to know which it was has asked before.
    return host_tensor([req.req_pool_idx or 0 for req in batch.reqs])


def _scheduled(batch: Any) -> Any:
    """The batch that a copy was made of."""
    return getattr(batch, _SCHEDULED, batch)


def _shift(reqs: Any, shifts: list[int]) -> None:
    for req, shift in zip(reqs, shifts, strict=True):
        req.kv_committed_len += shift


def _hidden_mode_asked_for(batch: Any) -> Any:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    return CaptureHiddenMode.FULL if any(req.return_hidden_states for req in batch.reqs) else CaptureHiddenMode.NULL

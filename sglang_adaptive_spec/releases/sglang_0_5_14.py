"""SGLang 0.5.14: the spec-v2 worker takes the ``ScheduleBatch`` itself, within the scheduler's snapshot."""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from operator import attrgetter
from types import SimpleNamespace
from typing import Any, TypeAlias

import numpy as np
import torch

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.engine.hidden_ring import HiddenRing
from sglang_adaptive_spec.engine.steps import StepPlan
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.patching import Patch
from sglang_adaptive_spec.releases import flashinfer_workspace
from sglang_adaptive_spec.releases.arguments import Arguments
from sglang_adaptive_spec.releases.base import IdleBatch, PlainRuntime, PrefillSize
from sglang_adaptive_spec.releases.keys_only import KeysOnly, KeysWritten, attention_layers, keys_only_backend
from sglang_adaptive_spec.releases.prompts_0_5_14 import Prompts, keep, merged, slots_of_row
from sglang_adaptive_spec.releases.reads import (
    ARGUMENT_METHODS,
    ARGUMENTS,
    BATCH,
    DRAFT_INPUT,
    DRAFT_WORKER,
    GRAPH_SIZES,
    READS,
    RECAPTURES,
    RELIES_ON,
    REQUEST,
    RUNNER,
    SERVER_ARGUMENTS,
    SET_STATE_OUTPUT,
    WORKER,
    attributes,
)
from sglang_adaptive_spec.releases.refusals_0_5_14 import (
    PLAN_STREAM,
    RECURRENT,
    SLIDING_WINDOW,
    UNSERVED,
    Unserved,
    refuse_unreachable,
    refuse_unserved,
)
from sglang_adaptive_spec.releases.setup_0_5_14 import describe_setup
from sglang_adaptive_spec.releases.step_bench import Steps, idle_batch
from sglang_adaptive_spec.request_steps import VerifySteps
from sglang_adaptive_spec.stopwatch import HostStopwatch, Stopwatch
from sglang_adaptive_spec.telemetry import Telemetry

NoDraft: TypeAlias = tuple[torch.Tensor, torch.Tensor, torch.Tensor]

_PLAN = "adaptive_spec_plan"
_MODE = "adaptive_spec_mode"
_MAY_BE_CUT = "adaptive_spec_may_be_cut"
_PLAIN_GRAPH_SIZES = "adaptive_spec_plain_graph_sizes"
_PLAIN_STEPS = "adaptive_spec_plain_steps"
_output_ids = attrgetter("output_ids")

_READ_DONE = "shared_read_done_event"

_BACKLOG_TOKENS, _BACKLOG_REQUESTS = 4096, 128
"""Prompts that wait for the draft together: enough to launch it seldom, few enough to take little memory (100 MB for a
target of width 4096)."""

_FAR_TOKENS = 2**30
"""More than any request has: one with so many fewer needs no slot."""

_LOGITS_BYTES = 2**30
_BYTES_A_LOGIT = 6  # in the model's 16 bits, and once more in float32

SPECULATION_OFF: dict[str, Any] = {
    "speculative_algorithm": None,
    "speculative_eagle_topk": None,
    "speculative_num_draft_tokens": None,
    "speculative_num_steps": None,
}

# What a plain step or a catch-up changes on the batch, restored before anything else looks at it.
STEP_FIELDS = (
    "capture_hidden_mode",
    "extend_lens",
    "extend_num_tokens",
    "forward_mode",
    "input_ids",
    "out_cache_loc",
    "prefix_lens",
    "return_logprob",
    "seq_lens",
    "seq_lens_cpu",
    "seq_lens_sum",
    "spec_algorithm",
    "spec_info",
)


@dataclass(frozen=True)
class DraftSync:
    """SGLang's draft-extend, built for the width of a catch-up, and what waits for it.

    Attributes:
        attn_backend: The draft's attention backend for catch-ups; None for the one it has.
        ring: What waits.
        keys_only: Writes keys and values without a whole forward; None for a draft that needs one to follow.
        launch_tokens: The most tokens of one forward.
        most_requests: That may run at once.
        context_tokens: The model's longest sequence.
    """

    attn_backend: Any
    ring: HiddenRing
    keys_only: KeysOnly | None
    launch_tokens: int
    most_requests: int
    context_tokens: int


class Sglang0514:
    """The adapter for 0.5.14."""

    unserved: tuple[Unserved, ...] = UNSERVED
    step_fields: tuple[str, ...] = STEP_FIELDS
    reserve_times: int = 1
    last_tokens = "bonus_tokens"
    """What a draft input calls the last token of each request."""
    accepted_drafts = "num_correct_drafts"
    """What a result calls the drafts that its verify step accepted."""
    decode_graphs = "decode_cuda_graph_runner"
    prefill_graphs = "prefill_cuda_graph_runner"
    plain_prefills_by_graph = True
    """Whether SGLang's prefill graphs give the states that a draft reads."""
    reads: tuple[str, ...] = attributes(
        READS,
        {
            ARGUMENTS: f"{SERVER_ARGUMENTS} {ARGUMENT_METHODS} _cuda_graph_config_locked",
            BATCH: "capture_hidden_mode",
            REQUEST: "kv_committed_len req_pool_idx",
            SET_STATE_OUTPUT: "server_args",
            RUNNER: "mambaish_config tp_group war_fastpath_read_done_event",
            WORKER: "req_to_token_pool tp_rank",
            DRAFT_INPUT: "dtype_for hidden_size_for",
            DRAFT_WORKER: "draft_tp_context",
        },
    )
    relies_on: tuple[str, ...] = (
        *RELIES_ON,
        RECAPTURES,
        *GRAPH_SIZES,
        "sglang.srt.model_executor.model_runner_kv_cache_mixin:ModelRunnerKVCacheMixin._resolve_max_num_reqs",
        f"{REQUEST}._cache_commit_len",
        f"{REQUEST}.pop_overallocated_kv_cache",
    )
    prompts_may_wait: bool = True
    """Whether the draft's reading of a prompt may wait; not proven on releases before 0.5.14."""

    @property
    def patches(self) -> tuple[Patch, ...]:
        """Read from ``sglang_adaptive_spec.patches``, where each says what it is for."""
        patches: tuple[Patch, ...] = importlib.import_module("sglang_adaptive_spec.patches").PATCHES
        return patches

    def arguments(self, server_args: Any, **as_asked: Any) -> Any:
        return Arguments(server_args, as_asked)

    def preflight(self, server_args: Any, settings: Settings) -> None:
        refuse_unserved(server_args, settings, self.unserved)

    def request_limit_open(self, server_args: Any) -> AbstractContextManager[Any]:
        # Any number keeps it from 48, and from saying so.
        return swapped(server_args, max_running_requests=1)

    def take_limits(self, server_args: Any, most_spec_requests: int | None) -> None:
        config = server_args.cuda_graph_config.decode
        # SGLang's own account of what the user gave.
        if ("decode", "bs") in server_args._cuda_graph_config_locked or not config.bs or config.max_bs is None:
            return
        with swapped(server_args, speculative_algorithm=None):
            plain_sizes = server_args._generate_decode_cuda_graph_batch_sizes(config.max_bs)
        # No declared field, and still carried to the scheduler's process.
        setattr(server_args, _PLAIN_GRAPH_SIZES, plain_sizes)
        if most_spec_requests is not None and most_spec_requests < config.max_bs:
            config.bs = [size for size in config.bs if size < most_spec_requests] + [most_spec_requests]

    def make_room(self, server_args: Any, settings: Settings) -> None:
        def leave_out(above: int) -> None:
            config = server_args.cuda_graph_config.decode
            config.bs = [size for size in config.bs if size <= above]

        # Plain steps keep theirs; a threshold that was asked for has to be within reach of speculation.
        apart = hasattr(server_args, _PLAIN_GRAPH_SIZES) and settings.policy != "threshold"
        flashinfer_workspace.make_room(self.arguments(server_args), leave_out if apart else None)

    def check_reach(self, settings: Settings, most_requests: int | None, spec_graph_sizes: tuple[int, ...]) -> None:
        refuse_unreachable(settings, most_requests, spec_graph_sizes)

    @contextmanager
    def offline_engine(self, arguments: Sequence[str], once_parsed: Callable[[], None]) -> Iterator[dict[str, Any]]:
        from sglang.srt.plugins import load_plugins

        load_plugins()
        from sglang import Engine
        from sglang.srt.server_args import prepare_server_args

        server_args = prepare_server_args(list(arguments))
        once_parsed()
        engine = Engine(server_args=server_args)
        try:
            state: dict[str, Any] = engine.get_server_info()["internal_states"][0]["adaptive_spec"]
            yield state
        finally:
            engine.shutdown()

    def speculates(self, server_args: Any) -> bool:
        return server_args.speculative_algorithm is not None

    # --- the batch, while the scheduler prepares it ------------------------------------------------------

    def is_speculative(self, batch: Any) -> bool:
        return not batch.spec_algorithm.is_none()

    def batch_size(self, batch: Any) -> int:
        return len(batch.reqs)

    def stamp(self, batch: Any, plan: StepPlan) -> None:
        # Not a dataclass field of ScheduleBatch, so the scheduler's snapshot and copy() leave it alone.
        setattr(batch, _PLAN, plan)

    def plan_of(self, batch: Any) -> StepPlan | None:
        plan: StepPlan | None = getattr(batch, _PLAN, None)
        return plan

    def prepare_decode(self, batch: Any) -> None:
        batch.spec_info.prepare_for_decode(batch)

    def prepare_reserving(self, batch: Any, reserve_tokens: int | None, upstream: Callable[[Any], Any]) -> Any:
        del reserve_tokens  # the answer is all that it takes
        return upstream(batch)

    def carry(self, batch: Any, copied: Any) -> None:
        """The worker gets the batch itself."""

    def claim(self, batch: Any) -> None:
        """Preparation has claimed the slot of the step, as it does without speculation."""

    def host_seq_lens(self, batch: Any) -> Any:
        # Preparation has already claimed the slot of this step.
        return host_tensor(self._committed(batch, less=1))

    def mean_context_tokens(self, batch: Any) -> int:
        lengths = batch.seq_lens_cpu
        if lengths is not None and len(lengths) == len(batch.reqs):
            return int(lengths.sum()) // max(1, len(lengths))
        return int(sum(self._committed(batch))) // max(1, len(batch.reqs))

    def most_accepted_tokens(self, server_args: Any) -> int:
        return int(self.arguments(server_args).speculative_num_steps) + 1

    def spec_steps_that_fit(self, batch: Any) -> int:
        allocator = batch.token_to_kv_pool_allocator
        # Cheap and nearly always enough; the exact estimate below walks the requests and may evict.
        most = len(batch.reqs) * (self._spec_reserve_tokens + allocator.page_size)
        return int(allocator.available_size() // most or batch.check_decode_mem())

    @cached_property
    def _spec_reserve_tokens(self) -> int:
        # SGLang computes it anew at every call, from arguments that don't change. Not by the names that are wrapped:
        # they answer for the mode that a batch may run in.
        from sglang.srt.mem_cache.common import get_alloc_reserve_per_decode

        return int(get_alloc_reserve_per_decode())

    @cached_property
    def _no_algorithm(self) -> Any:
        from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

        return SpeculativeAlgorithm.NONE

    # --- the worker --------------------------------------------------------------------------------------

    def check_worker(self, worker: Any) -> None:
        if worker.plan_stream is not None:
            raise PLAN_STREAM.refusal()
        runner = worker.target_worker.model_runner
        if self._is_recurrent(runner):
            raise RECURRENT.refusal()
        if runner.sliding_window_size is not None:
            raise SLIDING_WINDOW.refusal()

    def build_plain_runtime(self, worker: Any, catch_up_tokens: int | None) -> PlainRuntime:
        from sglang.srt.utils.common import get_available_gpu_memory

        def free_gib() -> float:
            return float(get_available_gpu_memory(worker.device, worker.gpu_id))

        start, free_before = time.perf_counter(), free_gib()
        keeps_draft = catch_up_tokens is not None
        attn_backend, graph_runner, sizes = self._build_target(worker, capture_hidden=keeps_draft)
        draft_sync = None if catch_up_tokens is None else self._build_draft_sync(worker, catch_up_tokens)
        ring_gib = draft_sync.ring.memory_gib if draft_sync else 0.0
        return PlainRuntime(
            attn_backend=attn_backend,
            graph_runner=graph_runner,
            draft_sync=draft_sync,
            draft_ring_gib=ring_gib,
            # On a CPU what is free says little: others use it, and memory counts once it is written to.
            memory_gib=max(ring_gib, free_before - free_gib()),
            build_seconds=time.perf_counter() - start,
            graph_sizes=sizes,
        )

    def _build_target(self, worker: Any, *, capture_hidden: bool) -> tuple[Any, Any, tuple[int, ...]]:
        runner = worker.target_worker.model_runner
        live, graph_runner = runner.attn_backend, self._graph_runner()
        with ExitStack() as stack:
            stack.enter_context(self._without_speculation(runner, capture_hidden=capture_hidden))
            if not capture_hidden:
                stack.enter_context(_without_aux_capture(runner.model))
            new_workspace = runner.init_new_workspace
            try:
                backend = runner._get_attention_backend(init_new_workspace=True)
            finally:
                runner.init_new_workspace = new_workspace
            self._name_backends(backend, live)
            if not isinstance(getattr(runner, self.decode_graphs), graph_runner):
                return backend, getattr(runner, self.decode_graphs), ()
            stack.enter_context(self._plain_graph_sizes(runner))
            graphs = graph_runner(runner, attn_backend=backend)
            return backend, graphs, tuple(graphs.capture_bs)

    def _build_draft_sync(self, worker: Any, catch_up_tokens: int) -> DraftSync:
        draft = worker.draft_worker
        # A chain's width is its steps and one; no step is drafted at this width, so no backend is built for any.
        with (
            self._draft_contexts(draft),
            self._as_wide(worker, catch_up_tokens),
            swapped(draft, speculative_num_steps=0),
        ):
            draft.init_attention_backend()
            attn_backend = draft.draft_extend_attn_backend
        hidden_size, dtype = self._target_hidden(draft)
        ring = HiddenRing(
            rows=self.rows_in_all(worker),
            chunk_tokens=catch_up_tokens,
            hidden_size=hidden_size,
            dtype=dtype,
            device=worker.device,
        )
        runner = draft.draft_runner
        # With one token at a time the last position is all there is. A latent state has no key of its own to write.
        plain_keys = attention_layers(runner.model) == 1 and runner.model_config.attention_arch.name != "MLA"
        follows_by_keys = plain_keys and catch_up_tokens > 1
        pools = runner.token_to_kv_pool, runner.req_to_token_pool
        keys_only = keys_only_backend(*pools) if follows_by_keys else None
        launch_tokens = self._launch_tokens(runner, logits=keys_only is None)
        most_requests = self.most_requests(worker)
        return DraftSync(attn_backend, ring, keys_only, launch_tokens, most_requests, self.context_tokens(worker))

    def most_requests(self, worker: Any) -> int:
        return int(worker.target_worker.model_runner.max_running_requests)

    def spec_graph_sizes(self, worker: Any) -> tuple[int, ...]:
        graphs = getattr(worker.target_worker.model_runner, self.decode_graphs)
        return tuple(graphs.capture_bs) if isinstance(graphs, self._graph_runner()) else ()

    def idle_batch(
        self, worker: Any, runtime: PlainRuntime, requests: int, context_tokens: int
    ) -> AbstractContextManager[IdleBatch | None]:
        def run_plain(batch: Any) -> Any:
            return self.run_plain_decode(worker, runtime, self._as_worker_gets(batch), None)

        def run_spec(batch: Any, publish: Callable[[Any], None]) -> Any:
            return self._run_spec(worker, batch, publish)

        def catch_up(batch: Any, due: tuple[Any, Any]) -> None:
            given = self._as_worker_gets(batch)
            self.catch_up(worker, runtime, given, self.draft_input(given), due, drafts_next=True)

        served = Steps(
            worker=worker,
            run_plain=run_plain,
            run_spec=run_spec,
            catch_up=catch_up,
            overlaps=not self.arguments(worker.server_args).disable_overlap_schedule,
            needs_lengths=self._needs_lengths(worker),
            reserve_tokens=self._spec_reserve_tokens + 1,
            draft_hidden=self._draft_hidden(worker.draft_worker),
            last_tokens=self.last_tokens,
            read_done_event=self._read_done_event(worker.target_worker.model_runner),
        )
        return idle_batch(served, requests, context_tokens)

    def ranks(self, worker: Any) -> int:
        return int(self.arguments(worker.server_args).tp_size)

    def rank(self, worker: Any) -> int:
        return int(worker.tp_rank)

    def from_rank_0(self, worker: Any, value: Any) -> Any:
        return self._tp_group(worker).broadcast_object(value, src=0)

    def setup(self, worker: Any) -> dict[str, Any]:
        return describe_setup(worker, self.arguments(worker.server_args))

    def free_gib(self, worker: Any) -> float:
        from sglang.srt.utils.common import get_available_gpu_memory

        ranks = self._tp_group(worker)
        return float(
            get_available_gpu_memory(
                worker.device, worker.gpu_id, distributed=ranks.world_size > 1, cpu_group=ranks.cpu_group
            )
        )

    def draft_ring_gib(self, worker: Any, chunk_tokens: int) -> float:
        hidden_size, dtype = self._target_hidden(worker.draft_worker)
        return float(self.rows_in_all(worker) * chunk_tokens * hidden_size * dtype.itemsize) / 2**30

    def rows_in_all(self, worker: Any) -> int:
        return int(worker.req_to_token_pool.req_to_token.shape[0])

    def context_tokens(self, worker: Any) -> int:
        return int(worker.target_worker.model_runner.model_config.context_len)

    def rows(self, batch: Any) -> Any:
        return batch.req_pool_indices_cpu

    def is_decode(self, batch: Any) -> bool:
        decode: bool = batch.forward_mode.is_decode() and not batch.is_extend_in_batch
        return decode

    def run_plain_decode(self, worker: Any, runtime: PlainRuntime, batch: Any, publish: Any) -> Any:
        draft_input, seq_lens = batch.spec_info, batch.seq_lens
        runner = worker.target_worker.model_runner
        read_done = self._read_done_event(runner)
        with self._plain_view(batch), self._on_runtime(runner, runtime):
            batch.input_ids = getattr(draft_input, self.last_tokens).to(torch.int64)
            batch.out_cache_loc = self._slots(batch, runner.req_to_token_pool)
            batch.seq_lens = new_seq_lens = self._next_lengths(batch)
            batch.seq_lens_cpu = batch.seq_lens_cpu + 1
            batch.seq_lens_sum = self._sum(batch.seq_lens_cpu)
            # From 0.5.18 on a verify step leaves its own there, and an eager step puts none in its place.
            setattr(runner, read_done, None)
            result = self._run_target(worker, batch, _hidden_mode(full=runtime.draft_sync is not None))
        result.new_seq_lens = new_seq_lens
        result.speculative_num_draft_tokens = 1
        # A copy carries every extra along that the relay may expect.
        result.next_draft_input = _shallow_copy(draft_input)
        self._hand_on(result.next_draft_input, result.next_token_ids, new_seq_lens)
        setattr(result, _MODE, Mode.PLAIN)
        if publish is not None:
            publish(new_seq_lens)
        _hand_over(read_done, runner, worker.draft_worker.draft_runner)
        if runtime.draft_sync is not None:
            runtime.draft_sync.ring.store(
                batch.req_pool_indices, seq_lens, result.logits_output.hidden_states, result.next_token_ids
            )
        return result

    def positions(self, batch: Any) -> Any:
        return batch.seq_lens_cpu

    def draft_input(self, batch: Any) -> Any:
        return batch.spec_info

    def next_draft_input(self, result: Any) -> Any:
        return result.next_draft_input

    def catch_up(
        self,
        worker: Any,
        runtime: PlainRuntime,
        batch: Any,
        draft_input: Any,
        due: tuple[Any, Any],
        *,
        drafts_next: bool,
    ) -> Any:
        sync: Any = runtime.draft_sync
        starts, counts = due
        if sync.keys_only is None:
            for part, width in _launches(sync, due):
                self._extend_draft(worker, sync, batch, draft_input, part, width)
            return counts
        # The last position takes a whole forward, whose output the next draft starts from; it waits till then.
        before_last = (counts - 1).clamp(min=0)
        for part, width in _launches(sync, (starts, before_last)):
            self._write_keys(worker, sync, batch, part, width)
        if not drafts_next:
            return before_last
        self._extend_draft(worker, sync, batch, draft_input, (starts + before_last, counts.clamp(max=1)), 1)
        return counts

    def _write_keys(self, worker: Any, sync: DraftSync, batch: Any, due: tuple[Any, Any], width: int) -> None:
        with self._by_keys_alone(worker, sync):
            self._run_extend(worker, sync, batch, due, width)

    @contextmanager
    def _by_keys_alone(self, worker: Any, sync: DraftSync) -> Iterator[None]:
        """Let the draft's forward end, eager, once its keys and values are written."""
        eager = {"attn_backend": sync.keys_only, self.prefill_graphs: None}
        with swapped(worker.draft_worker.draft_runner, **eager), suppress(KeysWritten):
            yield

    def _extend_draft(
        self, worker: Any, sync: DraftSync, batch: Any, draft_input: Any, due: tuple[Any, Any], width: int
    ) -> None:
        draft = worker.draft_worker
        with ExitStack() as stack:
            stack.enter_context(swapped(draft, draft_extend_attn_backend=sync.attn_backend))
            if sync.attn_backend is not None:
                stack.enter_context(swapped(draft.draft_runner, attn_backend=sync.attn_backend))
            result = self._run_extend(worker, sync, batch, due, width)
        fresh = result.next_draft_input
        if bool((due[1] > 0).all()):
            draft_input.topk_p, draft_input.topk_index = fresh.topk_p, fresh.topk_index
            draft_input.hidden_states = fresh.hidden_states
            return
        waited = (result.accept_lens > 0).unsqueeze(1)
        draft_input.topk_p = torch.where(waited, fresh.topk_p, draft_input.topk_p)
        draft_input.topk_index = torch.where(waited, fresh.topk_index, draft_input.topk_index)
        draft_input.hidden_states = torch.where(waited, fresh.hidden_states, draft_input.hidden_states)

    def _run_extend(self, worker: Any, sync: DraftSync, batch: Any, due: tuple[Any, Any], width: int) -> Any:
        """SGLang's draft-extend over ``width`` positions a request; eager, since it happens once in many steps."""
        from sglang.srt.layers.logits_processor import LogitsProcessorOutput
        from sglang.srt.managers.utils import GenerationBatchResult
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        draft, rows = worker.draft_worker, batch.req_pool_indices
        starts, counts = torch.stack(due).to(rows.device, non_blocking=True)
        span = sync.ring.span(starts, width)
        hidden, tokens = sync.ring.read(rows, span)
        slots = worker.req_to_token_pool.req_to_token[rows.unsqueeze(1), span]
        # Columns that nothing waits in write to slot 0, SGLang's own place for padding.
        slots = torch.where(sync.ring.inside(counts, width), slots, 0).to(torch.int64).flatten()
        # In the form of a verify step that accepted what waits.
        accepted = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden),
            next_token_ids=tokens,
            accept_lens=counts.to(torch.int32),
            next_draft_input=EagleDraftInput(),
        )
        # It reads the shared buffers until its end: whoever writes to them has to wait for the whole forward.
        setattr(draft.draft_runner, self._read_done_event(draft.draft_runner), None)
        with (
            _kept(batch, self.step_fields),
            self._draft_contexts(draft),
            swapped(draft, **self._of_width(width), cuda_graph_runner_for_draft_extend=None),
        ):
            batch.seq_lens, batch.seq_lens_cpu, batch.seq_lens_sum = starts, due[0], self._sum(due[0])
            batch.out_cache_loc = slots
            batch.return_logprob = False
            draft._draft_extend_for_decode(batch, accepted)
        return accepted

    def stopwatch(self, worker: Any) -> Stopwatch:
        return HostStopwatch() if worker.device == "cpu" else _DeviceStopwatch()

    def limit_committed(self, req: Any, true_length: Callable[[int, int], int]) -> None:
        kv = self._kv(req)
        if kv.req_pool_idx is not None:
            kv.kv_committed_len = true_length(kv.req_pool_idx, kv.kv_committed_len)

    def run_plain_prefill(self, worker: Any, batch: Any, publish: Any) -> Any:
        runner = worker.target_worker.model_runner
        # SGLang's graphs for prefills, where it has any, were captured with the states that the draft would read.
        by_graph = self.plain_prefills_by_graph and self.draft_has_prefill_graphs(worker)
        if by_graph and not self.arguments(runner.server_args).enable_return_hidden_states:
            with self._plain_view(batch):
                result = self._run_target(worker, batch, _hidden_mode(full=True))
            result.logits_output.hidden_states = None  # nobody's
        else:
            eager = {self.prefill_graphs: None}
            with self._plain_view(batch), _without_aux_capture(runner.model), swapped(runner, **eager):
                result = worker.target_worker.forward_batch_generation(batch)
        return self._undrafted(worker, batch, publish, result)

    def _undrafted(self, worker: Any, batch: Any, publish: Any, result: Any) -> Any:
        """A prefill's result in the form of a speculative one that nothing was drafted from."""
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        result.new_seq_lens = batch.seq_lens
        if publish is not None:
            publish(result.new_seq_lens)
        topk_p, topk_index, hidden_states = self._no_draft(worker, len(batch.reqs))
        result.next_draft_input = EagleDraftInput(
            topk_p=topk_p,
            topk_index=topk_index,
            hidden_states=hidden_states,
            num_tokens_per_req=1,
            num_tokens_for_logprob_per_req=1,
            **{self.last_tokens: result.next_token_ids},
        )
        return result

    def _no_draft(self, worker: Any, requests: int) -> NoDraft:
        """What nothing was drafted from: probabilities, tokens and states, each ``[requests, width]``."""
        known = self._no_drafts.get(requests)
        if known is None:
            hidden_size, dtype = self._draft_hidden(worker.draft_worker)
            shapes = ((worker.topk, torch.float32), (worker.topk, torch.int64), (hidden_size, dtype))
            rows = [torch.zeros((1, n), dtype=t, device=worker.device) for n, t in shapes]
            topk_p, topk_index, hidden = (row.expand(requests, -1) for row in rows)
            known = self._no_drafts[requests] = topk_p, topk_index, hidden
        return known

    @cached_property
    def _no_drafts(self) -> dict[int, NoDraft]:
        # By the number of requests: views of one row of zeros each, to which nobody writes.
        return {}

    def backlog_limits(self, runtime: PlainRuntime) -> tuple[int, int] | None:
        sync: Any = runtime.draft_sync
        if not self.prompts_may_wait or sync is None or sync.keys_only is None:
            return None
        return min(_BACKLOG_TOKENS, sync.launch_tokens), min(_BACKLOG_REQUESTS, sync.most_requests)

    def draft_has_prefill_graphs(self, worker: Any) -> bool:
        return getattr(worker.draft_worker.draft_runner, self.prefill_graphs) is not None

    def prompts_go_on(self, batch: Any) -> bool:
        return batch.chunked_req is not None

    def prefill_size(self, batch: Any) -> PrefillSize | None:
        if batch.forward_mode.name != "EXTEND":  # one mixed with decode steps is not
            return None
        if batch.input_embeds is not None or batch.replace_embeds is not None:
            return None
        return PrefillSize(sum(batch.extend_lens), len(batch.reqs), max(batch.seq_lens_cpu.tolist()))

    def run_prefill_ahead_of_draft(
        self, worker: Any, runtime: PlainRuntime, batch: Any, publish: Any
    ) -> tuple[Any, Any, Any]:
        from sglang.srt.speculative.eagle_utils import _eagle_prefill_tail_tokens

        sync: Any = runtime.draft_sync
        kept = keep(batch, _shallow_copy(batch))
        result = self._undrafted(worker, batch, publish, self._run_target(worker, batch, _hidden_mode(full=True)))
        hidden = result.logits_output.hidden_states
        tails = _eagle_prefill_tail_tokens(batch, result.next_token_ids)
        # A graph gives a view of what its next replay overwrites.
        states = hidden.clone() if result.can_run_cuda_graph else hidden
        prompts = Prompts(kept, states, tails, self.rows(batch).tolist())
        # Where a request will be drafted from: the switch needs a whole forward of that position.
        positions = [length - 1 for length in kept.seq_lens_cpu.tolist()]
        ends = [end - 1 for end in accumulate(kept.extend_lens)]
        sync.ring.store_prompt_ends(prompts.rows, positions, ends, hidden, result.next_token_ids)
        goes_on = batch.chunked_req
        drafted_from = [-1 if req is goes_on else at for req, at in zip(batch.reqs, positions, strict=True)]
        return result, prompts, host_tensor(drafted_from)

    def kv_slots(self, worker: Any, req: Any) -> Any:
        kv = self._kv(req)
        return slots_of_row(worker.req_to_token_pool.req_to_token, kv.req_pool_idx, kv.kv_committed_len)

    def read_prompts(self, worker: Any, runtime: PlainRuntime, prompts: Sequence[Any], left: Mapping[int, Any]) -> None:
        sync: Any = runtime.draft_sync
        draft = worker.draft_worker
        batch, hidden, tails = merged(prompts, worker.req_to_token_pool.req_to_token, left)
        # As for a catch-up: it reads the shared buffers until its end.
        setattr(draft.draft_runner, self._read_done_event(draft.draft_runner), None)
        with self._draft_contexts(draft), self._by_keys_alone(worker, sync):
            draft._draft_extend_for_prefill(batch, hidden, tails)

    def reserve_for_spec(self, worker: Any, batch: Any, prepare: Callable[[Any], Any]) -> None:
        # Penalties were counted when the step was prepared the first time.
        unpenalized = SimpleNamespace(penalizer_orchestrator=SimpleNamespace(is_required=False))
        with self._nothing_for_who_left(worker, batch), swapped(batch, sampling_info=unpenalized):
            prepare(batch)
        for req in batch.reqs:
            self._kv(req).kv_committed_len -= 1
            req.decode_batch_idx -= 1

    @contextmanager
    def _nothing_for_who_left(self, worker: Any, batch: Any) -> Iterator[None]:
        """Keep SGLang from reserving for requests that have given their slots back.

        A grammar lets results be processed before the worker gets the batch, and who ends with them is still in it.
        """
        left = [i for i, req in enumerate(batch.reqs) if self._kv(req).req_pool_idx is None]
        if not left:
            yield
            return
        rows = self.rows(batch)[left]
        kvs = [self._kv(batch.reqs[i]) for i in left]
        for kv in kvs:
            kv.kv_committed_len -= _FAR_TOKENS
        try:
            yield
        finally:
            for kv in kvs:
                kv.kv_committed_len += _FAR_TOKENS
        # Their slots may be others' by now. What the step still writes for them goes where padding goes.
        worker.req_to_token_pool.req_to_token[rows.to(batch.req_pool_indices.device)] = 0

    # --- results -----------------------------------------------------------------------------------------

    def mode_of_result(self, result: Any) -> Mode:
        mode: Mode = getattr(result, _MODE, Mode.SPEC)
        return mode

    def as_plain_result_batch(self, batch: Any) -> Any:
        view = _shallow_copy(batch)
        view.spec_algorithm = self._no_algorithm
        return view

    def result_counts(self, batch: Any, result: Any) -> tuple[int, int]:
        requests = len(batch.reqs)
        return requests, requests + getattr(result, self.accepted_drafts)

    def tokens_of(self, batch: Any, result: Any, reqs: list[Any]) -> int:
        drafts = getattr(result, f"{self.accepted_drafts}_per_req_cpu") or [0] * len(batch.reqs)
        return sum(1 + drafts[i] for i, req in enumerate(batch.reqs) if req in reqs)

    def expect_cuts(self, batch: Any, result: Any) -> None:
        if batch.has_grammar:
            setattr(result, _MAY_BE_CUT, True)

    def may_be_cut(self, result: Any) -> bool:
        return hasattr(result, _MAY_BE_CUT)

    def output_tokens(self, batch: Any) -> int:
        return sum(map(len, map(_output_ids, batch.reqs)))

    def row(self, req: Any) -> int | None:
        row: int | None = self._kv(req).req_pool_idx
        return row

    def overshoot_tokens(self, req: Any) -> int:
        return 0 if req.finished_len is None else len(req.output_ids) - int(req.finished_len)

    def report_plain_steps(self, req: Any, plain_steps: int) -> None:
        # A request that is retracted leaves more than once.
        plain_steps += getattr(req, _PLAIN_STEPS, 0)
        setattr(req, _PLAIN_STEPS, plain_steps)
        req.spec_verify_ct = VerifySteps(req.spec_verify_ct, plain_steps)

    @contextmanager
    def without_spec_report(self, reporter: Any) -> Iterator[None]:
        with swapped(reporter.scheduler, spec_algorithm=self._no_algorithm), acceptance_kept(reporter):
            yield

    def telemetry(
        self, reporter: Any, snapshot: Callable[[], dict[str, Any]], on_fault: Callable[[Exception], None]
    ) -> Telemetry | None:
        if not reporter.current_scheduler_metrics_enabled:
            return None
        # Not before SGLang has set PROMETHEUS_MULTIPROC_DIR.
        from prometheus_client import Counter, Gauge

        collector = reporter.metrics_collector
        counter, gauge = self._metric_classes(collector)
        return Telemetry(snapshot, collector.labels, counter or Counter, gauge or Gauge, on_fault)

    # --- what moves from family to family ----------------------------------------------------------------

    def _as_wide(self, worker: Any, tokens: int) -> AbstractContextManager[Any]:
        """Let a worker build what a draft-extend over so many positions a request runs on."""
        override: AbstractContextManager[Any] = worker._override_worker_state(tokens - 1, tokens)
        return override

    def _slots(self, batch: Any, pool: Any) -> Any:
        """Where a plain step writes its tokens' keys and values, ``[batch_size]`` int64 on the device."""
        # Gathered on the GPU: after a verify step only the GPU knows where the next token belongs.
        return pool.req_to_token[batch.req_pool_indices, batch.seq_lens].to(torch.int64)

    def _next_lengths(self, batch: Any) -> Any:
        """Lengths after a plain step, on the device."""
        return batch.seq_lens + 1

    def _sum(self, lengths: Any) -> int | None:
        """The sum of lengths on the CPU; None where ForwardBatch adds them up."""
        del lengths
        return None

    def _hand_on(self, draft_input: Any, tokens: Any, new_seq_lens: Any) -> None:
        """Tell the next step of a plain one."""
        del new_seq_lens
        setattr(draft_input, self.last_tokens, tokens)

    def _of_width(self, tokens: int) -> dict[str, int]:
        """A draft worker's attributes for a draft-extend over so many positions a request."""
        return {"speculative_num_draft_tokens": tokens}

    def _run_spec(self, worker: Any, batch: Any, publish: Callable[[Any], None]) -> Any:
        """One speculative step of SGLang's own on a batch of :meth:`idle_batch`."""
        return worker.forward_batch_generation(batch, on_publish=publish)

    def _metric_classes(self, collector: Any) -> tuple[Any, Any]:
        """What SGLang makes counters and gauges of; None for Prometheus's own."""
        return collector._counter_cls, collector._gauge_cls

    def _as_worker_gets(self, batch: Any) -> Any:
        """A prepared batch in the form in which the worker gets it."""
        return batch

    def _kv(self, req: Any) -> Any:
        """What holds a request's row and its committed length."""
        return req

    def _committed(self, batch: Any, less: int = 0) -> list[int]:
        """The requests' committed lengths, less what is committed ahead of its step."""
        return [req.kv_committed_len - less for req in batch.reqs]

    def _tp_group(self, worker: Any) -> Any:
        return worker.target_worker.model_runner.tp_group

    def _read_done_event(self, runner: Any) -> str:
        """The attribute of a runner that says when its step has read the shared buffers."""
        return "war_fastpath_read_done_event" if hasattr(runner, "war_fastpath_read_done_event") else _READ_DONE

    def _needs_lengths(self, worker: Any) -> bool:
        """Whether a speculative step needs its requests' lengths on the host."""
        from sglang.srt.managers.overlap_utils import decide_needs_cpu_seq_lens

        return bool(decide_needs_cpu_seq_lens(worker.server_args, worker.spec_v2_attn_backends))

    def _graph_runner(self) -> Any:
        """The class of the target's decode graphs."""
        from sglang.srt.model_executor.runner import DecodeCudaGraphRunner

        return DecodeCudaGraphRunner

    def _plain_graph_sizes(self, runner: Any) -> AbstractContextManager[Any]:
        """Let a runner capture the sizes of plain steps."""
        config = self._decode_graph_config(runner)
        return swapped(config, bs=getattr(runner.server_args, _PLAIN_GRAPH_SIZES, config.bs))

    def _name_backends(self, backend: Any, live: Any) -> None:
        # Set by ModelRunner.init_attention_backend on its own; models dispatch on them.
        backend.prefill_attention_backend_str = live.prefill_attention_backend_str
        backend.decode_attention_backend_str = live.decode_attention_backend_str

    @contextmanager
    def _on_runtime(self, runner: Any, runtime: PlainRuntime) -> Iterator[None]:
        """Let the target forward on the plain backend and graphs; both are read live on each forward."""
        live = runner.attn_backend, getattr(runner, self.decode_graphs)
        runner.attn_backend = runtime.attn_backend
        setattr(runner, self.decode_graphs, runtime.graph_runner)
        try:
            with nullcontext() if runtime.draft_sync is not None else _without_aux_capture(runner.model):
                yield
        finally:
            runner.attn_backend = live[0]
            setattr(runner, self.decode_graphs, live[1])

    def _is_recurrent(self, runner: Any) -> bool:
        return runner.mambaish_config is not None

    def _decode_graph_config(self, runner: Any) -> Any:
        return runner.server_args.cuda_graph_config.decode

    def _draft_hidden(self, draft: Any) -> tuple[int, torch.dtype]:
        """Of the states that a draft step hands to the next one."""
        from sglang.srt.speculative.eagle_info import EagleDraftInput

        return EagleDraftInput.hidden_size_for(draft), EagleDraftInput.dtype_for(draft)

    def _target_hidden(self, draft: Any) -> tuple[int, torch.dtype]:
        """Of the target's states that the draft reads."""
        from sglang.srt.speculative.eagle_info import EagleDraftExtendInput

        return EagleDraftExtendInput.hidden_size_for(draft), EagleDraftExtendInput.dtype_for(draft)

    def _run_target(self, worker: Any, batch: Any, hidden_mode: Any) -> Any:
        batch.capture_hidden_mode = hidden_mode
        return worker.target_worker.forward_batch_generation(batch)

    def _draft_tp_context(self, draft: Any) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = draft.draft_tp_context(draft.draft_runner.tp_group)
        return context

    @contextmanager
    def _draft_contexts(self, draft: Any) -> Iterator[None]:
        """What SGLang's own worker enters around everything that runs on the draft."""
        from sglang.srt.layers.moe.utils import (
            speculative_moe_a2a_backend_context,
            speculative_moe_backend_context,
        )

        with (
            self._draft_tp_context(draft),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield

    @contextmanager
    def _plain_view(self, batch: Any) -> Iterator[None]:
        """Let a batch look as it would on a server without speculation."""
        with _kept(batch, self.step_fields):
            batch.spec_info = None
            batch.spec_algorithm = self._no_algorithm
            yield

    @contextmanager
    def _without_speculation(self, runner: Any, *, capture_hidden: bool) -> Iterator[None]:
        """Let a model runner build backends and graphs as it would on a server without speculation."""
        with swapped(runner, spec_algorithm=self._no_algorithm), ExitStack() as stack:
            stack.enter_context(self._configured(runner, SPECULATION_OFF))
            if capture_hidden:
                # Graphs are captured with full hidden states from the start: a step could not, or would recapture.
                stack.enter_context(self._configured(runner, {"enable_return_hidden_states": True}))
            yield

    def _configured(self, runner: Any, values: dict[str, Any]) -> AbstractContextManager[Any]:
        return swapped(runner.server_args, **values)

    def _buffer_limits(self, runner: Any) -> tuple[int | None, int, int]:
        """Tokens of a prefill chunk (None or less than 1: unlimited), of a prefill's buffers, of a widest step."""
        arguments = runner.server_args
        prefill = int(arguments.max_prefill_buffer_tokens())
        return arguments.chunked_prefill_size, prefill, int(arguments.max_speculative_num_draft_tokens)

    def _launch_tokens(self, runner: Any, *, logits: bool) -> int:
        """The most tokens that one eager forward of the draft can take, and should.

        ``EagerRunner`` sizes its input buffers to the larger of a prefill and a widest step of every request. A
        whole draft-extend computes logits for each token, which nothing at start has reckoned with: their memory is
        bounded unless a step of SGLang's own takes more.

        Args:
            logits: Whether the forward gets as far as the logits.
        """
        chunk, prefill, step = self._buffer_limits(runner)
        if not chunk or chunk < 1:
            prefill = int(runner.max_total_num_tokens)
        graphs = self._decode_graph_config(runner)
        # Where there are graphs, a batch larger than all of them goes plain.
        most_requests = runner.max_running_requests
        if graphs.backend != "disabled" and graphs.bs:
            most_requests = min(most_requests, max(graphs.bs))
        widest_step = int(most_requests * step)
        if not logits:
            return max(widest_step, prefill)
        config = runner.model_config.hf_config
        vocab_size = getattr(config, "draft_vocab_size", None) or runner.model_config.vocab_size
        return max(widest_step, min(prefill, _LOGITS_BYTES // (_BYTES_A_LOGIT * int(vocab_size))))


def _hidden_mode(*, full: bool) -> Any:
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode

    # None lets ForwardBatch choose, as it does without speculation.
    return CaptureHiddenMode.FULL if full else None


def _shallow_copy(original: Any) -> Any:
    """``copy.copy`` of an ordinary object, without the detour over pickling that takes ten times as long."""
    made = object.__new__(type(original))
    made.__dict__.update(original.__dict__)
    return made


def host_tensor(numbers: list[int]) -> torch.Tensor:
    """``torch.tensor``, int64, by way of numpy, which reads a list of numbers in a third of the time."""
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


class _DeviceStopwatch:
    """Times what was launched by events on its stream, read once they have passed."""

    def __init__(self) -> None:
        from sglang.srt.utils.device_timer import DeviceTimer

        self._seconds = 0.0
        self._timer = DeviceTimer(self._add)

    def _add(self, t: float) -> None:
        self._seconds += t

    @property
    def seconds(self) -> float:
        self._timer._report()
        return self._seconds

    def measuring(self) -> AbstractContextManager[None]:
        measuring: AbstractContextManager[None] = self._timer.wrap({})
        return measuring


@contextmanager
def acceptance_kept(reporter: Any) -> Iterator[None]:
    """Let SGLang's gauges of acceptance keep their values where it would set them to 0."""
    if reporter.metrics_collector is None:
        yield
        return
    log_stats = reporter.metrics_collector.log_stats
    length, rate = reporter.stats.spec_accept_length, reporter.stats.spec_accept_rate

    def log(stats: Any) -> None:
        stats.spec_accept_length, stats.spec_accept_rate = length, rate
        log_stats(stats)

    with swapped(reporter.metrics_collector, log_stats=log):
        yield


@contextmanager
def swapped(target: Any, **values: Any) -> Iterator[None]:
    before = {name: getattr(target, name) for name in values}
    try:
        for name, value in values.items():
            setattr(target, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(target, name, value)


@contextmanager
def _kept(batch: Any, names: tuple[str, ...]) -> Iterator[None]:
    fields = vars(batch)
    kept = {name: fields[name] for name in names}
    try:
        yield
    finally:
        fields.update(kept)


@contextmanager
def _without_aux_capture(model: Any) -> Iterator[None]:
    """Let an EAGLE-3 target return its last hidden states, as on a server without speculation."""
    switches = _capture_switches(model)
    kept = [getattr(module, name) for module, name, _ in switches]
    # Past nn.Module's own __setattr__, which looks for tensors to register at every step.
    for module, name, off in switches:
        object.__setattr__(module, name, off)
    try:
        yield
    finally:
        for (module, name, _), value in zip(switches, kept, strict=True):
            object.__setattr__(module, name, value)


def _capture_switches(model: Any) -> tuple[tuple[Any, str, Any], ...]:
    """What makes a target capture states for an EAGLE-3 draft: module, attribute, and its value when off."""
    found: tuple[tuple[Any, str, Any], ...] | None = getattr(model, "_adaptive_spec_switches", None)
    if found is None:
        found = tuple(
            (module, name, off)
            for module in model.modules()
            for name, off in (("capture_aux_hidden_states", False), ("layers_to_capture", []))
            if hasattr(module, name)
        )
        # Past it here, too: a tuple of modules must not become part of the model.
        object.__setattr__(model, "_adaptive_spec_switches", found)
    return found


def _launches(sync: DraftSync, due: tuple[Any, Any]) -> Iterator[tuple[tuple[Any, Any], int]]:
    """Forwards that cover what is due, each as first positions, counts and its width: one, if buffers allow."""
    starts, counts = due
    width = min(sync.ring.chunk_tokens, int(counts.max()), max(1, sync.launch_tokens // len(counts)))
    while bool((pending := counts > 0).any()):
        # Every row of a launch spans its width, which must not reach past the context.
        span = min(width, int(counts.max()), sync.context_tokens - int(starts[pending].max()))
        now = counts.clamp(max=span)
        yield (torch.where(pending, starts, starts.clamp(max=sync.context_tokens - span)), now), span
        starts, counts = starts + now, counts - now


def _hand_over(event: str, target: Any, draft: Any) -> None:
    """Put the event that ends this step's reads where the scheduler's write barrier looks for it.

    After a speculative step it looks at the draft's runner, which has no part in a plain one. Without the
    event it would wait for the whole forward.
    """
    setattr(draft, event, getattr(target, event, None))
    setattr(target, event, None)

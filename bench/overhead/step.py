"""A decode step's way through every function that the plugin wraps, without a model.

The batch, its requests, the pools, the draft input and the results are SGLang's own, and so is the order of the
calls: the scheduler's, with overlap. What SGLang itself does inside these functions is left out, with the plugin
and without, so what differs is what the plugin adds.

What a plain step does around the target's forward, to bring its inputs and its result into shape, is a case of its
own: a server without speculation has the like to do. Left out: the draft's catch-up, one forward in every
``catch_up_tokens`` plain steps, and what a request costs when it leaves. So is a prefill while the server decodes
plainly, whose prompts wait for the draft; left out is how it reads them.
"""

from __future__ import annotations

import json
import os
from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers import schedule_batch
from sglang.srt.managers.overlap_utils import FutureMap
from sglang.srt.managers.schedule_batch import Req, ScheduleBatch
from sglang.srt.managers.scheduler_components.batch_result_processor import SchedulerBatchResultProcessor
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.mem_cache.allocator import TokenToKVPoolAllocator
from sglang.srt.mem_cache.cache_init_params import CacheInitParams
from sglang.srt.mem_cache.chunk_cache import ChunkCache
from sglang.srt.mem_cache.memory_pool import ReqToTokenPool
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import ServerArgs, set_global_server_args_for_scheduler
from sglang.srt.speculative import eagle_info_v2
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_v2 import EAGLEWorkerV2
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from bench import models
from bench.modes import SPECULATION
from sglang_adaptive_spec.activate import Plugin, installed_sglang, lock_for, placed_patches
from sglang_adaptive_spec.config import CONFIG_VARIABLE
from sglang_adaptive_spec.engine.hidden_ring import HiddenRing
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.patching import Patch
from sglang_adaptive_spec.releases.base import PlainRuntime
from sglang_adaptive_spec.releases.sglang_0_5_14 import _MODE as RESULT_MODE
from sglang_adaptive_spec.releases.sglang_0_5_14 import DraftSync, Sglang0514

MOST_REQUESTS = 512
CONTEXT_TOKENS = 512
PROMPT_TOKENS = 100
HIDDEN_SIZE = 8  # the work on the states is the GPU's; what counts here is handing it out


@dataclass(frozen=True)
class Case:
    """What is measured.

    Attributes:
        settings: The plugin's; None where the plugin has none.
        wrapped: Whether SGLang's functions are wrapped.
        speculates: Whether the server was started with a draft.
        held: The mode that the running server is held in, or None.
        mode: The mode that the steps have to run in. A policy that measures is told that the other one is slow.
        shapes_forward: Whether what surrounds the target's forward in a plain step is part of it.
        prefills: Whether prefills are measured, not decode steps: each a request of the batch, on a server that decodes
            in this mode.
    """

    name: str
    settings: Mapping[str, Any] | None = None
    wrapped: bool = True
    speculates: bool = True
    held: Mode | None = None
    mode: Mode = Mode.SPEC
    shapes_forward: bool = False
    prefills: bool = False


_BY_LOAD = {"disable_batch_threshold": MOST_REQUESTS - 1}

CASES = {
    case.name: case
    for case in (
        Case("inactive", wrapped=False),
        Case("no-speculation", speculates=False),
        Case("policy-spec", {"policy": "spec"}),
        Case("spec-step", _BY_LOAD),
        Case("plain-step", _BY_LOAD, held=Mode.PLAIN, mode=Mode.PLAIN),
        Case("plain-step-whole", _BY_LOAD, held=Mode.PLAIN, mode=Mode.PLAIN, shapes_forward=True),
        Case("auto-spec-step", {"policy": "auto"}),
        Case("auto-plain-step", {"policy": "auto"}, mode=Mode.PLAIN),
        Case("policy-plain", {"policy": "plain"}, mode=Mode.PLAIN),
        Case("policy-plain-whole", {"policy": "plain"}, mode=Mode.PLAIN, shapes_forward=True),
        Case("plain-prefill", _BY_LOAD, held=Mode.PLAIN, mode=Mode.PLAIN, prefills=True),
    )
}


class WithoutModel(Sglang0514):
    """The adapter, except for what it asks of a loaded model."""

    def __init__(self, *, shapes_forward: bool) -> None:
        self._shapes_forward = shapes_forward

    @property
    def patches(self) -> tuple[Patch, ...]:
        # The command line has no part in a step, and SGLang's hooks on it can't be taken back.
        return tuple(patch for patch in super().patches if patch.module != "sglang.srt.server_args")

    def check_worker(self, worker: Any) -> None:
        pass

    def context_tokens(self, worker: Any) -> int:
        return CONTEXT_TOKENS

    def most_requests(self, worker: Any) -> int:
        return MOST_REQUESTS

    def spec_graph_sizes(self, worker: Any) -> tuple[int, ...]:
        return ()

    def free_gib(self, worker: Any) -> float:
        return 1.0

    def draft_ring_gib(self, worker: Any, chunk_tokens: int) -> float:
        return 0.0

    def ranks(self, worker: Any) -> int:
        return 1

    def from_rank_0(self, worker: Any, value: Any) -> Any:
        return value

    def setup(self, worker: Any) -> dict[str, Any]:
        return {}

    @contextmanager
    def idle_batch(self, worker: Any, runtime: PlainRuntime, requests: int, context_tokens: int) -> Iterator[None]:
        yield None  # nothing to time

    def build_plain_runtime(self, worker: Any, catch_up_tokens: int | None) -> PlainRuntime:
        sync = None
        if catch_up_tokens is not None:
            ring = HiddenRing(self.rows_in_all(worker), catch_up_tokens, HIDDEN_SIZE, torch.bfloat16, worker.device)
            sync = DraftSync(
                None, ring, keys_only="keys", launch_tokens=8192, most_requests=256, context_tokens=CONTEXT_TOKENS
            )
        return PlainRuntime("backend", "graphs", sync, 0.0, 0.0, 0.0, graph_sizes=())

    def draft_has_prefill_graphs(self, worker: Any) -> bool:
        return False

    def read_prompts(self, worker: Any, runtime: PlainRuntime, prompts: Any, left: Any) -> None:
        """A forward of the draft, once in some twenty prefills."""

    def _draft_hidden(self, draft: Any) -> tuple[int, torch.dtype]:
        return HIDDEN_SIZE, torch.bfloat16

    def run_plain_decode(self, worker: Any, runtime: PlainRuntime, batch: Any, publish: Any) -> Any:
        if self._shapes_forward:
            return super().run_plain_decode(worker, runtime, batch, publish)
        return worker.shaped_result


class DecodeSteps:
    """One batch that takes decode steps; each call is a step.

    Args:
        device: Where the batch's tensors are.
        speculates: Whether the server was started with a draft.
    """

    def __init__(self, batch_size: int, device: str, *, speculates: bool) -> None:
        self.batch_size = batch_size
        self._batch = _batch(batch_size, device, speculates=speculates)
        hidden = torch.zeros((batch_size, HIDDEN_SIZE), dtype=torch.bfloat16, device=device)
        tokens = torch.zeros((batch_size,), dtype=torch.int64, device=device)
        logits = LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)
        spec, plain, shaped = (GenerationBatchResult(logits, next_token_ids=tokens) for _ in range(3))
        setattr(shaped, RESULT_MODE, Mode.PLAIN)
        self.worker = _worker(self._batch.req_to_token_pool, device, spec, plain, shaped)
        self._future_map = _bare(FutureMap, needs_cpu_seq_lens=True)
        self._processor = _bare(SchedulerBatchResultProcessor)
        self._last_result: GenerationBatchResult | None = None

    def settle(self) -> None:
        """As many steps as a policy that chooses may take until it has."""
        for _ in range(200):
            self()

    def __call__(self) -> Any:
        batch = self._batch
        schedule_batch.get_alloc_reserve_per_decode()  # update_running_batch's estimate
        batch.prepare_for_decode()
        self._future_map.resolve_seq_lens_cpu(batch)
        result = self.worker.forward_batch_generation(batch, on_publish=_publish)
        if self._last_result is not None:  # overlap: it is processed while this step runs
            self._processor.process_batch_result_decode(batch, self._last_result)
        self._last_result = result
        return result


class Prefills(DecodeSteps):
    """Prefills of one batch of prompts, again and again; each call is one.

    Args: as of :class:`DecodeSteps`.
    """

    def __init__(self, batch_size: int, device: str, *, speculates: bool) -> None:
        super().__init__(batch_size, device, speculates=speculates)
        tokens = batch_size * PROMPT_TOKENS
        batch = self._prompts = _batch(batch_size, device, speculates=speculates)
        batch.forward_mode = ForwardMode.EXTEND
        batch.input_ids = torch.zeros((tokens,), dtype=torch.int64, device=device)
        batch.out_cache_loc = torch.zeros((tokens,), dtype=torch.int64, device=device)
        batch.orig_seq_lens = batch.seq_lens.clone()
        batch.extend_lens, batch.prefix_lens = [PROMPT_TOKENS] * batch_size, [0] * batch_size
        batch.extend_logprob_start_lens, batch.extend_num_tokens = [0] * batch_size, tokens
        hidden = torch.zeros((tokens, HIDDEN_SIZE), dtype=torch.bfloat16, device=device)
        logits = LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden)
        ids = torch.zeros((batch_size,), dtype=torch.int64, device=device)
        self._prefilled = GenerationBatchResult(logits, next_token_ids=ids)

    def settle(self) -> None:
        # The mode that prompts are read for is that of the last decode step.
        for _ in range(10):
            super().__call__()
        self.worker.target_worker.forward_batch_generation = lambda batch: self._prefilled
        self()

    def __call__(self) -> Any:
        return self.worker.forward_batch_generation(self._prompts, on_publish=_publish)


@contextmanager
def upstream_left_out() -> Iterator[None]:
    """SGLang's own work inside the wrapped functions, reduced to the calls it makes of each other."""
    bodies: tuple[tuple[Any, str, Callable[..., Any]], ...] = (
        (ScheduleBatch, "prepare_for_decode", _prepare_batch),
        (eagle_info_v2.EagleDraftInputV2Mixin, "prepare_for_decode", _prepare_draft_input),
        (FutureMap, "resolve_seq_lens_cpu", lambda future_map, batch: None),
        (EAGLEWorkerV2, "forward_batch_generation", lambda worker, batch, on_publish=None: worker.spec_result),
        (SchedulerBatchResultProcessor, "process_batch_result_decode", lambda processor, batch, result: None),
    )
    with ExitStack() as stack:
        for owner, name, body in bodies:
            stack.enter_context(mock.patch.object(owner, name, body))
        yield


@contextmanager
def hooked(case: Case, steps: DecodeSteps) -> Iterator[Plugin | None]:
    """Wrap SGLang's functions as the plugin does in a scheduler's process; unwrapped again at the end."""
    if not case.wrapped:
        yield None
        return
    settings = json.dumps(dict(case.settings)) if case.settings is not None else ""
    with mock.patch.dict(os.environ, {CONFIG_VARIABLE: settings}):
        release = WithoutModel(shapes_forward=case.shapes_forward)
        plugin = Plugin(release, installed_sglang(), placed_patches(release, lock_for(installed_sglang())))
        plugin.patch_set.apply()
        try:
            arguments = steps.worker.server_args
            plugin.check(arguments if case.speculates else ServerArgs(model_path=arguments.model_path))
            if case.speculates:
                plugin.start_engine(arguments)
                runtime = plugin.engine.build(steps.worker)
                plugin.patch_set.plain_possible = runtime is not None
                if plugin.engine.settings.policy == "auto":
                    for mode, seconds in ((case.mode, 1e-4), (case.mode.other, 1.0)):
                        plugin.engine.costs.seed(mode, steps.batch_size, PROMPT_TOKENS, seconds)
            if case.held is not None:
                plugin.engine.use({"policy": case.held.value})
            yield plugin
        finally:
            left = plugin.patch_set.revert()
            assert not left, f"{left} stay wrapped"


def serve_from(folder: Path, device: str) -> None:
    """Make the arguments of a speculating server those of this process.

    Args:
        folder: Where the model's config is written.
    """
    target, draft = models.write_pair(folder, models.SHAPES["tiny"])
    arguments = ServerArgs(
        model_path=str(target),
        speculative_draft_model_path=str(draft),
        device=device,
        disable_cuda_graph=True,
        skip_tokenizer_init=True,
        max_running_requests=MOST_REQUESTS,
        **SPECULATION,
    )
    set_global_server_args_for_scheduler(arguments)


def _prepare_batch(batch: Any) -> None:
    if not batch.spec_algorithm.is_none():
        batch.spec_info.prepare_for_decode(batch)


def _prepare_draft_input(draft_input: Any, batch: Any) -> None:
    eagle_info_v2.get_alloc_reserve_per_decode()


def _publish(new_seq_lens: Any) -> None:
    pass


def _bare(kind: type, **attributes: Any) -> Any:
    """An object of one of SGLang's classes that needs no more than these attributes."""
    made = object.__new__(kind)
    for name, value in attributes.items():
        object.__setattr__(made, name, value)
    return made


def _batch(batch_size: int, device: str, *, speculates: bool) -> ScheduleBatch:
    algorithm = SpeculativeAlgorithm.EAGLE3 if speculates else SpeculativeAlgorithm.NONE
    pool = ReqToTokenPool(MOST_REQUESTS, CONTEXT_TOKENS, device, enable_memory_saver=False)
    slots = MOST_REQUESTS * CONTEXT_TOKENS
    allocator = TokenToKVPoolAllocator(slots, torch.bfloat16, device, kvcache=None, need_sort=False)
    cache = ChunkCache(CacheInitParams(True, pool, allocator, page_size=1))
    reqs = []
    for number in range(batch_size):
        prompt = array("q", range(PROMPT_TOKENS))
        req = Req(str(number), "", prompt, SamplingParams(max_new_tokens=64), vocab_size=512)
        req.req_pool_idx = number + 1
        req.kv_committed_len = req.kv_allocated_len = PROMPT_TOKENS
        reqs.append(req)
    model_config = SimpleNamespace(vocab_size=512)
    batch = ScheduleBatch.init_new(reqs, pool, allocator, cache, model_config, True, algorithm)
    batch.forward_mode = ForwardMode.DECODE
    batch.req_pool_indices_cpu = torch.arange(1, batch_size + 1, dtype=torch.int64)
    batch.req_pool_indices = batch.req_pool_indices_cpu.to(device)
    batch.seq_lens_cpu = torch.full((batch_size,), PROMPT_TOKENS, dtype=torch.int64)
    batch.seq_lens = batch.seq_lens_cpu.to(device)
    batch.spec_info = EagleDraftInput(
        topk_p=torch.ones((batch_size, 1), device=device),
        topk_index=torch.zeros((batch_size, 1), dtype=torch.int64, device=device),
        hidden_states=torch.zeros((batch_size, HIDDEN_SIZE), dtype=torch.bfloat16, device=device),
        bonus_tokens=torch.zeros((batch_size,), dtype=torch.int64, device=device),
        future_indices=batch.req_pool_indices,
    )
    return batch


def _worker(pool: ReqToTokenPool, device: str, spec_result: Any, plain_result: Any, shaped_result: Any) -> Any:
    runner = SimpleNamespace(
        req_to_token_pool=pool,
        attn_backend="speculative backend",
        decode_cuda_graph_runner="speculative graphs",
        war_fastpath_read_done_event=None,
        model=_CapturingModel(),
    )
    target = SimpleNamespace(model_runner=runner, forward_batch_generation=lambda batch: plain_result)
    draft = SimpleNamespace(draft_runner=SimpleNamespace(war_fastpath_read_done_event=None))
    return _bare(
        EAGLEWorkerV2,
        server_args=schedule_batch.get_global_server_args(),
        device=device,
        req_to_token_pool=pool,
        tp_rank=0,
        topk=1,
        spec_result=spec_result,
        shaped_result=shaped_result,
        _target_worker=target,
        _draft_worker=draft,
    )


class _CapturingModel(torch.nn.Module):
    """Has the switches of an EAGLE-3 target."""

    def __init__(self) -> None:
        super().__init__()
        self.capture_aux_hidden_states = True
        self.layers_to_capture = [2, 4, 5]

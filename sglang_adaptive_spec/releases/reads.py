"""What the adapters need of SGLang: functions they call or reckon with, and attributes they read or set.

Names are ``module:qualified.name``. Where releases have a thing in different places, the places stand in one entry,
with ``or`` between them, and the first that a release has is meant.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import cycle

_SCHEDULE = "sglang.srt.managers.schedule_batch"
_RESULTS = "sglang.srt.managers.scheduler_components.batch_result_processor:SchedulerBatchResultProcessor"
_GRAPHS = "sglang.srt.model_executor.runner.decode_cuda_graph_runner:DecodeCudaGraphRunner"
_SPEC_WORKER = "sglang.srt.speculative.base_spec_worker:BaseSpecWorker"
_ALLOCATION = ("sglang.srt.mem_cache.allocation", "sglang.srt.mem_cache.common")
_SIZES = ("sglang.srt.mem_cache.allocation_sizing", "sglang.srt.mem_cache.common")

BATCH = f"{_SCHEDULE}:ScheduleBatch"
REQUEST = f"{_SCHEDULE}:Req"
REQUEST_KV = f"{_SCHEDULE}:ReqKvInfo"
ARGUMENTS = "sglang.srt.server_args:ServerArgs"
RUNNER = "sglang.srt.model_executor.model_runner:ModelRunner"
RUNNER_MEMORY = f"{RUNNER} or sglang.srt.model_executor.model_runner_kv_cache_mixin:ModelRunnerKVCacheMixin"
WORKER = "sglang.srt.speculative.eagle_worker_v2:EAGLEWorkerV2"
ANY_WORKER = f"{WORKER} or {_SPEC_WORKER}"
DRAFT_WORKER = "sglang.srt.speculative.eagle_worker_v2:EagleDraftWorker"
DRAFT_INPUT = "sglang.srt.speculative.eagle_info:EagleDraftInput"
EAGLE_UTILS = "sglang.srt.speculative.eagle_utils"
RUNTIME_CONTEXT = "sglang.srt.runtime_context"
SET_STATE_OUTPUT = "sglang.srt.managers.io_struct:SetInternalStateReqOutput"


def either(modules: Iterable[str], *names: str) -> str:
    """One entry for what releases have in different modules, under one name or a name a module."""
    return " or ".join(f"{module}:{name}" for module, name in zip(modules, cycle(names), strict=False))


WAR_BARRIER = "sglang.srt.managers.scheduler:Scheduler._apply_war_barrier"

PROMPT_FUNCTIONS = (f"{DRAFT_WORKER}._draft_extend_for_prefill", f"{EAGLE_UTILS}:_eagle_prefill_tail_tokens")
PROMPT_FIELDS = (
    "chunked_req chunked_req_next_prompt_token extend_logprob_start_lens input_embeds is_prefill_only "
    "multimodal_inputs orig_seq_lens replace_embeds"
)
"""For prompts that wait for the draft: functions, and attributes of the batch."""

RELIES_ON = (
    *PROMPT_FUNCTIONS,
    "sglang.srt.distributed.parallel_state:GroupCoordinator.broadcast_object",
    "sglang.srt.layers.radix_attention:RadixAttention.forward",
    "sglang.srt.managers.overlap_utils:decide_needs_cpu_seq_lens",
    "sglang.srt.managers.overlap_utils:FutureMap._resolve_spec_extras",
    "sglang.srt.managers.overlap_utils:FutureMap.publish",
    "sglang.srt.managers.overlap_utils:FutureMap.stash",
    "sglang.srt.managers.overlap_utils:resolve_forward_inputs",
    f"{BATCH}.check_decode_mem",
    f"{BATCH}.copy",
    f"{BATCH}.filter_batch",
    f"{BATCH}.init_new",
    f"{BATCH}.merge_batch",
    f"{BATCH}.new_tokens_required_next_decode",
    f"{BATCH}._new_tokens_required_next_decode_spec_v2",
    f"{REQUEST}.__init__",
    WAR_BARRIER,
    "sglang.srt.managers.scheduler:Scheduler._forward_isolation",
    "sglang.srt.managers.scheduler:Scheduler.event_loop_normal",
    "sglang.srt.managers.scheduler:Scheduler.event_loop_overlap",
    "sglang.srt.managers.scheduler:Scheduler.is_disable_overlap_for_batch",
    "sglang.srt.managers.scheduler:Scheduler.run_batch",
    "sglang.srt.managers.scheduler:Scheduler.update_running_batch",
    f"{_RESULTS}._apply_decode_logprobs",
    f"{_RESULTS}._normalize_decode_outputs",
    f"{_RESULTS}._resolve_spec_v2_tokens",
    "sglang.srt.managers.scheduler_components.output_streamer:_GenerationStreamAccumulator.accept",
    "sglang.srt.managers.tp_worker:TpModelWorker.forward_batch_generation",
    "sglang.srt.managers.utils:GenerationBatchResult.copy_to_cpu",
    either(_ALLOCATION, "alloc_paged_token_slots_extend"),
    either(_ALLOCATION, "alloc_token_slots"),
    either(_SIZES, "get_alloc_len_per_decode"),
    "sglang.srt.mem_cache.common:release_kv_cache",
    "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator.alloc",
    "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator.available_size",
    "sglang.srt.mem_cache.allocator.base:BaseTokenToKVPoolAllocator.free",
    "sglang.srt.mem_cache.memory_pool:MHATokenToKVPool.set_kv_buffer",
    "sglang.srt.model_executor.forward_batch_info:ForwardBatch.init_new",
    f"{RUNNER}._forward_raw",
    f"{RUNNER}._get_attention_backend",
    "sglang.srt.models.deepseek_v2:DeepseekV2AttentionMLA.dispatch_attn_forward_method",
    f"{_GRAPHS}.__init__",
    f"{_GRAPHS}.can_run_graph",
    f"{_GRAPHS}.execute",
    f"{_GRAPHS}.load_batch",
    "sglang.srt.model_executor.runner.base_cuda_graph_runner:get_batch_sizes_to_capture",
    "sglang.srt.model_executor.runner.eager_runner:EagerRunner.__init__",
    "sglang.srt.sampling.sampling_batch_info:SamplingBatchInfo.from_schedule_batch",
    "sglang.srt.sampling.sampling_params:SamplingParams.normalize",
    either(
        ("sglang.srt.speculative.eagle_worker_common", "sglang.srt.speculative.base_spec_worker"),
        "prepare_for_draft",
        "EagleDraftWorkerBase.prepare_for_draft",
    ),
    either(
        ("sglang.srt.speculative.eagle_worker_common", "sglang.srt.speculative.base_spec_worker"),
        "prepare_for_draft_extend",
        "EagleDraftWorkerBase.prepare_for_draft_extend",
    ),
    f"{DRAFT_INPUT}.filter_batch",
    f"{DRAFT_INPUT}.merge_batch",
    f"{WORKER}._override_worker_state",
    f"{WORKER}.spec_v2_attn_backends",
    f"{DRAFT_WORKER}._draft_extend_for_decode",
    f"{DRAFT_WORKER}.init_attention_backend",
    "sglang.srt.utils.device_timer:DeviceTimer._report",
    "sglang.srt.utils.device_timer:DeviceTimer.wrap",
)
"""Functions that every family has."""

GRAPH_SIZES = (
    f"{ARGUMENTS}._generate_decode_cuda_graph_batch_sizes",
    f"{ARGUMENTS}._parse_cuda_graph_config",
)
"""How the arguments arrive at the sizes of graphs, to 0.5.18."""

RECAPTURES = f"{_GRAPHS}.recapture_if_needed"
"""Where graphs of another hidden-state mode are captured under way, to 0.5.16."""

FIXED_CAPTURE = f"{_GRAPHS}._validate_capture_hidden_mode"
"""Where that is refused, from 0.5.17 on."""

READS: Mapping[str, str] = {
    BATCH: "extend_lens extend_num_tokens forward_mode has_grammar input_ids is_extend_in_batch out_cache_loc "
    "prefix_lens req_pool_indices req_pool_indices_cpu reqs return_logprob sampling_info seq_lens seq_lens_cpu "
    f"seq_lens_sum spec_algorithm spec_info token_to_kv_pool_allocator {PROMPT_FIELDS}",
    REQUEST: "decode_batch_idx finished_len output_ids spec_verify_ct",
    "sglang.srt.managers.utils:GenerationBatchResult": "accept_lens can_run_cuda_graph logits_output new_seq_lens "
    "next_draft_input next_token_ids num_correct_drafts num_correct_drafts_per_req_cpu speculative_num_draft_tokens",
    "sglang.srt.managers.tp_worker:TpModelWorker": "model_runner",
    "sglang.srt.layers.logits_processor:LogitsProcessorOutput": "hidden_states next_token_logits",
    "sglang.srt.managers.overlap_utils:FutureMap": "needs_cpu_seq_lens",
    "sglang.srt.managers.scheduler_components.metrics_reporter:SchedulerMetricsReporter": "scheduler "
    "current_scheduler_metrics_enabled metrics_collector spec_num_forward_ct stats",
    "sglang.srt.observability.metrics_collector:SchedulerStats": "spec_accept_length spec_accept_rate",
    "sglang.srt.observability.metrics_collector:SchedulerMetricsCollector": "labels log_stats",
    "sglang.srt.observability.metrics_collector:_StatLoggerDIMixin": "_counter_cls _gauge_cls",
    "sglang.srt.distributed.parallel_state:GroupCoordinator": "cpu_group world_size",
    "sglang.srt.entrypoints.engine:Engine": "get_server_info shutdown",
    "sglang.srt.managers.io_struct:BaseReq": "rid",
    "sglang.srt.managers.io_struct:SetInternalStateReq": "server_args",
    "sglang.srt.managers.io_struct:UpdateWeightFromDiskReqInput": "recapture_cuda_graph",
    SET_STATE_OUTPUT: "updated",
    "sglang.srt.managers.io_struct:GetInternalStateReqOutput": "internal_state",
    "sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode": "FULL",
    "sglang.srt.speculative.spec_info:SpeculativeAlgorithm": "NONE is_none",
    _GRAPHS: "capture_bs",
    "sglang.srt.layers.attention.base_attn_backend:AttentionBackend": "forward init_forward_metadata",
    "sglang.srt.layers.radix_attention:RadixAttention": "k_scale v_scale",
    "sglang.srt.mem_cache.memory_pool:ReqToTokenPool": "free_slots req_to_token",
    "sglang.srt.model_executor.forward_batch_info:ForwardMode": "DECODE",
    DRAFT_INPUT: "bonus_tokens hidden_states topk_index topk_p",
    RUNNER: "attn_backend decode_cuda_graph_runner init_new_workspace kv_cache_dtype model model_config "
    "prefill_cuda_graph_runner req_to_token_pool server_args sliding_window_size spec_algorithm",
    RUNNER_MEMORY: "max_running_requests max_total_num_tokens token_to_kv_pool",
    WORKER: "gpu_id plan_stream server_args topk",
    ANY_WORKER: "draft_worker target_worker",
    DRAFT_WORKER: "cuda_graph_runner_for_draft_extend draft_extend_attn_backend draft_runner "
    "speculative_num_draft_tokens speculative_num_steps",
    "sglang.srt.configs.model_config:ModelConfig": "attention_arch context_len hf_config hf_text_config "
    "get_num_attention_heads get_num_kv_heads head_dim is_encoder_decoder is_hybrid_swa is_multimodal vocab_size",
}
"""Attributes that every family has, by owner."""

SERVER_ARGUMENTS = (
    "attention_backend chunked_prefill_size cuda_graph_config decode_attention_backend device "
    "disable_overlap_schedule disaggregation_mode dp_size enable_custom_logit_processor "
    "enable_deterministic_inference enable_dp_attention enable_hierarchical_cache enable_hisparse enable_lora "
    "enable_memory_saver enable_multi_layer_eagle enable_multimodal enable_pdmux enable_return_hidden_states "
    "enable_streaming_session enable_torch_compile enable_two_batch_overlap ep_size lora_paths max_running_requests "
    "pp_size prefill_attention_backend quantization speculative_adaptive speculative_algorithm "
    "speculative_attention_mode speculative_draft_attention_backend speculative_eagle_topk "
    "speculative_num_draft_tokens speculative_num_steps speculative_use_rejection_sampling tp_size"
)
"""Of the server's arguments, the ones that are read."""

ARGUMENT_METHODS = "get_model_config max_prefill_buffer_tokens max_speculative_num_draft_tokens"
"""What the arguments work out themselves, to 0.5.18."""

_GROUPS = {
    "schedule": "Schedule",
    "spec": "Spec",
    "memory": "Memory",
    "parallel": "Parallel",
    "exec_": "ExecFeatures ExecGraph ExecOverlap ExecComm ExecKernel ExecOffload ExecDeterministic",
    "disagg": "Disagg",
    "lora": "Lora",
    "mm": "Mm",
    "serving": "Serving",
    "model": "Model",
    "device": "Device",
}
ARGUMENT_GROUPS = " or ".join(
    [ARGUMENTS, *(f"sglang.srt.arg_groups.fields.{m}:{c}" for m, classes in _GROUPS.items() for c in classes.split())]
)
"""Where the arguments are declared from 0.5.20 on, before that in one class."""


def attributes(*owners: Mapping[str, str]) -> tuple[str, ...]:
    """Each owner's attributes, an entry each."""
    return tuple(
        " or ".join(f"{place}.{name}" if ":" in place else f"{place}:{name}" for place in owner.split(" or "))
        for reads in owners
        for owner, names in reads.items()
        for name in names.split()
    )


def found(entry: str, exists: Callable[[str], object]) -> str | None:
    """The first place of an entry that exists, or None."""
    return next((place for place in entry.split(" or ") if exists(place)), None)

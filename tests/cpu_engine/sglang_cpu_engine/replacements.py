"""Which SGLang module gets which replacement. The one place that names SGLang modules.

Each function gets the module object just after its import and puts reference code in place of what
only a GPU can run. The reference code is imported there and then, so that it may import torch.
"""

from collections.abc import Callable
from types import ModuleType
from typing import Any

REPLACEMENTS: dict[str, Callable[[ModuleType], None]] = {}


def _after_import_of(*names: str) -> Callable[[Callable[[ModuleType], None]], Callable[[ModuleType], None]]:
    """Run when a module of one of these names is imported: where older and newer releases have it."""

    def register(callback: Callable[[ModuleType], None]) -> Callable[[ModuleType], None]:
        REPLACEMENTS.update(dict.fromkeys(names, callback))
        return callback

    return register


def _replace(module: Any, **replacements: Any) -> None:
    """Replace what a module defines itself; older releases define in large modules what newer ones have apart."""
    for name, replacement in replacements.items():
        if hasattr(module, name):
            setattr(module, name, replacement)


@_after_import_of("torch")
def _compile(module: Any) -> None:
    from sglang_cpu_engine import device

    device.make_compile_cheap()


@_after_import_of("sglang.srt.utils.common")
def _device(module: Any) -> None:
    from sglang_cpu_engine import device

    device.make_cuda_calls_harmless()
    # Whatever name the attention backend goes by, SGLang is to take its branches without Triton.
    module.support_triton = lambda backend: False


@_after_import_of("sglang.srt.server_args")
def _server_arguments(module: Any) -> None:
    from sglang_cpu_engine import server_defaults

    # Where arguments are resolved: apart from their construction from 0.5.19 on.
    name = "resolve_once" if hasattr(module.ServerArgs, "resolve_once") else "__post_init__"
    setattr(module.ServerArgs, name, server_defaults.before(getattr(module.ServerArgs, name)))


@_after_import_of("sglang.srt.configs.update_config")
def _head_sizes(module: Any) -> None:
    # It pads what doesn't divide by the ranks for kernels of a CPU, and leaves a mark from which Qwen's layers compute
    # a head's size from 0.5.20 on, whatever the configuration says. A GPU has neither.
    module.adjust_config_with_unaligned_cpu_tp = lambda model_config, load_config, tp_size: model_config


@_after_import_of("sglang.srt.distributed.device_communicators.pynccl")
def _nccl(module: Any) -> None:
    from sglang_cpu_engine import device

    # Asked for by every tensor-parallel group; on a CPU it is never used, as collectives go through gloo.
    module.PyNcclCommunicator = device.NoCommunicator


@_after_import_of("sglang.srt.layers.attention.attention_registry")
def _attention(module: Any) -> None:
    from sglang_cpu_engine.attention import factory

    for name in factory.BACKEND_NAMES:
        module.ATTENTION_BACKENDS[name] = factory.create_backend


@_after_import_of("sglang.srt.speculative.draft_utils")
def _draft_attention(module: Any) -> None:
    from sglang_cpu_engine.attention import factory

    module.DraftBackendFactory.create_decode_backend = factory.create_draft_decode_backend
    module.DraftBackendFactory.create_draft_extend_backend = factory.create_draft_extend_backend


@_after_import_of(
    "sglang.srt.mem_cache.allocator",  # to 0.5.12
    "sglang.srt.mem_cache.triton_ops.allocator",
    "sglang.kernels.ops.memory.allocator",
)
def _page_allocator(module: Any) -> None:
    from sglang_cpu_engine.kernels import pages
    from sglang_cpu_engine.kernels.launch import Kernel

    extend, decode = Kernel(pages.alloc_extend), Kernel(pages.alloc_decode)
    _replace(module, alloc_extend_kernel=extend, alloc_decode_kernel=decode)


@_after_import_of(
    "sglang.srt.mem_cache.common",  # to 0.5.12
    "sglang.srt.mem_cache.triton_ops.common",
    "sglang.kernels.ops.memory.common",
)
def _last_location(module: Any) -> None:
    from sglang_cpu_engine.kernels import cache_locs

    _replace(module, get_last_loc_triton=cache_locs.get_last_loc)


@_after_import_of("sglang.srt.speculative.eagle_info_v2")
def _before_kernels_had_modules(module: Any) -> None:
    from sglang_cpu_engine.kernels import accept, cache_locs, sampling
    from sglang_cpu_engine.kernels.launch import Kernel

    if not hasattr(module, "assign_draft_cache_locs_page_size_1"):
        return  # from 0.5.13 on they have
    _replace(
        module,
        assign_draft_cache_locs_page_size_1=Kernel(cache_locs.assign_draft_cache_locs_contiguous),
        assign_extend_cache_locs=Kernel(cache_locs.assign_extend_cache_locs),
        assign_extend_cache_locs_func=cache_locs.make_extend_cache_locs,
        fill_accepted_out_cache_loc=Kernel(accept.fill_accept_out_cache_loc),
        fill_bonus_tokens=Kernel(accept.fill_bonus_tokens),
        fill_new_verified_id=Kernel(accept.fill_bonus_tokens),  # 0.5.11
    )
    # Imported on a GPU only.
    module.top_k_renorm_prob = sampling.top_k_renorm_prob
    module.top_p_renorm_prob = sampling.top_p_renorm_prob
    module.tree_speculative_sampling_target_only = sampling.tree_speculative_sampling


@_after_import_of("sglang.srt.speculative.triton_ops.cache_locs", "sglang.kernels.ops.speculative.cache_locs")
def _cache_locations(module: Any) -> None:
    from sglang_cpu_engine.kernels import cache_locs
    from sglang_cpu_engine.kernels.launch import Kernel

    module.assign_req_to_token_pool = Kernel(cache_locs.assign_req_to_token_pool)
    module.assign_extend_cache_locs = Kernel(cache_locs.assign_extend_cache_locs)
    module.assign_extend_cache_locs_func = cache_locs.make_extend_cache_locs
    module.assign_draft_cache_locs_contiguous = Kernel(cache_locs.assign_draft_cache_locs_contiguous)


@_after_import_of("sglang.srt.speculative.triton_ops.eagle", "sglang.kernels.ops.speculative.eagle")
def _accepted_tokens(module: Any) -> None:
    from sglang_cpu_engine.kernels import accept
    from sglang_cpu_engine.kernels.launch import Kernel

    module.fill_bonus_tokens = Kernel(accept.fill_bonus_tokens)
    module.fill_accept_out_cache_loc = Kernel(accept.fill_accept_out_cache_loc)


@_after_import_of(
    "sglang.srt.speculative.triton_ops.gather_spec_extras",
    "sglang.kernels.ops.speculative.gather_spec_extras",
)
def _relay(module: Any) -> None:
    from sglang_cpu_engine.kernels import accept

    module.gather_spec_extras = accept.gather_spec_extras


@_after_import_of("sglang.srt.speculative.eagle_utils")
def _tree(module: Any) -> None:
    from sglang_cpu_engine import sgl_kernel_stand_in
    from sglang_cpu_engine.kernels import tree

    module.sgl_build_tree_kernel_efficient = tree.build_tree
    module.verify_tree_greedy_func = tree.verify_tree_greedy
    sgl_kernel_stand_in.install()


@_after_import_of("sglang.srt.speculative.reject_sampling", "sglang.kernels.ops.speculative.reject_sampling")
def _chain_sampling(module: Any) -> None:
    from sglang_cpu_engine.kernels import sampling

    module.chain_speculative_sampling_triton = sampling.chain_speculative_sampling


@_after_import_of("sglang.srt.speculative.spec_utils")
def _simulated_acceptance(module: Any) -> None:
    from sglang_cpu_engine import device
    from sglang_cpu_engine.kernels import cache_locs
    from sglang_cpu_engine.kernels.launch import Kernel

    # SGLang names the device "cuda" in this one function of the test switch SGLANG_SIMULATE_ACC_LEN.
    module.generate_simulated_accept_index = device.on_cpu(module.generate_simulated_accept_index)
    # To 0.5.12 this kernel is in here, too.
    _replace(module, assign_req_to_token_pool=Kernel(cache_locs.assign_req_to_token_pool))


@_after_import_of("sglang.srt.layers.logits_processor")
def _input_logprobs(module: Any) -> None:
    from sglang_cpu_engine import device

    # Indices for the logprobs of a prompt are made in pinned memory, to 0.5.12.
    processor = module.LogitsProcessor
    for name in ("_get_pruned_states", "_expand_metadata_for_logprobs"):
        if hasattr(processor, name):
            setattr(processor, name, device.on_cpu(getattr(processor, name)))


@_after_import_of("sglang.srt.speculative.eagle_info")
def _idle_verify(module: Any) -> None:
    from sglang_cpu_engine import device

    # The same for the verify input of an idle data-parallel rank.
    idle = module.EagleVerifyInput.create_idle_input.__func__
    module.EagleVerifyInput.create_idle_input = classmethod(device.on_cpu(idle))


@_after_import_of("sglang.srt.constrained.xgrammar_backend")
def _grammar_mask(module: Any) -> None:
    from xgrammar import allocate_token_bitmask

    from sglang_cpu_engine.kernels import grammar

    if hasattr(module, "_allocate_token_bitmask"):
        # SGLang 0.5.17 pins it, which takes a driver; later releases where there is one.
        module._allocate_token_bitmask = lambda vocab_size, batch_size: allocate_token_bitmask(batch_size, vocab_size)
    module.XGrammarGrammar.apply_vocab_mask = grammar.apply_vocab_mask_of
    module.XGrammarGrammarBackend.apply_vocab_mask = staticmethod(grammar.apply_vocab_mask)

"""A module named `sgl_kernel` that holds only what SGLang imports from it on a CPU.

The real package can't be imported without a CUDA driver. To 0.5.15 SGLang asks for the sampling kernels alone, and for
those late; from 0.5.16 on it takes every leaf kernel of speculation on a CPU from here. Before 0.5.13 it also imports
what copies KV to the host, and never calls it.
"""

import sys
from types import ModuleType
from typing import Any

import torch


class _StandIn(ModuleType):
    """Anything else can be imported, and says what is missing when it is called."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*args: Any, **kwargs: Any) -> None:
            raise NotImplementedError(f"the CPU engine has no sgl_kernel.{name}")

        return missing


def install() -> None:
    """Put the stand-in into `sys.modules`, unless an `sgl_kernel` is there already."""
    from sglang_cpu_engine.kernels import accept, cache_locs, sampling, tree

    if "sgl_kernel" in sys.modules:
        return
    module = _StandIn("sgl_kernel", __doc__)
    vars(module).update(
        top_k_renorm_prob=sampling.top_k_renorm_prob,
        top_p_renorm_prob=sampling.top_p_renorm_prob,
        tree_speculative_sampling_target_only=sampling.tree_speculative_sampling,
        assign_req_to_token_pool_cpu=cache_locs.assign_req_to_token_pool,
        assign_extend_cache_locs_cpu=cache_locs.assign_extend_cache_locs,
        assign_draft_cache_locs_contiguous_cpu=cache_locs.assign_draft_cache_locs_contiguous,
        fill_bonus_tokens_cpu=accept.fill_bonus_tokens,
        fill_accept_out_cache_loc_cpu=accept.fill_accept_out_cache_loc,
        build_tree_kernel_efficient_cpu=tree.build_tree,
        verify_tree_greedy_cpu=_verify_tree_greedy,
        copy_all_layer_kv_cache_cpu=_copy_nothing,
    )
    sys.modules["sgl_kernel"] = module
    sys.modules["sgl_kernel.kvcacheio"] = _StandIn("sgl_kernel.kvcacheio", __doc__)


def _verify_tree_greedy(
    *,
    retrive_index: torch.Tensor,
    retrive_next_token: torch.Tensor,
    retrive_next_sibling: torch.Tensor,
    **others: torch.Tensor,
) -> None:
    """`tree.verify_tree_greedy` under the names that the kernel has."""
    from sglang_cpu_engine.kernels import tree

    tree.verify_tree_greedy(
        retrieve_index=retrive_index,
        retrieve_next_token=retrive_next_token,
        retrieve_next_sibling=retrive_next_sibling,
        **others,
    )


def _copy_nothing(data_ptrs: torch.Tensor, strides: torch.Tensor, target: torch.Tensor, source: torch.Tensor) -> None:
    """SGLang warms this kernel up with a row copied onto itself; it moves rows by indexing, see `startup.py`."""
    if not torch.equal(target, source):
        raise NotImplementedError("the CPU engine moves KV rows by SGLANG_NATIVE_MOVE_KV_CACHE=1 only")

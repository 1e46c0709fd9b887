"""A module named `sgl_kernel` that holds only what SGLang imports from it on a CPU.

`eagle_sample` imports its sampling kernels from `sgl_kernel` inside the function. The real package
can't be imported without a CUDA driver. The stand-in comes late, after SGLang has found that there
is no `sgl_kernel` and has chosen its native layers.
"""

import sys
from types import ModuleType


def install() -> None:
    """Put the stand-in into `sys.modules`, unless an `sgl_kernel` is there already."""
    from sglang_cpu_engine.kernels import sampling

    if "sgl_kernel" in sys.modules:
        return
    module = ModuleType("sgl_kernel", __doc__)
    module.top_k_renorm_prob = sampling.top_k_renorm_prob  # type: ignore[attr-defined]
    module.top_p_renorm_prob = sampling.top_p_renorm_prob  # type: ignore[attr-defined]
    module.tree_speculative_sampling_target_only = sampling.tree_speculative_sampling  # type: ignore[attr-defined]
    sys.modules["sgl_kernel"] = module

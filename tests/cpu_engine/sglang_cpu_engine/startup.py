"""What happens when an interpreter of the environment starts: environment defaults and import hooks.

A `.pth` file calls `start()`. Neither SGLang's plugin entry point nor a `sitecustomize` would do:
plugins load after SGLang has decided which device it runs on and has bound its kernels by
`from ... import`, and a distribution's own `sitecustomize` hides ours. A `.pth` file runs in every
process of the environment, so in each one that SGLang spawns, with no help from the user.

Standard library only, and nothing here imports torch or SGLang.
"""

import gc
import os
import sys

# What SGLang and its libraries must find in the environment before they are imported. The user's
# own values win.
ENVIRONMENT_DEFAULTS = {
    # SGLang's own switch for device "cpu" and its native PyTorch layers.
    "SGLANG_USE_CPU_ENGINE": "1",
    # Kernels that nobody replaced still run, slowly.
    "TRITON_INTERPRET": "1",
    # SGLang decorates small helpers with torch.compile; compiling them would cost minutes.
    "TORCH_COMPILE_DISABLE": "1",
    # Moves KV rows by indexing instead of by a Triton kernel over raw pointers.
    "SGLANG_NATIVE_MOVE_KV_CACHE": "1",
}


def start() -> None:
    """Prepare this interpreter, unless a GPU is there or `SGLANG_CPU_ENGINE=0` says not to."""
    if os.environ.get("SGLANG_CPU_ENGINE") == "0" or _has_cuda_driver():
        return
    for name, value in ENVIRONMENT_DEFAULTS.items():
        os.environ.setdefault(name, value)
    # A server process imports 5000 modules. Looking for garbage among them takes a sixth of the time.
    gc.set_threshold(100_000, 50, 100)

    from sglang_cpu_engine.import_hooks import PostImportFinder, PreImportFinder
    from sglang_cpu_engine.replacements import REPLACEMENTS

    if any(isinstance(finder, PostImportFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, PostImportFinder(REPLACEMENTS))
    # From this package on (0.5.16), SGLang takes its leaf kernels on a CPU from `sgl_kernel` by name.
    sys.meta_path.insert(0, PreImportFinder("sglang.kernels", _install_sgl_kernel))
    # Before 0.5.13 it asks for `sgl_kernel` here, whatever the device.
    sys.meta_path.insert(0, PreImportFinder("sglang.srt.mem_cache.memory_pool_host", _install_early))
    if os.environ.get("SGLANG_CPU_ENGINE_FORK") == "1":
        sys.meta_path.insert(0, PreImportFinder("sglang", _start_fork_server))


def _start_fork_server() -> None:
    from sglang_cpu_engine import fork_server

    fork_server.start()


def _install_sgl_kernel() -> None:
    from sglang_cpu_engine import sgl_kernel_stand_in

    sgl_kernel_stand_in.install()


def _install_early() -> None:
    from importlib.metadata import version

    if version("sglang").startswith(("0.5.11", "0.5.12")):
        _install_sgl_kernel()


def _has_cuda_driver() -> bool:
    """Whether the CUDA driver library can be loaded: then the real kernels are to be used."""
    # `_ctypes` is what ctypes itself calls; importing ctypes would double the cost of this check.
    import _ctypes

    try:
        _ctypes.dlopen("libcuda.so.1", 0)
    except (OSError, AttributeError):
        return False
    return True

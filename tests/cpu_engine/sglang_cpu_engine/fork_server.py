"""Server processes that start from a fork with the libraries already imported. For test suites.

A server has three processes, and each imports the same libraries for four seconds of CPU time; SGLang
itself takes one. With `SGLANG_CPU_ENGINE_FORK=1` the first process imports the libraries, then forks a
multiprocessing fork server, then goes on with SGLang. Where SGLang spawns a process, the fork server
forks one. Nothing of SGLang or of its plugins is imported before the fork, so every process still
does that itself, in the same order as a spawned one.
"""

import contextlib
import ctypes
import importlib
import multiprocessing.context
import multiprocessing.forkserver
import multiprocessing.spawn
import multiprocessing.util
import os
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

# What SGLang imports and takes long. One that is missing is none of our business.
LIBRARIES = (
    "torch",
    "torch._dynamo",
    "torch.distributed",
    "torchvision",
    "transformers",
    "transformers.generation",
    "transformers.models.auto.image_processing_auto",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
    "transformers.models.auto.tokenization_auto",
    "IPython",
    "aiohttp",
    "compressed_tensors.quantization",
    "fastapi",
    "gguf",
    "openai.types.responses",
    "openai_harmony",
    "tiktoken",
    "triton.language",
    "uvicorn",
    "uvloop",
    "xgrammar",
    "zmq.asyncio",
)

_ENVIRONMENT = "sglang_cpu_engine_environment"
_PR_SET_PDEATHSIG = 1


def start() -> None:
    """Import the libraries, start the fork server, and send `spawn` there."""
    for name in LIBRARIES:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    _carry_environment()

    exec_server = multiprocessing.util.spawnv_passfds
    multiprocessing.util.spawnv_passfds = _fork_server  # type: ignore[assignment]
    try:
        multiprocessing.forkserver.ensure_running()
    finally:
        multiprocessing.util.spawnv_passfds = exec_server
    # SGLang asks for "spawn" by name.
    contexts = multiprocessing.context._concrete_contexts  # type: ignore[attr-defined]
    contexts["spawn"] = contexts["forkserver"]


def _fork_server(executable: Any, arguments: Sequence[Any], fds: Sequence[int]) -> int:
    """In place of starting an interpreter with `-c <fork server>`: run the same code in a fork."""
    pid = os.fork()
    if pid == 0:
        _run_server(os.fsdecode(arguments[-1]))
    return pid


def _run_server(code: str) -> NoReturn:
    status = 1
    try:
        # A fork holds the other end of the pipe that tells a fork server when to end.
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        # SGLang's processes report a failure to their parent, and mean the one that asked for them.
        client = os.getppid()
        signal.signal(signal.SIGQUIT, lambda number, frame: os.kill(client, number))
        exec(code, {"__name__": "__fork_server__"})
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


def _carry_environment() -> None:
    """Give a new process the environment of the one that starts it, as with `spawn`, not of the fork."""
    get_preparation_data = multiprocessing.spawn.get_preparation_data
    prepare = multiprocessing.spawn.prepare

    def get_with_environment(name: str) -> dict[str, Any]:
        return {**get_preparation_data(name), _ENVIRONMENT: dict(os.environ)}

    def prepare_with_environment(data: Mapping[str, Any]) -> None:
        environment = data.get(_ENVIRONMENT)
        if environment is not None:
            os.environ.clear()
            os.environ.update(environment)
            signal.signal(signal.SIGQUIT, signal.SIG_DFL)
        prepare(data)

    multiprocessing.spawn.get_preparation_data = get_with_environment
    multiprocessing.spawn.prepare = prepare_with_environment

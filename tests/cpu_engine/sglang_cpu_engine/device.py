"""Calls meant for a GPU that are made on a CPU: made harmless, cheap, or sent to the CPU."""

import functools
import os
from collections.abc import Callable
from typing import Any, ParamSpec, TypeVar

import torch
from torch.overrides import TorchFunctionMode

P = ParamSpec("P")
R = TypeVar("R")


def make_cuda_calls_harmless() -> None:
    """Turn synchronisation with a device that isn't there into nothing.

    On a CPU every operation is complete when it returns, so there is nothing to wait for, no cache
    to empty, and no other stream that could still use a tensor.
    """
    torch.cuda.synchronize = _nothing
    torch.cuda.empty_cache = _nothing
    torch.Tensor.record_stream = _nothing


def make_compile_cheap() -> None:
    """Where the environment disables `torch.compile`, don't import the compiler to find that out.

    The function would come back unchanged anyway, after a second of imports in every process.
    """
    if os.environ.get("TORCH_COMPILE_DISABLE") == "1":
        torch.compile = _same


def on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that tensors which it creates on `device="cuda"`, or pins, come to lie on the CPU."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with _CudaMeansCpu():
            return function(*args, **kwargs)

    return wrapper


class NoCommunicator:
    """In place of a communicator for GPUs, which says of itself that it is not to be used."""

    disabled = True
    available = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass


def _same(model: Callable[P, R] | None = None, **options: Any) -> Any:
    """`torch.compile`, called on a function, or with options to make a decorator."""
    return model if model is not None else lambda function: function


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _CudaMeansCpu(TorchFunctionMode):  # type: ignore[misc]
    """Replaces the keyword argument `device="cuda"` of every torch call, and takes `pin_memory` away."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = dict(kwargs or {})
        if kwargs.get("device") == "cuda":
            kwargs["device"] = "cpu"
        kwargs.pop("pin_memory", None)
        return func(*args, **kwargs)

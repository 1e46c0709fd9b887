"""Calls that name CUDA although the device is a CPU: made harmless, or sent to the CPU."""

import functools
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
    torch.Tensor.record_stream = _nothing  # type: ignore[method-assign]


def on_cpu(function: Callable[P, R]) -> Callable[P, R]:
    """Wrap `function` so that tensors which it creates on `device="cuda"` come to lie on the CPU."""

    @functools.wraps(function)
    def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        with _CudaMeansCpu():
            return function(*args, **kwargs)

    return wrapper


def _nothing(*args: Any, **kwargs: Any) -> None:
    return None


class _CudaMeansCpu(TorchFunctionMode):
    """Replaces the keyword argument `device="cuda"` of every torch call."""

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
        return func(*args, **kwargs)

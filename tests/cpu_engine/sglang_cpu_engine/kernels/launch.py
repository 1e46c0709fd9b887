"""The launch syntax of a Triton kernel, `kernel[grid](...)`, for a plain function."""

from collections.abc import Callable
from typing import Any


class Kernel:
    """Stands where SGLang expects a Triton kernel. The function does the work of the whole grid."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self._function

"""SGLang's server arguments as somebody sees them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Arguments:
    """Server arguments, some of them with other values; the arguments themselves stay as they are.

    Args:
        beneath: SGLang's own.
        values: What differs.
    """

    def __init__(self, beneath: Any, values: Mapping[str, Any]) -> None:
        self._beneath = beneath
        self.__dict__.update(values)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._beneath, name)

"""What ends a start, and what a running server reports instead of failing."""

import os
import sys
from typing import NoReturn

REFUSED_EXIT_CODE = 78  # EX_CONFIG of sysexits.h


class Refusal(Exception):  # noqa: N818  (it is a verdict on a configuration, not a fault)
    """A configuration that can't be served: what, why, and what to do about it."""

    def __init__(self, what: str, why: str, remedy: str) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.remedy = remedy

    def __str__(self) -> str:
        return f"{self.what}\n  why:  {self.why}\n  do:   {self.remedy}"

    def end_process(self) -> NoReturn:
        """Print the one message and end this process with a non-zero exit code."""
        sys.stderr.write(f"\nsglang-adaptive-spec refuses to start (pid {os.getpid()}).\n  what: {self}\n")
        sys.stderr.flush()
        raise SystemExit(REFUSED_EXIT_CODE)


class PreparationMismatch(RuntimeError):  # noqa: N818
    """A decode step reached the worker in a shape other than the one it was prepared in.

    KV slots and graph shapes are settled when a batch is prepared, so running it in another mode would
    write to slots nobody reserved. This is raised where neither mode is safe any more.
    """

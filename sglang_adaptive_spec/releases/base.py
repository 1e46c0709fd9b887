"""What the engine asks of a release of SGLang. Each adapter answers it for one family of releases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.engine.steps import StepPlan
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.patching import Patch


@dataclass(frozen=True)
class PlainRuntime:
    """What plain steps run on, beside SGLang's own speculative backends and graphs.

    Attributes:
        attn_backend: The target's second attention backend, built with speculation off.
        graph_runner: The target's decode graph set; SGLang's eager runner where graphs are off.
        draft_sync: What keeps the draft's KV true during plain steps; None where speculation never resumes.
        memory_gib: Device memory that all of this took.
        build_seconds: How long it took to build.
        graph_sizes: Batch sizes captured; empty where graphs are off.
    """

    attn_backend: Any
    graph_runner: Any
    draft_sync: Any | None
    memory_gib: float
    build_seconds: float
    graph_sizes: tuple[int, ...]


class Release(Protocol):
    """The border to SGLang: its layout is known to the implementations of this, and to ``patches/``."""

    @property
    def names(self) -> tuple[str, ...]:
        """The releases this adapter serves, as in ``sglang.__version__``."""

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The patches to apply."""

    @property
    def relies_on(self) -> tuple[str, ...]:
        """Functions called or reckoned with, beside the patched ones, as ``module:qualified.name``."""

    def preflight(self, server_args: Any, settings: Settings) -> None:
        """Refuse a server that can't be served right.

        Raises:
            Refusal: what can't be served, why, and what to do.
        """

    def speculates(self, server_args: Any) -> bool:
        """Whether the server was started with a speculative algorithm."""

    # --- the batch, while the scheduler prepares it ------------------------------------------------------

    def is_speculative(self, batch: Any) -> bool:
        """Whether the batch belongs to a server with speculation."""

    def batch_size(self, batch: Any) -> int:
        """Requests in the batch."""

    def stamp(self, batch: Any, plan: StepPlan) -> None:
        """Leave a plan on a batch, for the worker to find."""

    def plan_of(self, batch: Any) -> StepPlan | None:
        """The plan on a decode batch; None on any other."""

    def host_seq_lens(self, batch: Any) -> Any:
        """Lengths before the step from what the host has committed, ``[batch_size]`` int64 on the CPU.

        Right only when no result of a speculative step is outstanding, and after preparation.
        """

    def most_accepted_tokens(self, server_args: Any) -> int:
        """The most tokens that one speculative step can add to a request."""

    def spec_fits(self, batch: Any) -> bool:
        """Whether the pool can hold what SGLang reserves for the batch's next speculative step."""

    # --- the worker --------------------------------------------------------------------------------------

    def check_worker(self, worker: Any) -> None:
        """Refuse a model that only shows itself once it is loaded.

        Raises:
            Refusal: what can't be served, why, and what to do.
        """

    def build_plain_runtime(self, worker: Any, *, keeps_draft: bool) -> PlainRuntime:
        """Build the second attention backend and the plain graph set."""

    def is_decode(self, batch: Any) -> bool:
        """Whether the batch, as the worker gets it, is a decode step."""

    def run_plain_decode(self, worker: Any, runtime: PlainRuntime, batch: Any, publish: Any) -> Any:
        """Run one plain step and answer in the form of a speculative one, marked as plain."""

    def run_plain_prefill(self, worker: Any, batch: Any, publish: Any) -> Any:
        """Run a prefill that owes the draft nothing, and answer in the form of a speculative one."""

    def reserve_for_spec(self, batch: Any, prepare: Callable[[Any], Any]) -> None:
        """Allocate for a speculative step what a batch prepared as plain lacks."""

    # --- results -----------------------------------------------------------------------------------------

    def mode_of_result(self, result: Any) -> Mode:
        """The mode that produced a result."""

    def as_plain_result_batch(self, batch: Any) -> Any:
        """The batch as SGLang's result processor has to see it for a plain result."""

    def result_counts(self, batch: Any, result: Any) -> tuple[int, int]:
        """Requests and tokens of a processed decode result."""

    def without_spec_report(self, reporter: Any) -> AbstractContextManager[None]:
        """Let SGLang's decode report leave out acceptance, for an interval without a verify step."""

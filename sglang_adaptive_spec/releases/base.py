"""What the engine asks of a release of SGLang. Each adapter answers it for one family of releases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from sglang_adaptive_spec.config import Settings
from sglang_adaptive_spec.engine.steps import StepPlan
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.patching import Patch
from sglang_adaptive_spec.stopwatch import Stopwatch
from sglang_adaptive_spec.telemetry import Telemetry


@dataclass(frozen=True)
class PlainRuntime:
    """What plain steps run on, beside SGLang's own speculative backends and graphs.

    Attributes:
        attn_backend: The target's second attention backend, built with speculation off.
        graph_runner: The target's decode graph set; SGLang's eager runner where graphs are off.
        draft_sync: What lets the draft catch up with plain steps; None where speculation never resumes.
        draft_ring_gib: Of that memory, what holds the states that wait for the draft.
        memory_gib: Device memory that all of this took.
        build_seconds: How long it took to build.
        graph_sizes: Batch sizes captured; empty where graphs are off.
    """

    attn_backend: Any
    graph_runner: Any
    draft_sync: Any | None
    draft_ring_gib: float
    memory_gib: float
    build_seconds: float
    graph_sizes: tuple[int, ...]


class PrefillSize(NamedTuple):
    """What a prefill is made of.

    Attributes:
        tokens: In all, those found in the radix cache left out.
        requests: In the batch.
        longest_tokens: The longest context behind it.
    """

    tokens: int
    requests: int
    longest_tokens: int


class IdleBatch(Protocol):
    """Decode steps on made-up requests of one length, which every step starts from again."""

    @property
    def requests(self) -> int:
        """Requests in the batch."""

    @property
    def context_tokens(self) -> int:
        """Length of each before the step."""

    def seconds_a_step(self, mode: Mode, steps: int) -> float:
        """Launch some steps in a row and divide the time by their number."""

    def catch_up(self, tokens: int) -> None:
        """Let the draft see the last tokens of each request, as after so many plain steps, and wait for it."""


class Release(Protocol):
    """The border to SGLang: its layout is known to the implementations of this, and to ``patches/``."""

    @property
    def patches(self) -> tuple[Patch, ...]:
        """The patches to apply, each where the release has its target."""

    @property
    def relies_on(self) -> tuple[str, ...]:
        """Functions called or reckoned with, beside the patched ones; see ``reads.py``."""

    @property
    def reads(self) -> tuple[str, ...]:
        """What is read or set beside functions; see ``reads.py``."""

    def arguments(self, server_args: Any, **as_asked: Any) -> Any:
        """The server's arguments as resolved, for :meth:`preflight`.

        Args:
            as_asked: What SGLang has resolved to something else, as the user asked for it.
        """

    def request_limit_open(self, server_args: Any) -> AbstractContextManager[Any]:
        """Keep SGLang, while it resolves arguments, from limiting the running requests because it speculates."""

    def preflight(self, server_args: Any, settings: Settings) -> None:
        """Refuse a server that can't be served right.

        Raises:
            Refusal: what can't be served, why, and what to do.
        """

    def take_limits(self, server_args: Any, most_spec_requests: int | None) -> None:
        """Give each mode graphs for the batches that it may run, where the user named no sizes.

        Plain steps get those of a server without speculation.

        Args:
            server_args: Resolved arguments, changed in place.
            most_spec_requests: No batch larger than this will speculate; None where any may.
        """

    def make_room(self, server_args: Any, settings: Settings) -> None:
        """See that SGLang's speculative graphs can be captured, after :meth:`take_limits`.

        Args:
            server_args: Resolved arguments, changed in place where graphs have to be left out.
            settings: What was asked of the plugin.

        Raises:
            Refusal: they can't.
        """

    def check_reach(self, settings: Settings, most_requests: int | None, spec_graph_sizes: tuple[int, ...]) -> None:
        """Refuse settings that no load could bring into play.

        Args:
            settings: What was asked of the plugin.
            most_requests: Requests that may run at once; None before that is settled.
            spec_graph_sizes: Batch sizes with speculative graphs; empty before they are built, and without graphs.

        Raises:
            Refusal: what can't happen, why, and what to do.
        """

    def offline_engine(
        self, arguments: Sequence[str], once_parsed: Callable[[], None]
    ) -> AbstractContextManager[dict[str, Any]]:
        """Start a server without HTTP from the arguments of launch_server, and stop it; its block in /server_info.

        Args:
            arguments: As on the command line.
            once_parsed: Called before any process starts, when the plugin's flags are in the environment.
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

    def prepare_decode(self, batch: Any) -> None:
        """Let SGLang prepare a decode batch as it does by itself."""

    @property
    def reserve_times(self) -> int:
        """How many of the reserves that the patched functions answer SGLang adds up to one."""

    def prepare_reserving(self, batch: Any, reserve_tokens: int | None, upstream: Callable[[Any], Any]) -> Any:
        """Let SGLang prepare a decode batch, while the patched functions answer with its reserve.

        Args:
            reserve_tokens: KV slots to ensure past each request's committed length; None for SGLang's own reserve.
            upstream: SGLang's own preparation.
        """

    def carry(self, batch: Any, copied: Any) -> None:
        """Let the worker's copy of a batch know what was decided for it, where it gets one."""

    def claim(self, batch: Any) -> None:
        """Count a prepared plain step's token as committed, as SGLang does on a server without speculation."""

    def mean_context_tokens(self, batch: Any) -> int:
        """About how long the batch's requests are, from what the host knows; equal on every rank."""

    def host_seq_lens(self, batch: Any) -> Any:
        """Lengths before the step from what the host has committed, ``[batch_size]`` int64 on the CPU.

        Right only when no result of a speculative step is outstanding, and after preparation.
        """

    def most_accepted_tokens(self, server_args: Any) -> int:
        """The most tokens that one speculative step can add to a request."""

    def spec_steps_that_fit(self, batch: Any) -> int:
        """How many steps the batch can take before a speculative one might not fit in the pool; 0: the next may not.

        Each step may take what SGLang reserves for a speculative one. A prefill in between changes the answer.
        """

    # --- the worker --------------------------------------------------------------------------------------

    def check_worker(self, worker: Any) -> None:
        """Refuse a model that only shows itself once it is loaded.

        Raises:
            Refusal: what can't be served, why, and what to do.
        """

    def build_plain_runtime(self, worker: Any, catch_up_tokens: int | None) -> PlainRuntime:
        """Build the second attention backend and the plain graph set.

        Args:
            catch_up_tokens: Positions of a request that may wait for the draft; None for a draft never used again.
        """

    def most_requests(self, worker: Any) -> int:
        """Requests that may run at once."""

    def spec_graph_sizes(self, worker: Any) -> tuple[int, ...]:
        """Batch sizes that speculative graphs were captured for; empty where graphs are off."""

    def idle_batch(
        self, worker: Any, runtime: PlainRuntime, requests: int, context_tokens: int
    ) -> AbstractContextManager[IdleBatch | None]:
        """Made-up requests on a server that serves nothing yet, to try steps on; None where there is no room."""

    def ranks(self, worker: Any) -> int:
        """Tensor-parallel ranks."""

    def rank(self, worker: Any) -> int:
        """This process among them."""

    def from_rank_0(self, worker: Any, value: Any) -> Any:
        """Rank 0's value, on every rank; all of them have to ask at the same point."""

    def setup(self, worker: Any) -> dict[str, Any]:
        """What step times depend on, by name, as plain JSON types."""

    def free_gib(self, worker: Any) -> float:
        """Device memory that is free; of the rank that has the least."""

    def draft_ring_gib(self, worker: Any, chunk_tokens: int) -> float:
        """Device memory for so many tokens of each request that wait for the draft."""

    def rows_in_all(self, worker: Any) -> int:
        """Rows of ``req_to_token``."""

    def context_tokens(self, worker: Any) -> int:
        """The model's longest sequence."""

    def rows(self, batch: Any) -> Any:
        """The requests' rows of ``req_to_token``, ``[batch_size]`` int64 on the CPU."""

    def is_decode(self, batch: Any) -> bool:
        """Whether the batch, as the worker gets it, is a decode step."""

    def run_plain_decode(self, worker: Any, runtime: PlainRuntime, batch: Any, publish: Any) -> Any:
        """Run one plain step and answer in the form of a speculative one, marked as plain."""

    def run_plain_prefill(self, worker: Any, batch: Any, publish: Any) -> Any:
        """Run a prefill that owes the draft nothing, and answer in the form of a speculative one."""

    def backlog_limits(self, runtime: PlainRuntime) -> tuple[int, int] | None:
        """Prompt tokens and requests that the draft can read in one go; None where no prompt may wait for it."""

    def draft_has_prefill_graphs(self, worker: Any) -> bool:
        """Whether the draft reads a prompt by a CUDA graph."""

    def prompts_go_on(self, batch: Any) -> bool:
        """Whether the next prefill goes on with a prompt of this one."""

    def prefill_size(self, batch: Any) -> PrefillSize | None:
        """The size of a prefill whose draft-extend may wait; None for any other batch."""

    def run_prefill_ahead_of_draft(
        self, worker: Any, runtime: PlainRuntime, batch: Any, publish: Any
    ) -> tuple[Any, Any, Any]:
        """Run a prefill on the target alone.

        Returns:
            The result in the form of a speculative one; what :meth:`read_prompts` needs; and the last position of each
            request, ``[batch]`` int64 on the CPU, -1 where more of its prompt is to come.
        """

    def kv_slots(self, worker: Any, req: Any) -> Any:
        """A leaving request's KV slots as far as its committed length, ``[tokens]`` on the device."""

    def read_prompts(self, worker: Any, runtime: PlainRuntime, prompts: Sequence[Any], left: Mapping[int, Any]) -> None:
        """Let the draft read what was prefilled ahead of it.

        Args:
            left: By row, the KV slots of requests that left since the last forward.
        """

    def positions(self, batch: Any) -> Any:
        """Where a plain step writes its tokens, ``[batch_size]`` int64 on the CPU."""

    def draft_input(self, batch: Any) -> Any:
        """What the step before handed to this step's draft."""

    def next_draft_input(self, result: Any) -> Any:
        """What a result hands to the next step's draft."""

    def catch_up(
        self,
        worker: Any,
        runtime: PlainRuntime,
        batch: Any,
        draft_input: Any,
        due: tuple[Any, Any],
        *,
        drafts_next: bool,
    ) -> Any:
        """Let the draft see what waits for it.

        Args:
            draft_input: Gets the draft's view after the last of these tokens, where any waited and it drafts next.
            due: First position and count of each request, ``[batch_size]`` int64 on the CPU each.
            drafts_next: Whether the draft is about to draft; otherwise the last position may go on waiting.

        Returns:
            How many of each request's positions it has seen now, ``[batch_size]`` int64 on the CPU.
        """

    def stopwatch(self, worker: Any) -> Stopwatch:
        """A stopwatch for what runs on the worker's device."""

    def limit_committed(self, req: Any, true_length: Callable[[int, int], int]) -> None:
        """Let a leaving request keep only as much KV as the draft has seen.

        Args:
            true_length: Maps a row and a length to how much of it the draft has seen.
        """

    def reserve_for_spec(self, worker: Any, batch: Any, prepare: Callable[[Any], Any]) -> None:
        """Allocate for a speculative step what a batch prepared as plain lacks."""

    # --- results -----------------------------------------------------------------------------------------

    def mode_of_result(self, result: Any) -> Mode:
        """The mode that produced a result."""

    def as_plain_result_batch(self, batch: Any) -> Any:
        """The batch as SGLang's result processor has to see it for a plain result."""

    def result_counts(self, batch: Any, result: Any) -> tuple[int, int]:
        """Requests and tokens of a processed decode result."""

    def tokens_of(self, batch: Any, result: Any, reqs: list[Any]) -> int:
        """Tokens that a processed decode result has for some requests; none for one that is not in its batch."""

    def expect_cuts(self, batch: Any, result: Any) -> None:
        """Note on a launched speculative result whether SGLang may drop accepted tokens, behind a grammar's end."""

    def may_be_cut(self, result: Any) -> bool:
        """What :meth:`expect_cuts` noted."""

    def output_tokens(self, batch: Any) -> int:
        """Tokens generated so far by the requests of a batch."""

    def row(self, req: Any) -> int | None:
        """A request's row of ``req_to_token``; None where it has none."""

    def overshoot_tokens(self, req: Any) -> int:
        """Tokens of a request that its last step gave behind its end; clients don't get them."""

    def report_plain_steps(self, req: Any, plain_steps: int) -> None:
        """Let a leaving request carry its count of plain steps, of this run and those before, to its ``meta_info``."""

    def without_spec_report(self, reporter: Any) -> AbstractContextManager[None]:
        """Let SGLang's decode report leave out acceptance, for an interval without a verify step.

        The gauges keep their last values, as they do while the server is idle.
        """

    def telemetry(
        self, reporter: Any, snapshot: Callable[[], dict[str, Any]], on_fault: Callable[[Exception], None]
    ) -> Telemetry | None:
        """What publishes the engine's state where SGLang publishes its own; None where it publishes nothing.

        Args:
            reporter: SGLang's, of a scheduler.
            snapshot: The engine's state.
            on_fault: Hears of an error in publishing.
        """

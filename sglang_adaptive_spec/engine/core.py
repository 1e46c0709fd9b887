"""One scheduler process's engine: prepares, runs and accounts for each decode step in its mode."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from sglang_adaptive_spec import calibration
from sglang_adaptive_spec.clock import StepClock, StepTimes
from sglang_adaptive_spec.config import DECIDES, DEFAULT_CATCH_UP_TOKENS, Settings
from sglang_adaptive_spec.controller import Controller
from sglang_adaptive_spec.costs import StepCosts
from sglang_adaptive_spec.engine.measure import measure, sizes_to_measure
from sglang_adaptive_spec.engine.prompt_backlog import PromptBacklog
from sglang_adaptive_spec.engine.samples import SampleRelay, Verifies
from sglang_adaptive_spec.engine.steps import StepPlan, settle_mode
from sglang_adaptive_spec.engine.warm_up import warm_up
from sglang_adaptive_spec.errors import Refusal
from sglang_adaptive_spec.faults import Fault
from sglang_adaptive_spec.modes import Mode
from sglang_adaptive_spec.policies import Policy, make_policy
from sglang_adaptive_spec.releases.base import PlainRuntime, Release

if TYPE_CHECKING:
    from sglang_adaptive_spec.engine.draft_ledger import DraftLedger
    from sglang_adaptive_spec.engine.plain_steps import PlainSteps
    from sglang_adaptive_spec.stopwatch import Stopwatch
    from sglang_adaptive_spec.telemetry import Telemetry

logger = logging.getLogger(__name__)

_RING_SHARE = 0.25
"""Of the memory that is free before the plain graphs are captured, what may wait for the draft."""
_FEWEST_CHUNK_TOKENS = 4

_CONTEXT_STEPS = 64
"""Decode steps between two looks at the batch's mean length, unless requests come or go."""

_SPEC_ESTIMATE = StepPlan(Mode.SPEC, batch_size=0)
"""A scope in which SGLang's own reserve holds."""


class AdaptiveEngine:
    """Carries a step from the decision to the processed result.

    A decode step passes through in this order: :meth:`plan` before SGLang prepares the batch, :meth:`prepare`
    around its allocation, :meth:`run` in the worker, :meth:`process` around SGLang's result processing.
    """

    def __init__(self, settings: Settings, release: Release, server_args: Any) -> None:
        policy = make_policy(settings)
        self.settings = settings
        # What a server that was held in one mode goes back to.
        self._unheld = settings
        # Whether a policy that measures decides, or will once the server is no longer held.
        self._measures = settings.policy == "auto"
        self.release = release
        self.controller = Controller(policy, dry_run=settings.dry_run)
        self.clock = StepClock()
        self.runtime: PlainRuntime | None = None
        self._keeps_draft = policy.returns_to_spec
        self._ledger: DraftLedger | None = None
        self._backlog: PromptBacklog | None = None
        self.deferred_prompts = 0
        self._plain_steps: PlainSteps | None = None
        self._stopwatch: Stopwatch | None = None
        self.telemetry: Telemetry | None = None
        self.catch_ups = 0
        self.catch_up_tokens = 0
        self._most_accepted_tokens = release.most_accepted_tokens(server_args)
        # Verify results still on their way to the host: while there are any, the host's committed lengths lag.
        self._unresolved_spec_steps = 0
        self._scoped_plan: StepPlan | None = None
        # Requests that left since the last result: the step under way holds tokens that they don't get.
        self._left: list[Any] = []
        self._overshoot_tokens = 0
        # Known once the worker is.
        self.costs: StepCosts | None = None
        self.measured_sizes = 0
        self.measure_seconds = 0.0
        self._measuring = False
        self._context_tokens = self._context_requests = self._context_age_steps = 0
        self._worker: Any = None
        self._setup: dict[str, Any] = {}
        self._most_requests: int | None = None
        self._spec_graph_sizes: tuple[int, ...] = ()
        self._samples = SampleRelay(1, lambda value: value, self._learn)
        # Whether prompts right behind others wait while the server speculates, and whether one would now.
        self._row_of_prompts_waits = False
        self._prefilled_last = False

    # --- start -------------------------------------------------------------------------------------------

    def build(self, worker: Any) -> PlainRuntime | None:
        """Build what plain steps need, if the policy can ask for any.

        Raises:
            Refusal: the loaded model can't be served.
        """
        self.release.check_worker(worker)
        if not self.controller.policy.needs_plain:
            return None
        self._most_requests = self.release.most_requests(worker)
        self._spec_graph_sizes = self.release.spec_graph_sizes(worker)
        self._check_reach(self.settings)
        chunk_tokens = self.settings.catch_up_tokens if self._keeps_draft else None
        if chunk_tokens is not None:
            from sglang_adaptive_spec.engine.draft_ledger import DraftLedger

            rows, context_tokens = self.release.rows_in_all(worker), self.release.context_tokens(worker)
            # Before minutes of graph capture, not after.
            if chunk_tokens >= context_tokens:
                raise Refusal(
                    f"{chunk_tokens} tokens are to wait for the draft, of a context of {context_tokens}.",
                    "Catching up takes the room of that many tokens, so it would never come to it.",
                    "Choose a smaller --adaptive-spec-catch-up-tokens.",
                )
            chunk_tokens = self._tokens_that_fit(worker, chunk_tokens)
            self._ledger = DraftLedger(rows, chunk_tokens, context_tokens)
        saved = self._read_costs(worker)
        self.runtime = self.release.build_plain_runtime(worker, chunk_tokens)
        self._stopwatch = self.release.stopwatch(worker)
        self._worker = worker
        limits = self.release.backlog_limits(self.runtime)
        if self._ledger is not None and limits is not None:
            self._backlog = PromptBacklog(*limits)
            # A graph launches the draft's part of a prefill in less time than it later takes to make up for it.
            self._row_of_prompts_waits = not self.release.draft_has_prefill_graphs(worker)
        from sglang_adaptive_spec.engine.plain_steps import PlainSteps

        self._plain_steps = PlainSteps(self.release.rows_in_all(worker))
        if chunk_tokens is not None:
            self._warm_up(worker, self.runtime, chunk_tokens)
        self.costs = self._find_costs(worker, self.runtime, saved)
        self.controller.policy = self._make_policy(self.settings)
        ranks = self.release.ranks(worker)
        self._samples = SampleRelay(ranks, lambda value: self.release.from_rank_0(worker, value), self._learn)
        return self.runtime

    def _warm_up(self, worker: Any, runtime: PlainRuntime, chunk_tokens: int) -> None:
        assert self._most_requests is not None
        self._measuring = True
        try:
            warm_up(self.release, worker, runtime, chunk_tokens, self._most_requests)
        except Exception as error:
            self.controller.fault(Fault.CATCH_UP, "the draft could not catch up with made-up requests at start", error)
        finally:
            self._measuring = False

    def _tokens_that_fit(self, worker: Any, chunk_tokens: int) -> int:
        """Fewer tokens where those of all requests that may run would take most of the memory that is left."""
        free_gib = self.release.free_gib(worker)
        while chunk_tokens > _FEWEST_CHUNK_TOKENS:
            ring_gib = self.release.draft_ring_gib(worker, chunk_tokens)
            if ring_gib <= free_gib * _RING_SHARE:
                break
            if self.settings.catch_up_tokens != DEFAULT_CATCH_UP_TOKENS:
                # Asked for, unlike the default, which is ours to lower.
                raise Refusal(
                    f"{chunk_tokens} tokens a request waiting for the draft would take {ring_gib:.2f} of "
                    f"{free_gib:.2f} GiB free.",
                    f"They may take {_RING_SHARE:.0%} of it: graphs and forwards need the rest.",
                    "Choose a smaller --adaptive-spec-catch-up-tokens, leave it out, or lower --max-running-requests.",
                )
            logger.warning(
                "adaptive-spec: %d tokens a request waiting for the draft would take %.2f of %.2f GiB free; half as "
                "many are kept. Fewer --max-running-requests leave room for more.",
                chunk_tokens,
                ring_gib,
                free_gib,
            )
            chunk_tokens = max(_FEWEST_CHUNK_TOKENS, chunk_tokens // 2)
        return chunk_tokens

    @property
    def catch_up_chunk_tokens(self) -> int:
        """Tokens of a request that wait for the draft at most."""
        return self._ledger.chunk_tokens if self._ledger is not None else self.settings.catch_up_tokens

    def _make_policy(self, settings: Settings) -> Policy:
        most = max(self._spec_graph_sizes, default=None)
        # Without graphs a mode runs at any size.
        reach = most if most is not None and self._most_requests is not None and most < self._most_requests else None
        return make_policy(settings, self.costs, reach, self._most_accepted_tokens)

    def _read_costs(self, worker: Any) -> Mapping[str, Any] | None:
        self._setup = self.release.setup(worker)
        path = self.settings.costs
        if path is None:
            return None
        saved = calibration.load(path)
        saved.check(self._setup, path)
        return saved.costs

    def _find_costs(self, worker: Any, runtime: PlainRuntime, saved: Mapping[str, Any] | None) -> StepCosts:
        buckets = {Mode.SPEC: self._spec_graph_sizes, Mode.PLAIN: runtime.graph_sizes}
        if saved is not None:
            try:
                return StepCosts.from_json(saved, buckets)
            except ValueError as error:
                raise calibration.unreadable(self.settings.costs, error) from error
        costs = StepCosts(buckets)
        if self.settings.policy != "auto":
            return costs
        assert self._most_requests is not None
        start = time.perf_counter()
        self._measuring = True
        try:
            sizes = sizes_to_measure(self._spec_graph_sizes, runtime.graph_sizes, self._most_requests)
            seconds = self.settings.measure_seconds
            self.measured_sizes = measure(self.release, worker, runtime, costs, sizes, seconds)
        except Exception as error:
            self.controller.fault(
                Fault.MEASUREMENT, "step times could not be measured at start; serving will show them", error
            )
            costs = StepCosts(buckets)
        finally:
            self._measuring = False
        self.measure_seconds = time.perf_counter() - start
        return costs

    @property
    def costs_origin(self) -> str:
        """Where the step times come from, for a log line."""
        if self.settings.costs is not None:
            return f"step times from {self.settings.costs}"
        return f"step times of {self.measured_sizes} batch sizes measured in {self.measure_seconds:.1f} s"

    def _check_reach(self, settings: Settings) -> None:
        self.release.check_reach(settings, self._most_requests, self._spec_graph_sizes)

    # --- preparation -------------------------------------------------------------------------------------

    def plan(self, batch: Any) -> StepPlan:
        """Decide the mode of the step being prepared, and stamp it on the batch."""
        requests, context_tokens = self.release.batch_size(batch), 0
        if self._measures:
            controller = self.controller
            self._samples.at_step(controller.decided_steps, at_once=controller.policy.attentive)
            context_tokens = self._mean_context_tokens(batch, requests)
        mode = self.controller.decide(requests, lambda: self._spec_steps_that_fit(batch), context_tokens).mode
        plan = StepPlan(mode, requests)
        if mode is Mode.PLAIN:
            plan.reserve_tokens = self._plain_reserve_tokens()
        self.release.stamp(batch, plan)
        return plan

    def _mean_context_tokens(self, batch: Any, requests: int) -> int:
        """The batch's mean length, brought up to date now and then: policies go by coarse classes of it."""
        self._context_age_steps += 1
        if requests != self._context_requests or self._context_age_steps >= _CONTEXT_STEPS:
            self._context_requests, self._context_age_steps = requests, 0
            self._context_tokens = self.release.mean_context_tokens(batch)
        return self._context_tokens

    def prepare(self, batch: Any, upstream: Callable[[Any], Any]) -> Any:
        """Let SGLang allocate for the planned mode."""
        plan = self.release.plan_of(batch)
        if plan is None:
            return upstream(batch)
        outer, self._scoped_plan = self._scoped_plan, plan
        try:
            prepared = self.release.prepare_reserving(batch, plan.reserve_tokens, upstream)
        finally:
            self._scoped_plan = outer
        plan.prepared = plan.mode
        if plan.prepared is Mode.PLAIN:
            self.release.claim(batch)
        # For a plain step, and for a speculative one that the draft may have to catch up for.
        needs_lengths = plan.mode is Mode.PLAIN or (self._ledger is not None and self._ledger.may_wait)
        if needs_lengths and not self._unresolved_spec_steps:
            plan.host_seq_lens = self.release.host_seq_lens(batch)
        return prepared

    def reserve_tokens(self) -> int | None:
        """KV slots to ensure past a request's committed length; None for SGLang's own reserve.

        While a step is being prepared, its plan says. Otherwise SGLang asks for an estimate, to decide on
        retraction: a batch that may drop to plain needs no more than that.
        """
        if self._scoped_plan is not None:
            return self._scoped_plan.reserve_tokens
        return self._plain_reserve_tokens() if self.controller.can_drop_to_plain else None

    def _plain_reserve_tokens(self) -> int:
        # One slot for the step; and while a verify result is outstanding, whatever it may have accepted.
        return self._most_accepted_tokens if self._unresolved_spec_steps else 1

    def _spec_steps_that_fit(self, batch: Any) -> int:
        outer, self._scoped_plan = self._scoped_plan, _SPEC_ESTIMATE
        try:
            return self.release.spec_steps_that_fit(batch)
        finally:
            self._scoped_plan = outer

    # --- the worker --------------------------------------------------------------------------------------

    def run(self, worker: Any, batch: Any, publish: Any, upstream: Callable[[], Any]) -> Any:
        """Run a batch in the mode it was prepared for.

        Args:
            worker: SGLang's speculative worker.
            batch: The batch, within the scheduler's snapshot and restore.
            publish: Called with the new sequence lengths as soon as they are known; None without overlap.
            upstream: SGLang's own forward.
        """
        if self._measuring:
            return upstream()
        if self._backlog is not None and self._backlog.is_urgent:
            self._read_backlog(worker)
        if not self.release.is_decode(batch):
            self.clock.interrupted()
            # It took slots, and its requests join the batch.
            self.controller.note_prefill()
            self._context_requests = 0
            prefilled = self._run_prefill(worker, batch, publish, upstream)
            # A prompt's next chunk is no other prefill.
            self._prefilled_last = self._row_of_prompts_waits and not self.release.prompts_go_on(batch)
            return prefilled
        self._prefilled_last = False
        requests = self.release.batch_size(batch)
        mode, complaint = settle_mode(self.release.plan_of(batch), requests)
        if complaint:
            self.controller.fault(Fault.PREPARATION, complaint)
        if mode is Mode.PLAIN:
            try:
                return self._launch_plain(worker, batch, publish, requests)
            except Exception as error:
                self.controller.fault(Fault.PLAIN_STEP, "a plain step failed", error)
                if self._ledger is not None:
                    self._ledger.forget_from(self.release.rows(batch), self.release.positions(batch))
            if not self._spec_steps_that_fit(batch):
                # There is no room to run it as SGLang would; what failed once may go well the next time.
                return self._launch_plain(worker, batch, publish, requests)
            self._prepare_for_spec(worker, batch, requests)
        self._read_backlog(worker)
        if self._ledger is not None and self._ledger.may_wait:
            self._before_draft(worker, batch, self._ledger)
        self._unresolved_spec_steps += 1
        launched = upstream()
        self.release.expect_cuts(batch, launched)
        self._note_launch(Mode.SPEC, requests)
        return launched

    def _launch_plain(self, worker: Any, batch: Any, publish: Any, requests: int) -> Any:
        assert self.runtime is not None, "no policy asks for plain steps that can't be run"
        assert self._plain_steps is not None, "made with the runtime"
        launched = self.release.run_plain_decode(worker, self.runtime, batch, publish)
        if self._ledger is not None:
            rows, positions = self.release.rows(batch), self.release.positions(batch)
            if self._ledger.note(rows, positions):
                draft_input = self.release.next_draft_input(launched)
                self._catch_up(worker, batch, draft_input, positions + 1, drafts_next=False)
        self._plain_steps.launched()
        self._note_launch(Mode.PLAIN, requests)
        return launched

    def _note_launch(self, mode: Mode, requests: int) -> None:
        # The step prepared last is the one launched now.
        self.clock.launched(mode, requests, self.controller.decided_steps - 1, self._context_tokens)

    def _before_draft(self, worker: Any, batch: Any, ledger: DraftLedger) -> None:
        """Bring the draft up to date before it drafts."""
        if not ledger.waits(self.release.rows(batch)):
            return
        plan = self.release.plan_of(batch)
        if plan is None:
            # Prepared by somebody else, so how far its requests have come is not known.
            ledger.give_up(self.release.rows(batch))
            return
        # Lengths are known, unless prompts alone wait: plain steps leave none open.
        self._catch_up(worker, batch, self.release.draft_input(batch), plan.host_seq_lens, drafts_next=True)

    def _catch_up(self, worker: Any, batch: Any, draft_input: Any, lengths: Any, *, drafts_next: bool) -> None:
        assert self.runtime is not None
        assert self._ledger is not None
        assert self._stopwatch is not None
        rows = self.release.rows(batch)
        try:
            due = self._ledger.due(rows, lengths)
            if bool(due[1].any()):
                with self._stopwatch.measuring():
                    seen = self.release.catch_up(worker, self.runtime, batch, draft_input, due, drafts_next=drafts_next)
                self.catch_ups += 1
                self.catch_up_tokens += int(seen.sum())
                self._ledger.saw(rows, due, seen)
        except Exception as error:
            # The draft stays behind then, which costs acceptance, not tokens.
            self.controller.fault(Fault.CATCH_UP, "the draft could not catch up", error)
            self._ledger.give_up(rows)

    def _prepare_for_spec(self, worker: Any, batch: Any, requests: int) -> None:
        planned = self.release.plan_of(batch)
        plan = StepPlan(Mode.SPEC, requests)
        self.release.stamp(batch, plan)
        self.release.reserve_for_spec(worker, batch, self.release.prepare_decode)
        # Preparing twice has claimed twice for a moment; the lengths are those of the first time.
        plan.host_seq_lens = planned.host_seq_lens if planned else None

    def _run_prefill(self, worker: Any, batch: Any, publish: Any, upstream: Callable[[], Any]) -> Any:
        if self._plain_steps is not None:
            self._plain_steps.prefilled(self.release.rows(batch))
        if self._ledger is not None:
            return self._run_followed_prefill(worker, batch, publish, upstream, self._ledger)
        if self.runtime is None or self.controller.spec_only:
            # What comes is speculative, and the draft has to know the prompt for it.
            return upstream()
        return self.release.run_plain_prefill(worker, batch, publish)

    def _run_followed_prefill(
        self, worker: Any, batch: Any, publish: Any, upstream: Callable[[], Any], ledger: DraftLedger
    ) -> Any:
        """Prefill, and let the draft read the prompt: at once, or later with many others."""
        rows, backlog = self.release.rows(batch), self._backlog
        size = self.release.prefill_size(batch) if backlog is not None and self._prompts_may_wait else None
        if (
            backlog is not None
            and size is not None
            and backlog.takes(size.tokens, size.requests)
            and ledger.reaches(size.longest_tokens - 1)
        ):
            assert self.runtime is not None, "there is a backlog"
            if not backlog.has_room(size.tokens, size.requests):
                self._read_backlog(worker)
            try:
                result, prompts, last_positions = self.release.run_prefill_ahead_of_draft(
                    worker, self.runtime, batch, publish
                )
            except Exception as error:
                self.controller.fault(Fault.PLAIN_STEP, "a prefill ahead of the draft failed", error)
            else:
                backlog.add(prompts, rows.tolist(), size.tokens)
                ledger.prefilled_plainly(rows, last_positions)
                self.deferred_prompts += size.requests
                return result
        # What the draft now reads may follow on what waits.
        self._read_backlog(worker)
        prefilled = upstream()
        ledger.prefilled(rows)
        return prefilled

    @property
    def _prompts_may_wait(self) -> bool:
        controller = self.controller
        if controller.dry_run or controller.spec_only:
            return False
        # SGLang prefills all that wait before it decodes again. One prefill behind another says that requests come
        # faster than they are read, and nobody drafts before the last of them.
        return controller.mode is Mode.PLAIN or (self._prefilled_last and controller.policy.needs_plain)

    def _read_backlog(self, worker: Any) -> None:
        """Let the draft read all prompts that wait."""
        if not self._backlog:
            return
        assert self.runtime is not None
        assert self._stopwatch is not None
        waited = self._backlog.take()
        try:
            with self._stopwatch.measuring():
                self.release.read_prompts(worker, self.runtime, waited.prompts, waited.left)
        except Exception as error:
            # Their requests speculate badly then, which costs acceptance, not tokens.
            self.controller.fault(Fault.CATCH_UP, "the draft could not read prompts", error)

    def before_release(self, req: Any) -> None:
        """Settle a leaving request's account: what of its KV the draft has seen, and how its steps ran.

        Only the former may stay in the radix cache.
        """
        row = self.release.row(req)
        plain_steps = 0 if self._plain_steps is None or row is None else self._plain_steps.taken(row)
        self.release.report_plain_steps(req, plain_steps)
        self._left.append(req)
        self._overshoot_tokens += self.release.overshoot_tokens(req)
        if self._ledger is not None:
            if row is not None and self._backlog is not None and self._backlog.holds(row):
                # Results are processed beside a forward that may be under way: the next one reads it first.
                self._backlog.leaves(row, self.release.kv_slots(self._worker, req))
            self.release.limit_committed(req, self._ledger.true_length)

    # --- results -----------------------------------------------------------------------------------------

    def process(self, batch: Any, result: Any, upstream: Callable[[Any, Any], Any]) -> Any:
        """Let SGLang process a decode result, a plain one as it would without speculation."""
        mode = self.release.mode_of_result(result)
        if mode is Mode.SPEC:
            if self._unresolved_spec_steps:
                self._unresolved_spec_steps -= 1
            seen = batch
        else:
            seen = self.release.as_plain_result_batch(batch)
            if self._plain_steps is not None:
                self._plain_steps.processed()
        self.controller.note_step(mode)
        left, self._left, self._overshoot_tokens = self._left, [], 0
        # A look at every request, twice, costs more than all else that is done here: only where nothing else tells.
        counts_output = self.release.may_be_cut(result)
        before_tokens = self.release.output_tokens(batch) if counts_output else 0
        processed = upstream(seen, result)
        requests, tokens = self.release.result_counts(seen, result)
        if counts_output:
            kept_tokens = self.release.output_tokens(batch) - before_tokens
        else:
            kept_tokens = tokens - self.release.tokens_of(batch, result, left) if left else tokens
        timed = self.clock.processed(mode)
        if timed is not None:
            if timed.after is not mode:
                self.controller.note_time(timed)
            if self._measures and timed.alone:
                self._samples.timed(timed)
        if self._measures and mode is Mode.SPEC:
            self._samples.verified(requests, tokens)
        self.controller.note_result(mode, requests, tokens, kept_tokens - self._overshoot_tokens)
        if self.telemetry is not None:
            self.telemetry.tick()
        return processed

    def _learn(self, times: Sequence[StepTimes], verifies: Sequence[Verifies]) -> None:
        self.controller.learn(times, verifies)
        # The policy that measures keeps the costs itself, and goes on with them after a time of being held.
        if self.settings.policy != "auto" and self.costs is not None:
            for alike in times:
                if alike.after is alike.mode:
                    self.costs.observe(alike.mode, alike.requests, alike.context_tokens, *alike.seconds)

    # --- control -----------------------------------------------------------------------------------------

    def use(self, asked: Mapping[str, Any], by: str | None = None) -> None:
        """Change settings from the next step on; what is not mentioned stays, a hold in one mode included.

        Args:
            by: Who asked, for the log.

        Raises:
            Refusal: no such settings, or this server was not started with what they need.
        """
        if self.controller.spec_only:
            raise Refusal(
                "This server speculates only, since repeated faults of the plugin.",
                "What failed may fail again, and each time SGLang's own path has to make up for it.",
                "Restart it; the log says what failed.",
            )
        settings = self._unheld.with_changes(asked)
        self._check_reach(settings)
        policy = self._make_policy(settings)
        if policy.needs_plain and self.runtime is None:
            raise Refusal(
                "This server can't run plain steps.",
                "It was started with the fixed policy 'spec', so no plain graphs were built.",
                "Start it with the policy 'auto' or 'threshold'.",
            )
        if policy.initial_mode is Mode.SPEC and not self._keeps_draft and self.runtime is not None:
            raise Refusal(
                "This server can't return to speculation.",
                "It was started with the fixed policy 'plain', so the draft was never kept up to date.",
                "Start it with the policy 'auto' or 'threshold'.",
            )
        told = json.dumps(settings.effective()), f", asked by {by}" if by else ""
        if self.settings is not self._unheld and not DECIDES.intersection(asked):
            # Held in one mode by hand; nobody asked for that to end.
            self._unheld = settings
            logger.info("adaptive-spec: once no longer held in one mode, settings will be %s%s", *told)
            return
        self.settings = settings
        if settings.policy in ("auto", "threshold"):
            self._unheld = settings
            if not (measures := settings.policy == "auto"):
                # Or it would be news to a policy that measures again some day.
                self._samples.clear()
            self._measures = measures
        self.controller.policy = policy
        self.controller.set_dry_run(settings.dry_run)
        logger.info("adaptive-spec: settings are now %s%s", *told)

    def publish_with(self, reporter: Any) -> None:
        """Publish the state where one of SGLang's reporters publishes its metrics."""
        self.telemetry = self.release.telemetry(
            reporter, self.snapshot, lambda error: self.controller.fault(Fault.TELEMETRY, "no metrics any more", error)
        )

    def snapshot(self) -> dict[str, Any]:
        """Settings, mode and counters as plain JSON types: the block ``adaptive_spec`` in ``/server_info``.

        ======================  =======================================================================================
        ``policy``              The policy in charge; ``spec`` and ``plain`` hold the server in that mode.
        ``settings``            ``{name: value}``, all settings, the derived ones filled in.
        ``mode``                ``"spec"`` or ``"plain"``, of the last decode step.
        ``steps``               ``{mode: count}``, decode steps by the mode they ran in.
        ``tokens``              ``{mode: count}``, tokens that they gave to clients.
        ``mode_seconds``        ``{mode: seconds}``, how long each mode was current, idle time included.
        ``step_seconds``        ``{mode: seconds or None}``, the median of recent steps.
        ``accepted_tokens``     Accepted drafts and bonus tokens of speculative steps, as SGLang counts them.
        ``verified_requests``   Requests in speculative steps, one a step.
        ``accept_length``       The former over the latter; None before the first speculative step.
        ``switches``            Changes of mode.
        ``switches_by_reason``  ``{reason: count}``.
        ``switch_counts``       ``[{"to": mode, "reason": reason, "count": count}, ...]``.
        ``last_switches``       The last ten, oldest first: ``[{"step", "from", "to", "reason", "running_requests",
                                "at_seconds" (Unix time), "first_step_seconds" (or None)}, ...]``.
        ``faults``              Faults of the plugin, all kinds.
        ``faults_by_kind``      ``{kind: count}``, kinds without any left out.
        ``spec_only``           Whether repeated faults ended switching.
        ``plain_memory_gib``    Device memory of what plain steps run on.
        ``plain_graph_sizes``   Batch sizes captured; empty where graphs are off.
        ``deferred_prompts``    Prompts that the draft read later, many at once.
        ``catch_ups``           Times that the draft was shown what plain steps had left for it.
        ``catch_up_tokens``     Tokens that it saw then.
        ``catch_up_seconds``    Time on the device that this took.
        ``dry_run``             Whether every step speculates, whatever is decided.
        ``decided_mode``        The mode that was decided for the last step; differs from ``mode`` in a dry run.
        ``dry_run_steps``       ``{mode: count}``, steps of dry runs by the mode that was decided for them.
        ``explain``             What the policy goes by; ``{}`` where that is its settings alone.
        ``step_costs``          Rows of step times by mode, batch size and context; empty unless they are measured.
        ``measured_sizes``      Batch sizes measured at start.
        ``most_requests``       Requests that may run at once; None on a server that only speculates.
        ``spec_graph_sizes``    Batch sizes of the speculative graphs.
        ``setup``               What measured step times hold for.
        ======================  =======================================================================================
        """
        runtime = self.runtime
        return {
            "policy": self.settings.policy,
            "settings": self.settings.effective(),
            **self.controller.snapshot(),
            "step_seconds": {mode.value: self.clock.recent_seconds(mode) for mode in Mode},
            "plain_memory_gib": round(runtime.memory_gib, 3) if runtime else 0.0,
            "plain_graph_sizes": list(runtime.graph_sizes) if runtime else [],
            "deferred_prompts": self.deferred_prompts,
            "catch_ups": self.catch_ups,
            "catch_up_tokens": self.catch_up_tokens,
            "catch_up_seconds": self._stopwatch.seconds if self._stopwatch else 0.0,
            "most_requests": self._most_requests,
            "spec_graph_sizes": list(self._spec_graph_sizes),
            "setup": self._setup,
            "measured_sizes": self.measured_sizes,
            "step_costs": self.costs.table() if self.costs is not None else [],
        }

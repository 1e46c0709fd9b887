"""The plan of one decode step: made when the batch is prepared, executed when it reaches the worker."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sglang_adaptive_spec.errors import PreparationMismatch
from sglang_adaptive_spec.modes import Mode


@dataclass(slots=True)
class StepPlan:
    """What was decided for one decode step, and what its batch was prepared for.

    Attributes:
        mode: The mode that was chosen.
        batch_size: Requests in the batch when it was prepared.
        reserve_tokens: KV slots ensured past each request's committed length; None for SGLang's own reserve.
        prepared: The mode that slots were allocated for; None until they are.
        host_seq_lens: Sequence lengths before the step, ``[batch_size]`` int64 on the CPU, where the host
            knows them without asking the GPU.
    """

    mode: Mode
    batch_size: int
    reserve_tokens: int | None = None
    prepared: Mode | None = None
    host_seq_lens: Any | None = None


def settle_mode(plan: StepPlan | None, batch_size: int) -> tuple[Mode, str | None]:
    """Choose the mode that a batch can safely run in, given how it was prepared.

    KV slots and graph shapes were settled at preparation, so a step always runs as it was prepared, whatever
    was decided since.

    Args:
        plan: The plan stamped on the batch; None if it was prepared without us.
        batch_size: Requests in the batch as it reaches the worker.

    Returns:
        The mode, and what went wrong on the way if anything did.

    Raises:
        PreparationMismatch: the batch is not the one that was prepared, so no mode is safe.
    """
    if plan is None or plan.prepared is None:
        # SGLang prepared it alone, hence for its own path.
        return Mode.SPEC, "a decode step was prepared without the plugin"
    if plan.batch_size != batch_size:
        raise PreparationMismatch(
            f"This decode step was prepared for {plan.batch_size} requests as a {plan.prepared.value} step, and "
            f"reached the worker with {batch_size}. Its KV slots belong to other requests, so it can't run. "
            "Something changed the batch between ScheduleBatch.prepare_for_decode and the worker."
        )
    if plan.mode is not plan.prepared:
        return plan.prepared, (
            f"a decode step of {batch_size} requests was prepared as {plan.prepared.value} and turned into "
            f"{plan.mode.value} afterwards; it runs as prepared"
        )
    return plan.prepared, None

"""Room for flashinfer's plan of a speculative graph, of which SGLang's default has too little for large batches.

SGLang alone seldom gets there: with speculation it falls to 48 running requests, a limit that this plugin lifts.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any, NamedTuple

from sglang_adaptive_spec.errors import Refusal

logger = logging.getLogger(__name__)

WORKSPACE_VARIABLE = "SGLANG_FLASHINFER_WORKSPACE_SIZE"
"""SGLang's own, in bytes; read in the scheduler's process, which inherits it."""

MIB = 2**20
DEFAULT_BYTES = 384 * MIB
"""SGLang's default, in every served release."""

FIXED_BYTES = 512 * MIB
DETERMINISTIC_BYTES = 2048 * MIB
FIXED_FOR = (
    "Qwen2ForCausalLM",
    "Qwen3ForCausalLM",
    "MiMoForCausalLM",
    "Qwen3VLForConditionalGeneration",
    "Qwen3VLMoeForConditionalGeneration",
)
"""Models for which SGLang sets :data:`FIXED_BYTES` itself, over whatever was given (``FlashInferAttnBackend``)."""

_BYTES_A_FLOAT = 4
_FLASHINFER = "flashinfer"

_given_here: str | None = None
"""What this process has set: a second engine in it must not take that for the user's word."""


class Heads(NamedTuple):
    """Attention heads of one rank.

    Attributes:
        query: Query heads.
        kv: KV heads.
        dim: Numbers a head.
    """

    query: int
    kv: int
    dim: int


def plan_bytes(requests: int, rows_each: int, heads: Heads) -> int:
    """The float workspace that flashinfer plans for a step in a CUDA graph, in bytes.

    As ``PrefillPlan`` and ``PrefillSplitQOKVIndptr`` of ``flashinfer/attention/scheduler.cuh`` (0.6.12) reckon it for
    ``tmp_v`` and ``tmp_s``: under a graph any one request may have all the rows that the others leave. Left out is
    their floor of two tiles a multiprocessor, divided by the KV heads, which does not grow with the batch.

    Args:
        requests: In the batch.
        rows_each: Tokens of each: the draft tokens in a verify step.
        heads: Of one rank.
    """
    rows, group = requests * rows_each, heads.query // heads.kv
    longest = (rows - requests + 1) * group
    tile = 16 if longest <= 16 else 128 if longest > 64 and heads.dim < 256 else 64
    tiles = -(-rows * group // tile) + requests - 1
    return heads.query * tiles * tile * (heads.dim + 1) * _BYTES_A_FLOAT


def make_room(arguments: Any, leave_out: Callable[[int], None] | None) -> None:
    """See that the plans of all speculative graphs fit, before the process that makes them starts.

    The workspace is enlarged through :data:`WORKSPACE_VARIABLE`, unless the user has set it. Where SGLang sets it
    itself, graphs that would not fit are left out. The draft is taken to have no more heads than the target; latent
    attention, planned in another way, is left alone.

    Args:
        arguments: The server's, as resolved.
        leave_out: Drops the speculative graphs of more than so many requests; None where none may be dropped.

    Raises:
        Refusal: there is no room, and no graph may be dropped.
    """
    graphs = arguments.cuda_graph_config.decode
    verifier, drafter = _backends(arguments)
    if graphs.backend == "disabled" or not graphs.bs or _FLASHINFER not in (verifier, drafter):
        return
    model = arguments.get_model_config()
    if model.attention_arch.name == "MLA":
        return
    ranks, most = arguments.tp_size, min(max(graphs.bs), arguments.max_running_requests or max(graphs.bs))
    heads = Heads(model.get_num_attention_heads(ranks), model.get_num_kv_heads(ranks), model.head_dim)

    def needed_bytes(requests: int) -> int:
        # A tree's branches are drafted like requests of one row each.
        drafting = plan_bytes(requests * arguments.speculative_eagle_topk, 1, heads)
        return max(plan_bytes(requests, arguments.speculative_num_draft_tokens, heads), drafting)

    needed, fixed = needed_bytes(most), _fixed_bytes(arguments, model)
    if fixed is None:
        _enlarge(most, needed)
    elif needed > fixed:
        fit = next((n for n in range(most, 0, -1) if needed_bytes(n) <= fixed), 0)
        if leave_out is None:
            raise Refusal(
                f"flashinfer's workspace has no room for speculative graphs of more than {fit} requests.",
                f"For {most} it needs {_mib(needed)} MiB, and SGLang sets it to {fixed // MIB} MiB for this server, "
                f"whatever {WORKSPACE_VARIABLE} says: the start would fail while graphs are captured.",
                f"Give --max-running-requests {fit} and no threshold above that, or another --attention-backend.",
            )
        leave_out(fit)
        logger.warning(
            "adaptive-spec: no speculative graphs of more than %d requests; flashinfer's workspace, which SGLang sets "
            "to %d MiB here, has no room for them. Larger batches go plain.",
            fit,
            fixed // MIB,
        )


def _backends(arguments: Any) -> tuple[str, str]:
    """What verify steps run on, and the draft's forwards."""
    of_mode = arguments.prefill_attention_backend
    if arguments.speculative_attention_mode == "decode":
        of_mode = arguments.decode_attention_backend
    verifier = of_mode or arguments.attention_backend
    return verifier, arguments.speculative_draft_attention_backend or verifier


def _fixed_bytes(arguments: Any, model: Any) -> int | None:
    """The size that SGLang sets itself; None where the variable decides."""
    if arguments.enable_deterministic_inference:
        return DETERMINISTIC_BYTES
    # By the model of whoever has the backend, and no draft is of these.
    own = (arguments.prefill_attention_backend, arguments.decode_attention_backend)
    target_has_it = _FLASHINFER in [backend or arguments.attention_backend for backend in own]
    return FIXED_BYTES if target_has_it and set(FIXED_FOR) & set(model.hf_config.architectures) else None


def _enlarge(requests: int, needed: int) -> None:
    global _given_here
    given = os.environ.get(WORKSPACE_VARIABLE)
    if needed <= DEFAULT_BYTES or given not in (None, _given_here):
        return
    os.environ[WORKSPACE_VARIABLE] = _given_here = str(_mib(needed) * MIB)
    logger.warning(
        "adaptive-spec: flashinfer's workspace is enlarged from %d to %d MiB, or speculative graphs of %d requests "
        "could not be captured. Set SGLANG_FLASHINFER_WORKSPACE_SIZE for another size.",
        DEFAULT_BYTES // MIB,
        _mib(needed),
        requests,
    )


def _mib(size: int) -> int:
    """Whole MiB that hold so many bytes."""
    return -(-size // MIB)

"""Every function of SGLang that this plugin wraps, one short module each.

Each module says what it wraps, why, and when it can go. Installed as ``sglang_adaptive_spec.patches``.
"""

from sglang_adaptive_spec.patches import (
    command_line,
    decode_report,
    decode_result,
    draft_input,
    grammar_sync,
    internal_state,
    kv_release,
    kv_reserve,
    request_metrics,
    running_requests,
    schedule_batch,
    seq_lens,
    server_args,
    weight_update,
    worker_batch,
    worker_forward,
    worker_graphs,
)

PATCHES = (
    *command_line.PATCHES,
    *server_args.PATCHES,
    *running_requests.PATCHES,
    *schedule_batch.PATCHES,
    *grammar_sync.PATCHES,
    *draft_input.PATCHES,
    *kv_release.PATCHES,
    *kv_reserve.PATCHES,
    *seq_lens.PATCHES,
    *worker_graphs.PATCHES,
    *worker_forward.PATCHES,
    *decode_result.PATCHES,
    *decode_report.PATCHES,
    *internal_state.PATCHES,
    *request_metrics.PATCHES,
    *weight_update.PATCHES,
)

BEFORE_0_5_13 = (*worker_batch.PATCHES, *(patch for patch in PATCHES if patch not in seq_lens.PATCHES))
"""There the worker gets a copy of the batch, and the host waits for lengths while it prepares one."""

"""What step times depend on, on SGLang 0.5.14: saved with them, and compared before they are used again."""

from __future__ import annotations

import hashlib
import json
from importlib.metadata import version
from typing import Any

import torch

from sglang_adaptive_spec import __version__


def describe_setup(worker: Any, arguments: Any) -> dict[str, Any]:
    """The setup of a started worker with its resolved arguments, by name.

    The models count by their configuration, not their path or weights: those do not change what a step takes.
    """
    target = worker.target_worker.model_runner
    draft = worker.draft_worker.draft_runner
    return {
        "model": _digest(target.model_config.hf_config),
        "draft": _digest(draft.model_config.hf_config),
        "dtype": str(target.dtype),
        "kv_cache_dtype": str(target.kv_cache_dtype),
        "quantization": arguments.quantization,
        "device": _device_name(arguments.device),
        "tp_size": arguments.tp_size,
        "attention_backend": _attention_backends(arguments, target.attn_backend),
        "page_size": arguments.page_size,
        "graphs": str(arguments.cuda_graph_config.decode.backend),
        "overlap": not arguments.disable_overlap_schedule,
        "algorithm": arguments.speculative_algorithm,
        "num_steps": arguments.speculative_num_steps,
        "topk": arguments.speculative_eagle_topk,
        "num_draft_tokens": arguments.speculative_num_draft_tokens,
        "sglang": version("sglang"),
        "torch": torch.__version__,
        "adaptive_spec": __version__,
    }


def _digest(hf_config: Any) -> str:
    described = hf_config.to_dict()
    # Where it lies and what wrote it are no part of the model.
    for name in ("_name_or_path", "transformers_version"):
        described.pop(name, None)
    return hashlib.sha256(json.dumps(described, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _device_name(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else device


def _attention_backends(arguments: Any, live: Any) -> str:
    # From 0.5.14 on a backend knows its name.
    decode = getattr(live, "decode_attention_backend_str", None) or arguments.attention_backend
    return f"{arguments.attention_backend}/{decode}"

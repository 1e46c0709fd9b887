"""Model shapes to measure on: a config.json is all that SGLang's dummy weights need."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Shape:
    """Sizes of a Llama target and its one-layer EAGLE3 draft.

    Attributes:
        draft_vocab_size: Tokens that the draft can propose. Dummy weights bring no draft-to-target map, so a
            proposal is taken as the target's id of the same number: always a valid one, as long as this is
            not above ``vocab_size``.
        context_tokens: The model's longest sequence. The real value matters: some backends size per-step
            buffers by it.
        rope: Rotary settings, as in config.json.
    """

    hidden_size: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    draft_vocab_size: int
    context_tokens: int
    rope: dict[str, Any]

    def __post_init__(self) -> None:
        assert self.layers >= 8, "EAGLE3 captures three different layers of the target"
        assert self.draft_vocab_size <= self.vocab_size


_LLAMA_3_1_ROPE: dict[str, Any] = {
    "rope_theta": 500000.0,
    "rope_scaling": {
        "factor": 8.0,
        "high_freq_factor": 4.0,
        "low_freq_factor": 1.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}

SHAPES: dict[str, Shape] = {
    # Llama-3.1-8B and its public EAGLE3 draft.
    "llama-8b": Shape(
        hidden_size=4096,
        layers=32,
        heads=32,
        kv_heads=8,
        head_dim=128,
        intermediate_size=14336,
        vocab_size=128256,
        draft_vocab_size=32000,
        context_tokens=131072,
        rope=_LLAMA_3_1_ROPE,
    ),
    # Small enough for a CPU; head size, context and rotary settings are those of the large one.
    "tiny": Shape(
        hidden_size=256,
        layers=8,
        heads=2,
        kv_heads=1,
        head_dim=128,
        intermediate_size=512,
        vocab_size=512,
        draft_vocab_size=256,
        context_tokens=131072,
        rope=_LLAMA_3_1_ROPE,
    ),
}


def write_pair(directory: Path, shape: Shape) -> tuple[Path, Path]:
    """Write the configs of target and draft below ``directory``; returns their folders."""
    target = _write(directory / "target", _config(shape, "LlamaForCausalLM", shape.layers))
    draft_config = _config(shape, "LlamaForCausalLMEagle3", 1) | {"draft_vocab_size": shape.draft_vocab_size}
    return target, _write(directory / "draft", draft_config)


def write_tokenizer(directory: Path, shape: Shape) -> None:
    """Write a tokenizer with a word for each token id: dummy weights say nothing that other words would fit.

    Whoever tokenizes and detokenizes has as much to do as with a real one, and every token reaches the client as text.
    """
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    words = Tokenizer(WordLevel({f"t{token}": token for token in range(shape.vocab_size)}, unk_token="t0"))
    words.pre_tokenizer = WhitespaceSplit()
    words.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))


def _config(shape: Shape, architecture: str, layers: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "vocab_size": shape.vocab_size,
        "max_position_embeddings": shape.context_tokens,
        "rms_norm_eps": 1e-5,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "attention_bias": False,
        "torch_dtype": "bfloat16",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **shape.rope,
    }


def _write(directory: Path, config: dict[str, Any]) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory

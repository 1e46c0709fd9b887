"""Writes tiny models with random weights: a Llama, Qwen3-MoE or DeepSeek target and an EAGLE or EAGLE3 draft
for it, and DeepSeek-V3 with its MTP layer.

No tokenizer: use `skip_tokenizer_init=True` and send token ids. The vocabulary is small, so that a
draft that knows nothing is right now and then, above all with several branches.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

Weights = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Shape:
    """Sizes of a model pair. EAGLE3 needs 8 target layers to capture three different ones."""

    vocab_size: int = 64
    hidden_size: int = 128
    num_layers: int = 8
    num_heads: int = 4
    num_kv_heads: int = 2
    intermediate_size: int = 256
    max_position: int = 2048

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads


def write_target(directory: Path, shape: Shape = Shape(), seed: int = 0) -> Path:
    """Write a Llama model into `directory`, and return it.

    The weights are large enough that the best logit is clearly above the second best: rounding
    then can't change a greedy token.
    """
    make = _Maker(seed)
    h = shape.hidden_size

    def layer(number: int) -> Weights:
        prefix = f"model.layers.{number}"
        norm = {f"{prefix}.input_layernorm.weight": torch.ones(h)}
        return make.decoder_layer(prefix, shape, attention_input=h) | norm

    return _write(directory, _config(shape, "LlamaForCausalLM", shape.num_layers), make.target(shape, layer))


def write_qwen3_moe_target(directory: Path, shape: Shape = Shape(), seed: int = 3, experts: int = 4) -> Path:
    """Write a Qwen3-MoE model into `directory`, and return it.

    It has what sets Qwen3 apart from Llama, norms on queries and keys. Every layer chooses two of `experts` for each
    token: SGLang knows no dense layers (`mlp_only_layers`) in this model, and would leave them unread.
    """
    make = _Maker(seed)
    h, m = shape.hidden_size, shape.intermediate_size // 2

    def layer(number: int) -> Weights:
        prefix = f"model.layers.{number}"
        weights = make.decoder_layer(prefix, shape, attention_input=h)
        weights[f"{prefix}.input_layernorm.weight"] = torch.ones(h)
        for name in ("q_norm", "k_norm"):
            # Far from one, so that it shows if a path leaves them out.
            weights[f"{prefix}.self_attn.{name}.weight"] = 1.5 + make(1, shape.head_dim, scale=0.3)[0]
        for name in ("gate_proj", "up_proj", "down_proj"):
            del weights[f"{prefix}.mlp.{name}.weight"]
        weights[f"{prefix}.mlp.gate.weight"] = make(experts, h)
        for expert in range(experts):
            weights |= make.mlp(f"{prefix}.mlp.experts.{expert}", h, m)
        return weights

    config = _config(shape, "Qwen3MoeForCausalLM", shape.num_layers) | {
        "model_type": "qwen3_moe",
        "head_dim": shape.head_dim,
        "num_experts": experts,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": m,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "norm_topk_prob": True,
        "attention_bias": False,
    }
    return _write(directory, config, make.target(shape, layer))


@dataclass(frozen=True)
class LatentShape:
    """Sizes of latent attention (MLA), and where the experts are.

    Attributes:
        query_rank: Of the latent state of queries; None for queries without one.
        key_rank: Of the latent state of keys and values.
        plain_dim: Of a head's query and key, the part without positions.
        rotary_dim: And the part with them, which all heads' keys share.
        value_dim: Of a head's value.
        dense_layers: The first layers, which have no experts.
        experts: Of all further layers, the draft's among them; a token goes to two of them and one for all.
    """

    query_rank: int | None = 48
    key_rank: int = 32
    plain_dim: int = 32
    rotary_dim: int = 16
    value_dim: int = 24
    dense_layers: int = 2
    experts: int = 4


# Of a DeepSeek layer's output. So the next token hangs on the last one most of all, and a draft that knows little else
# is right now and then.
_LAYER_SCALE = 0.15


def write_deepseek_v2_target(
    directory: Path, shape: Shape = Shape(), latent: LatentShape = LatentShape(query_rank=None), seed: int = 5
) -> Path:
    """Write a model like DeepSeek-V2-Lite into `directory`, and return it."""
    weights = _deepseek_target(_Maker(seed), shape, latent)
    weights = {name: each for name, each in weights.items() if "e_score_correction_bias" not in name}
    config = _deepseek_config(shape, latent) | {
        "architectures": ["DeepseekV2ForCausalLM"],
        "model_type": "deepseek_v2",
        "topk_method": "greedy",
        "scoring_func": "softmax",
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
        "n_group": 1,
        "topk_group": 1,
    }
    return _write(directory, config, weights)


def write_deepseek_v3(
    directory: Path, shape: Shape = Shape(), latent: LatentShape = LatentShape(), seed: int = 4
) -> Path:
    """Write a DeepSeek-V3 model with its MTP layer, target and draft in one, into `directory`, and return it."""
    make = _Maker(seed)
    h = shape.hidden_size
    weights = _deepseek_target(make, shape, latent)
    draft = f"model.layers.{shape.num_layers}"
    weights |= make.latent_layer(draft, shape, latent, dense=False)
    weights |= {f"{draft}.{name}.weight": torch.ones(h) for name in ("enorm", "hnorm", "shared_head.norm")}
    # The last token most of all, and what the target made of the one before.
    weights[f"{draft}.eh_proj.weight"] = torch.cat([5 * torch.eye(h), torch.eye(h)], dim=1)
    return _write(directory, _deepseek_config(shape, latent) | {"num_nextn_predict_layers": 1}, weights)


def _deepseek_target(make: "_Maker", shape: Shape, latent: LatentShape) -> Weights:
    def layer(number: int) -> Weights:
        return make.latent_layer(f"model.layers.{number}", shape, latent, dense=number < latent.dense_layers)

    return make.target(shape, layer)


def _deepseek_config(shape: Shape, latent: LatentShape) -> dict[str, Any]:
    return _config(shape, "DeepseekV3ForCausalLM", shape.num_layers) | {
        "model_type": "deepseek_v3",
        "num_key_value_heads": shape.num_heads,
        "q_lora_rank": latent.query_rank,
        "kv_lora_rank": latent.key_rank,
        "qk_nope_head_dim": latent.plain_dim,
        "qk_rope_head_dim": latent.rotary_dim,
        "v_head_dim": latent.value_dim,
        "first_k_dense_replace": latent.dense_layers,
        "n_routed_experts": latent.experts,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": shape.intermediate_size // 2,
        "moe_layer_freq": 1,
        "n_group": 2,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "scoring_func": "sigmoid",
        "norm_topk_prob": True,
        "routed_scaling_factor": 1.5,
        "attention_bias": False,
        # On a CPU, SGLang knows these rotary positions alone.
        "rope_scaling": {
            "type": "yarn",
            "factor": 4.0,
            "original_max_position_embeddings": shape.max_position // 4,
            "beta_fast": 32,
            "beta_slow": 1,
            "mscale": 1.0,
            "mscale_all_dim": 1.0,
        },
    }


def write_eagle3_draft(directory: Path, shape: Shape = Shape(), seed: int = 1) -> Path:
    """Write an EAGLE3 draft into `directory`, and return it."""
    make = _Maker(seed)
    h = shape.hidden_size
    weights = make.decoder_layer("midlayer", shape, attention_input=2 * h)
    weights["midlayer.input_layernorm.weight"] = torch.ones(h)
    weights["midlayer.hidden_norm.weight"] = torch.ones(h)
    weights["fc.weight"] = make(h, 3 * h)
    weights["norm.weight"] = torch.ones(h)
    weights["lm_head.weight"] = make(shape.vocab_size, h, scale=4 * h**-0.5)
    config = _config(shape, "LlamaForCausalLMEagle3", 1) | {"draft_vocab_size": shape.vocab_size}
    return _write(directory, config, weights)


def write_eagle_draft(directory: Path, shape: Shape = Shape(), seed: int = 2) -> Path:
    """Write an EAGLE draft into `directory`, and return it. It shares the target's embeddings."""
    make = _Maker(seed)
    h = shape.hidden_size
    weights = make.decoder_layer("layers.0", shape, attention_input=h)
    weights["layers.0.input_layernorm.weight"] = torch.ones(h)
    weights["fc.weight"] = make(h, 2 * h)
    return _write(directory, _config(shape, "LlamaForCausalLMEagle", 1), weights)


class _Maker:
    """Random weights from one seed."""

    def __init__(self, seed: int) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, rows: int, columns: int, scale: float | None = None) -> torch.Tensor:
        """[rows, columns], normal; the default scale keeps the size of what goes through."""
        values = torch.randn(rows, columns, generator=self._generator)
        return values * (columns**-0.5 if scale is None else scale)

    def target(self, shape: Shape, layer: Callable[[int], Weights]) -> Weights:
        """A whole target, given what makes a layer."""
        h = shape.hidden_size
        weights: Weights = {"model.embed_tokens.weight": self(shape.vocab_size, h, scale=1.0)}
        for number in range(shape.num_layers):
            weights |= layer(number)
        weights["model.norm.weight"] = torch.ones(h)
        weights["lm_head.weight"] = self(shape.vocab_size, h, scale=4 * h**-0.5)
        return weights

    def decoder_layer(self, prefix: str, shape: Shape, attention_input: int) -> Weights:
        h, m = shape.hidden_size, shape.intermediate_size
        kv = shape.num_kv_heads * shape.head_dim
        return {
            # sharp attention: the output depends on which tokens are where, not on their average
            f"{prefix}.self_attn.q_proj.weight": self(h, attention_input, scale=3 * attention_input**-0.5),
            f"{prefix}.self_attn.k_proj.weight": self(kv, attention_input),
            f"{prefix}.self_attn.v_proj.weight": self(kv, attention_input),
            f"{prefix}.self_attn.o_proj.weight": self(h, h),
            **self.mlp(f"{prefix}.mlp", h, m),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(h),
        }

    def latent_layer(self, prefix: str, shape: Shape, latent: LatentShape, *, dense: bool) -> Weights:
        h, heads, m = shape.hidden_size, shape.num_heads, shape.intermediate_size
        query_dim, rank = heads * (latent.plain_dim + latent.rotary_dim), latent.key_rank
        value_dim = heads * latent.value_dim
        weights = {
            f"{prefix}.input_layernorm.weight": torch.ones(h),
            f"{prefix}.post_attention_layernorm.weight": torch.ones(h),
            f"{prefix}.self_attn.kv_a_proj_with_mqa.weight": self(rank + latent.rotary_dim, h),
            # Far from one, so that it shows if a path leaves it out.
            f"{prefix}.self_attn.kv_a_layernorm.weight": 1.5 + self(1, rank, scale=0.3)[0],
            f"{prefix}.self_attn.kv_b_proj.weight": self(heads * (latent.plain_dim + latent.value_dim), rank),
            f"{prefix}.self_attn.o_proj.weight": self(h, value_dim, scale=_LAYER_SCALE * value_dim**-0.5),
        }
        # sharp attention, as above
        if latent.query_rank is None:
            weights[f"{prefix}.self_attn.q_proj.weight"] = self(query_dim, h, scale=3 * h**-0.5)
        else:
            query_rank = latent.query_rank
            weights[f"{prefix}.self_attn.q_a_proj.weight"] = self(query_rank, h)
            weights[f"{prefix}.self_attn.q_a_layernorm.weight"] = 1.5 + self(1, query_rank, scale=0.3)[0]
            weights[f"{prefix}.self_attn.q_b_proj.weight"] = self(query_dim, query_rank, scale=2 * query_rank**-0.5)
        if dense:
            return weights | self.mlp(f"{prefix}.mlp", h, m, _LAYER_SCALE)
        weights[f"{prefix}.mlp.gate.weight"] = self(latent.experts, h)
        weights[f"{prefix}.mlp.gate.e_score_correction_bias"] = self(1, latent.experts, scale=0.1)[0]
        for name in ("shared_experts", *(f"experts.{expert}" for expert in range(latent.experts))):
            weights |= self.mlp(f"{prefix}.mlp.{name}", h, m // 2, _LAYER_SCALE)
        return weights

    def mlp(self, prefix: str, h: int, m: int, output_scale: float = 1.0) -> Weights:
        return {
            f"{prefix}.gate_proj.weight": self(m, h),
            f"{prefix}.up_proj.weight": self(m, h),
            f"{prefix}.down_proj.weight": self(h, m, scale=output_scale * m**-0.5),
        }


def _config(shape: Shape, architecture: str, num_layers: int) -> dict[str, Any]:
    return {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
    }


def _write(directory: Path, config: dict[str, Any], weights: Weights) -> Path:
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory

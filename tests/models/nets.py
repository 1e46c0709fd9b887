"""Target and draft in plain PyTorch. Module names are those of the checkpoints SGLang loads."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from .vocabulary import BOS_ID, END_ID, MAX_CONTEXT


@dataclass(frozen=True)
class Shape:
    vocab: int
    draft_vocab: int
    hidden: int = 96
    inner: int = 192
    draft_inner: int = 256
    layers: int = 8
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 32
    theta: float = 10000.0
    eps: float = 1e-5

    @property
    def aux_layers(self) -> tuple[int, int, int]:
        """SGLang captures what enters these layers."""
        return 2, self.layers // 2, self.layers - 3

    def target_config(self) -> dict[str, Any]:
        return self._config("LlamaForCausalLM", self.layers, self.inner) | {
            "tie_word_embeddings": True,
        }

    def draft_config(self) -> dict[str, Any]:
        return self._config("LlamaForCausalLMEagle3", 1, self.draft_inner) | {
            "tie_word_embeddings": False,
            "draft_vocab_size": self.draft_vocab,
        }

    def _config(self, architecture: str, layers: int, inner: int) -> dict[str, Any]:
        return {
            "architectures": [architecture],
            "model_type": "llama",
            "torch_dtype": "float16",
            "vocab_size": self.vocab,
            "hidden_size": self.hidden,
            "intermediate_size": inner,
            "num_hidden_layers": layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_act": "silu",
            "rms_norm_eps": self.eps,
            "rope_theta": self.theta,
            "max_position_embeddings": MAX_CONTEXT,
            "attention_bias": False,
            "mlp_bias": False,
            "bos_token_id": BOS_ID,
            "eos_token_id": END_ID,
        }


def rotate(x: Tensor, positions: Tensor, theta: float) -> Tensor:
    """RoPE, halves rotated against each other. x: [..., length, dim]; positions: [length]"""
    half = x.shape[-1] // 2
    speed = theta ** (-torch.arange(half, dtype=torch.float32) / half)
    angle = positions[:, None].float() * speed
    cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return torch.cat((left * cos - right * sin, right * cos + left * sin), dim=-1)


class Attention(nn.Module):
    def __init__(self, shape: Shape, inputs: int) -> None:
        super().__init__()
        self.shape = shape
        self.q_proj = nn.Linear(inputs, shape.heads * shape.head_dim, bias=False)
        self.k_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.v_proj = nn.Linear(inputs, shape.kv_heads * shape.head_dim, bias=False)
        self.o_proj = nn.Linear(shape.heads * shape.head_dim, shape.hidden, bias=False)

    def qkv(self, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x: [batch, length, inputs] -> each [batch, heads or kv_heads, length, head_dim]"""

        def split(y: Tensor) -> Tensor:
            return y.view(*y.shape[:-1], -1, self.shape.head_dim).transpose(1, 2)

        theta = self.shape.theta
        query = rotate(split(self.q_proj(x)), positions, theta)
        key = rotate(split(self.k_proj(x)), positions, theta)
        return query, key, split(self.v_proj(x))

    def output(self, mixed: Tensor) -> Tensor:
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(2))
        return projected


def causal_attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """In float32 whatever the autocast: in bfloat16 its backward pass is slow on a CPU."""
    with torch.autocast("cpu", enabled=False):
        return functional.scaled_dot_product_attention(
            query.float(), key.float(), value.float(), is_causal=True, enable_gqa=True
        )


class Mlp(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, inner, bias=False)
        self.up_proj = nn.Linear(hidden, inner, bias=False)
        self.down_proj = nn.Linear(inner, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return y


class TargetLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape, shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = Mlp(shape.hidden, shape.inner)

    def forward(self, x: Tensor, positions: Tensor, cache: "Cache | None") -> Tensor:
        query, key, value = self.self_attn.qkv(self.input_layernorm(x), positions)
        parts = query, key, value
        mixed = causal_attention(*parts) if cache is None else cache.attend(*parts, positions)
        x = x + self.self_attn.output(mixed)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Cache:
    """Keys and values of one layer, for inference. Slots past the present position may hold anything."""

    def __init__(self, shape: Shape, batch: int, length: int = MAX_CONTEXT) -> None:
        self.keys = torch.zeros(batch, shape.kv_heads, length, shape.head_dim)
        self.values = torch.zeros_like(self.keys)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, positions: Tensor) -> Tensor:
        """Write key and value at `positions` (consecutive), then attend to everything up to each."""
        start, end = int(positions[0]), int(positions[-1]) + 1
        self.keys[:, :, start:end] = key
        self.values[:, :, start:end] = value
        mask = torch.arange(end)[None, :] <= positions[:, None]
        return functional.scaled_dot_product_attention(
            query, self.keys[:, :, :end], self.values[:, :, :end], attn_mask=mask, enable_gqa=True
        )


class Body(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(TargetLayer(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)


class Target(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.model = Body(shape)

    def forward(
        self, ids: Tensor, positions: Tensor | None = None, caches: list[Cache] | None = None
    ) -> tuple[Tensor, Tensor]:
        """ids: [batch, length] -> logits [batch, length, vocab], aux [batch, length, 3 * hidden]"""
        if positions is None:
            positions = torch.arange(ids.shape[1])
        x = self.model.embed_tokens(ids)
        aux = []
        for index, layer in enumerate(self.model.layers):
            if index in self.shape.aux_layers:
                aux.append(x)
            x = layer(x, positions, caches[index] if caches else None)
        logits = functional.linear(self.model.norm(x), self.model.embed_tokens.weight)
        return logits, torch.cat(aux, dim=-1)


class DraftLayer(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.hidden_norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.self_attn = Attention(shape, 2 * shape.hidden)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = Mlp(shape.hidden, shape.draft_inner)

    def qkv(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        both = torch.cat((self.input_layernorm(embeds), self.hidden_norm(hidden)), dim=-1)
        return self.self_attn.qkv(both, positions)

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        x = hidden + self.self_attn.output(mixed)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Draft(nn.Module):
    """At position j it sees token j + 1 and what the target felt at j, and guesses token j + 2."""

    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Shape, token_ids: Tensor) -> None:
        """token_ids: [draft_vocab], the target ids of the draft's vocabulary, ascending"""
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.midlayer = DraftLayer(shape)
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self.register_buffer("d2t", token_ids - torch.arange(len(token_ids)))
        self.register_buffer("t2d", torch.zeros(shape.vocab, dtype=torch.bool))
        self.t2d[token_ids] = True

    def forward(self, embeds: Tensor, hidden: Tensor, positions: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """One step, for inference. -> logits [batch, length, draft_vocab], own hidden state"""
        if hidden.shape[-1] != self.shape.hidden:
            hidden = self.fc(hidden)
        query, key, value = self.midlayer.qkv(embeds, hidden, positions)
        out = self.midlayer.finish(hidden, cache.attend(query, key, value, positions))
        return self.lm_head(self.norm(out)), out

    def unroll(self, embeds: Tensor, aux: Tensor, steps: int) -> list[Tensor]:
        """Training-time test: the logits of each of `steps` chained steps, for all positions at once.

        embeds: [batch, length, hidden], already shifted by one; aux: [batch, length, 3 * hidden].
        Step s at position p guesses from the target's aux at p - s and its own states since; rows
        p < s mean nothing. Keys up to p - s come from aux, later ones from the steps before.
        """
        length = embeds.shape[1]
        positions = torch.arange(length)
        group = self.shape.heads // self.shape.kv_heads
        scale = self.shape.head_dim**-0.5
        hidden = self.fc(aux)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for step in range(steps):
            query, key, value = self.midlayer.qkv(embeds, hidden, positions)
            keys.append(key.repeat_interleave(group, dim=1))
            values.append(value.repeat_interleave(group, dim=1))
            if step == 0:
                mixed = causal_attention(query, keys[0], values[0])
            else:
                hidden_future = torch.ones(length, length, dtype=torch.bool).triu(1 - step)
                scores = (query @ keys[0].transpose(-1, -2)) * scale
                scores = scores.masked_fill(hidden_future, float("-inf"))
                # Step i of position p - (step - i): the draft's own keys, one column each.
                own = [shift(keys[i], step - i) for i in range(1, step + 1)]
                columns = [(query * k).sum(-1, keepdim=True) * scale for k in own]
                weights = torch.cat([scores, *columns], dim=-1).softmax(-1)
                mixed = weights[..., :length] @ values[0]
                for i in range(1, step + 1):
                    weight = weights[..., length + i - 1, None]
                    mixed = mixed + weight * shift(values[i], step - i)
            out = self.midlayer.finish(hidden, mixed)
            logits.append(self.lm_head(self.norm(out)))
            hidden = shift(out, 1)
        return logits


def shift(x: Tensor, by: int) -> Tensor:
    """Move rows `by` places later along the length axis (-2); the first rows become zero."""
    return x if by == 0 else functional.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]

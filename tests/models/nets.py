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

    def eagle_config(self) -> dict[str, Any]:
        # SGLang gives it the target's embeddings and head, and fails where the two are one.
        return self._config("LlamaForCausalLMEagle", 1, self.draft_inner) | {"tie_word_embeddings": False}

    def mtp_config(self) -> dict[str, Any]:
        """Of target and draft in one checkpoint; transformers knows the layers as Qwen2's."""
        return self._config("MiMoForCausalLM", self.layers, self.inner) | {
            "model_type": "qwen2",
            "tie_word_embeddings": True,
            "num_nextn_predict_layers": 1,
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
    ) -> tuple[Tensor, Tensor, Tensor]:
        """ids: [batch, length] -> logits [batch, length, vocab], aux [.., 3 * hidden], last state [.., hidden]"""
        if positions is None:
            positions = torch.arange(ids.shape[1])
        x = self.model.embed_tokens(ids)
        aux = []
        for index, layer in enumerate(self.model.layers):
            if index in self.shape.aux_layers:
                aux.append(x)
            x = layer(x, positions, caches[index] if caches else None)
        last = self.model.norm(x)
        logits = functional.linear(last, self.model.embed_tokens.weight)
        return logits, torch.cat(aux, dim=-1), last


class DraftLayer(nn.Module):
    """One layer. Which norms come before its attention differs by kind of draft."""

    def __init__(self, shape: Shape, inputs: int, inner: int, norms: tuple[str, ...]) -> None:
        super().__init__()
        for name in norms:
            setattr(self, name, nn.RMSNorm(shape.hidden, eps=shape.eps))
        self.self_attn = Attention(shape, inputs)
        self.post_attention_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.mlp = Mlp(shape.hidden, inner)

    def finish(self, hidden: Tensor, mixed: Tensor) -> Tensor:
        x = hidden + self.self_attn.output(mixed)
        y: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return y


class Draft(nn.Module):
    """At position j it sees token j + 1 and what the target felt at j, and guesses token j + 2."""

    reads_aux = False
    """Whether it reads the concatenated states of three target layers instead of the last one."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape

    @property
    def layer(self) -> DraftLayer:
        """The one layer, under whatever name checkpoints have it."""
        raise NotImplementedError

    def first(self, states: Tensor) -> Tensor:
        """What the target felt, in the width of the draft's own states."""
        return states

    def enter(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        """-> the attention's input, and what its output is added to"""
        raise NotImplementedError

    def leave(self, out: Tensor) -> tuple[Tensor, Tensor]:
        """-> logits over the draft's vocabulary, and the state that the next step starts from"""
        raise NotImplementedError

    def forward(self, embeds: Tensor, states: Tensor, positions: Tensor, cache: Cache) -> tuple[Tensor, Tensor]:
        """One step, for inference. -> logits [batch, length, draft_vocab], own hidden state"""
        hidden = states if states.shape[-1] == self.shape.hidden else self.first(states)
        inputs, stream = self.enter(embeds, hidden, positions)
        query, key, value = self.layer.self_attn.qkv(inputs, positions)
        return self.leave(self.layer.finish(stream, cache.attend(query, key, value, positions)))

    def unroll(self, embeds: Tensor, states: Tensor, steps: int) -> list[Tensor]:
        """Training-time test: the logits of each of `steps` chained steps, for all positions at once.

        embeds: [batch, length, hidden], already shifted by one; states: the target's, [batch, length, any].
        Step s at position p guesses from the target's state at p - s and its own states since; rows
        p < s mean nothing. Keys up to p - s come from the target's states, later ones from the steps before.
        """
        length = embeds.shape[1]
        positions = torch.arange(length)
        group = self.shape.heads // self.shape.kv_heads
        scale = self.shape.head_dim**-0.5
        hidden = self.first(states)
        keys: list[Tensor] = []
        values: list[Tensor] = []
        logits = []
        for step in range(steps):
            inputs, stream = self.enter(embeds, hidden, positions)
            query, key, value = self.layer.self_attn.qkv(inputs, positions)
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
            guess, state = self.leave(self.layer.finish(stream, mixed))
            logits.append(guess)
            hidden = shift(state, 1)
        return logits


class Eagle3Draft(Draft):
    """Three layers' states; a vocabulary and a head of its own. Checkpoint: LlamaForCausalLMEagle3."""

    reads_aux = True
    d2t: Tensor
    t2d: Tensor

    def __init__(self, shape: Shape, token_ids: Tensor) -> None:
        """token_ids: [draft_vocab], the target ids of the draft's vocabulary, ascending"""
        super().__init__(shape)
        self.fc = nn.Linear(3 * shape.hidden, shape.hidden, bias=False)
        self.midlayer = DraftLayer(shape, 2 * shape.hidden, shape.draft_inner, ("input_layernorm", "hidden_norm"))
        self.norm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self.register_buffer("d2t", token_ids - torch.arange(len(token_ids)))
        self.register_buffer("t2d", torch.zeros(shape.vocab, dtype=torch.bool))
        self.t2d[token_ids] = True

    @property
    def layer(self) -> DraftLayer:
        return self.midlayer

    def first(self, states: Tensor) -> Tensor:
        projected: Tensor = self.fc(states)
        return projected

    def enter(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        del positions
        both = (self.midlayer.input_layernorm(embeds), self.midlayer.hidden_norm(hidden))
        return torch.cat(both, dim=-1), hidden

    def leave(self, out: Tensor) -> tuple[Tensor, Tensor]:
        return self.lm_head(self.norm(out)), out


class EagleDraft(Draft):
    """The last state and the target's head, no norm around the layer. Checkpoint: LlamaForCausalLMEagle."""

    def __init__(self, shape: Shape, head: Tensor) -> None:
        """head: [vocab, hidden], the target's"""
        super().__init__(shape)
        self.fc = nn.Linear(2 * shape.hidden, shape.hidden)
        self.layers = nn.ModuleList([DraftLayer(shape, shape.hidden, shape.draft_inner, ())])
        self.register_buffer("head", head, persistent=False)

    @property
    def layer(self) -> DraftLayer:
        layer: DraftLayer = self.layers[0]
        return layer

    def enter(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        del positions
        x = self.fc(torch.cat((embeds, hidden), dim=-1))
        return x, x

    def leave(self, out: Tensor) -> tuple[Tensor, Tensor]:
        return functional.linear(out, self.head), out


class MtpDraft(Draft):
    """A layer of multi-token prediction, part of the target's checkpoint. Checkpoint: MiMoForCausalLM, mtp_layers."""

    def __init__(self, shape: Shape, head: Tensor) -> None:
        """head: [vocab, hidden], the target's"""
        super().__init__(shape)
        self.token_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.hidden_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.input_proj = nn.Linear(2 * shape.hidden, shape.hidden, bias=False)
        self.mtp_block = DraftLayer(shape, shape.hidden, shape.inner, ("input_layernorm",))
        self.final_layernorm = nn.RMSNorm(shape.hidden, eps=shape.eps)
        self.register_buffer("head", head, persistent=False)

    @property
    def layer(self) -> DraftLayer:
        return self.mtp_block

    def enter(self, embeds: Tensor, hidden: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
        embeds = embeds * (positions != 0)[:, None]
        x = self.input_proj(torch.cat((self.hidden_layernorm(hidden), self.token_layernorm(embeds)), dim=-1))
        return self.mtp_block.input_layernorm(x), x

    def leave(self, out: Tensor) -> tuple[Tensor, Tensor]:
        state = self.final_layernorm(out)
        return functional.linear(state, self.head), state


def shift(x: Tensor, by: int) -> Tensor:
    """Move rows `by` places later along the length axis (-2); the first rows become zero."""
    return x if by == 0 else functional.pad(x, (0, 0, by, 0))[..., : x.shape[-2], :]

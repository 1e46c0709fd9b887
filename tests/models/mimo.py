"""Puts the target and the multi-token-prediction layer into one checkpoint, as models with such a layer ship."""

from __future__ import annotations

import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

MODELS = Path(__file__).parent


def write_mimo(folder: Path) -> Path:
    """Write a MiMoForCausalLM into `folder`, and return it: the target's very tokens, drafted by its own layer."""
    folder.mkdir(parents=True)
    weights = load_file(MODELS / "target" / "model.safetensors")
    for name, tensor in load_file(MODELS / "draft_mtp" / "model.safetensors").items():
        weights["model.mtp_layers.0." + name.removeprefix("mtp_block.")] = tensor
    # The architecture has biases where the target was trained without.
    for name, tensor in list(weights.items()):
        if name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            weights[name.removesuffix("weight") + "bias"] = torch.zeros(tensor.shape[0], dtype=tensor.dtype)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        shutil.copy(MODELS / "target" / name, folder)
    shutil.copy(MODELS / "draft_mtp" / "config.json", folder)
    return folder

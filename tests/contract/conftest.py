import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from .starts import Probe


@pytest.fixture(scope="session")
def probe() -> Iterator[Probe]:
    probe = Probe()
    yield probe
    probe.close()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a tiny target; its weights are never asked for."""
    folder = tmp_path_factory.mktemp("target")
    write_config(folder, "LlamaForCausalLM", num_hidden_layers=8)
    return ("--model-path", str(folder), "--skip-tokenizer-init")


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    """Flags of a draft for it, without the algorithm."""
    folder = tmp_path_factory.mktemp("draft")
    write_config(folder, "LlamaForCausalLMEagle3", num_hidden_layers=1, draft_vocab_size=64)
    numbers = "--speculative-num-steps 3 --speculative-eagle-topk 1 --speculative-num-draft-tokens 4"
    return ("--speculative-draft-model-path", str(folder), *numbers.split())


@pytest.fixture(scope="session")
def eagle3(model: tuple[str, ...], draft: tuple[str, ...]) -> tuple[str, ...]:
    """Flags of a server that speculates with EAGLE3."""
    return (*model, *draft, "--speculative-algorithm", "EAGLE3")


def write_config(folder: Path, architecture: str, **more: Any) -> None:
    """A tiny model's configuration, without weights."""
    config = {
        "architectures": [architecture],
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 128,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 256,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        "bos_token_id": 0,
        "eos_token_id": 1,
        **more,
    }
    (folder / "config.json").write_text(json.dumps(config))

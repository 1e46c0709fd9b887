"""The pair's tokenizer: byte-level BPE, so that every byte string can be spelled."""

import json
import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from . import corpus

# Special tokens take the first ids, in the order of corpus.SPECIAL_TOKENS.
BOS_ID, END_ID = 0, 1
MAX_CONTEXT = 4096

_CHAT_TEMPLATE = (
    "{{- bos_token -}}"
    "{%- for message in messages -%}"
    "{{- '<|' + message['role'] + '|>' + message['content'] + '<|end|>' -}}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build_tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    rng = random.Random(5)
    sample = [corpus.random_document(rng, 24, 400).text for _ in range(400)]
    sample += [f" {word}" for word in corpus.WORDS] * 40
    sample += [f"{n}" for n in range(1, corpus.MAX_ROUNDS + 1)] * 100
    trainer = trainers.BpeTrainer(
        vocab_size=768,
        min_frequency=40,
        special_tokens=list(corpus.SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_without_special(sample), trainer)
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{corpus.BOS} $A", special_tokens=[(corpus.BOS, BOS_ID)]
    )
    for word in corpus.WORDS:
        assert len(encode(tokenizer, f" {word}")) == 1, word
    return tokenizer


def _without_special(texts: list[str]) -> list[str]:
    for token in corpus.SPECIAL_TOKENS:
        texts = [text.replace(token, "\n") for text in texts]
    return texts


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """Ids of `text` as it stands: no BOS is added."""
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return ids


def save_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"), pretty=False)
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": corpus.BOS,
        "eos_token": corpus.END,
        "pad_token": corpus.END,
        "additional_special_tokens": list(corpus.SPECIAL_TOKENS[2:]),
        "model_max_length": MAX_CONTEXT,
        "clean_up_tokenization_spaces": False,
        "chat_template": _CHAT_TEMPLATE,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=2) + "\n")

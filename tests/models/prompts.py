"""Held-out prompts for the tiny pair, as text without BOS (the tokenizer adds it)."""

import random

from . import corpus

_SEED_OFFSET = 1_000_000  # keeps clear of the training seeds


def heldout_prompts(count: int, seed: int, max_size: int = 32) -> list[str]:
    """`count` prompts of mixed kind and length, each of which wants at least four more rounds.

    The third and fourth of every four continue the first (and so share its whole text as a prefix).
    """
    rng = random.Random(seed + _SEED_OFFSET)
    prompts: list[str] = []
    while len(prompts) < count:
        kind = rng.choices(corpus.KINDS, corpus.KIND_WEIGHTS)[0]
        whole = corpus.document(rng, kind, rng.randint(6, max_size), rounds=rng.randint(12, 30))
        other = corpus.document(rng, "log", rng.randint(6, max_size), rounds=rng.randint(4, 9))
        texts = [whole.opening, other.opening]
        texts += [whole.opening + "".join(whole.rounds[:shown]) for shown in sorted(rng.sample(range(1, 9), 2))]
        prompts += [text.removeprefix(corpus.BOS) for text in texts]
    return prompts[:count]


def heldout_message(seed: int, rounds: int = 4) -> str:
    """A user message for the chat template; the answer is `rounds` rounds and ends by itself."""
    rng = random.Random(seed + 2 * _SEED_OFFSET)
    opening = corpus.document(rng, "log", rng.randint(6, 16), rounds).opening
    return opening.removeprefix(corpus.BOS)


def heldout_record(seed: int) -> str:
    """A user message that asks for a one-line JSON record: {"name": string, "count": integer}."""
    opening = corpus.record(random.Random(seed + 3 * _SEED_OFFSET)).opening
    return opening.removeprefix(corpus.BOS + corpus.USER).removesuffix(corpus.END + corpus.ASSISTANT)

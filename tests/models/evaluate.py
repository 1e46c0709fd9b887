"""Accept length, cost of stale draft KV, and logit margins, in plain PyTorch:
python -m tests.models.evaluate FOLDER
"""

import argparse
from pathlib import Path
from statistics import mean
from typing import Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor

from .nets import Cache, Eagle3Draft, Target
from .prompts import heldout_prompts
from .train import load_draft, load_target, read_shape
from .vocabulary import BOS_ID, encode

DraftKV = Literal["true", "zero", "noise"]


class Chain:
    """One greedy request, decoded plainly or by drafting a chain of `steps` tokens."""

    def __init__(self, target: Target, draft: Eagle3Draft, prompt: list[int], steps: int = 3) -> None:
        self.target, self.draft, self.steps = target, draft, steps
        self.caches = [Cache(target.shape, 1) for _ in range(target.shape.layers)]
        self.draft_cache = Cache(draft.shape, 1)
        self.to_target = draft.d2t + torch.arange(draft.shape.draft_vocab)
        self.ids = prompt.copy()  # the last one is known, but has no KV yet (after the prefill)
        self.gaps: list[float] = []
        logits, aux = self._run_target(prompt, 0)
        self.ids.append(int(logits[-1].argmax()))
        self.extend_draft(0, aux)

    def _run_target(self, ids: list[int], start: int) -> tuple[Tensor, Tensor]:
        positions = torch.arange(start, start + len(ids))
        logits, aux, _ = self.target(torch.tensor([ids]), positions, self.caches)
        return logits[0], aux

    def _note_gaps(self, logits: Tensor) -> None:
        best = logits.topk(2).values
        self.gaps += (best[:, 0] - best[:, 1]).tolist()

    def extend_draft(self, start: int, aux: Tensor) -> None:
        """Give the draft the true aux states of the positions from `start` on."""
        positions = torch.arange(start, start + aux.shape[1])
        embeds = self.target.model.embed_tokens(torch.tensor([self.ids[start + 1 :]]))
        logits, hidden = self.draft(embeds, aux, positions, self.draft_cache)
        self.guess = self._token(logits)
        self.hidden = hidden[:, -1:]

    def _token(self, logits: Tensor) -> int:
        return int(self.to_target[logits[0, -1].argmax()])

    def plain(self, count: int, draft_kv: DraftKV) -> None:
        start = len(self.ids) - 1
        states = []
        for _ in range(count):
            logits, aux = self._run_target(self.ids[-1:], len(self.ids) - 1)
            self._note_gaps(logits)
            states.append(aux)
            self.ids.append(int(logits[-1].argmax()))
        if draft_kv == "true":
            self.extend_draft(start, torch.cat(states, dim=1))
            return
        if draft_kv == "noise":
            for buffer in (self.draft_cache.keys, self.draft_cache.values):
                spread = buffer[:, :, :start].std()
                buffer[:, :, start : start + count].normal_().mul_(spread)
        self.extend_draft(start + count - 1, states[-1])

    def speculate(self) -> int:
        """One draft-verify step. -> tokens won, the bonus token included"""
        start = len(self.ids) - 1
        drafted, hidden = [self.guess], self.hidden
        for i in range(self.steps - 1):
            embeds = self.target.model.embed_tokens(torch.tensor([drafted[-1:]]))
            logits, hidden = self.draft(embeds, hidden, torch.tensor([start + i]), self.draft_cache)
            drafted.append(self._token(logits))
        logits, aux = self._run_target([self.ids[-1], *drafted], start)
        said = logits.argmax(-1).tolist()
        won = 1
        while won <= self.steps and drafted[won - 1] == said[won - 1]:
            won += 1
        self._note_gaps(logits[:won])
        self.ids += said[:won]
        self.extend_draft(start, aux[:, :won])
        return won


@torch.no_grad()
def accept_length(
    target: Target,
    draft: Eagle3Draft,
    prompts: list[list[int]],
    spec_steps: int,
    plain_tokens: int = 0,
    draft_kv: DraftKV = "true",
) -> tuple[float, list[float], list[Chain]]:
    """-> mean accept length, all logit gaps, the chains"""
    won: list[int] = []
    gaps: list[float] = []
    chains = []
    for prompt in prompts:
        chain = Chain(target, draft, prompt)
        if plain_tokens:
            chain.plain(plain_tokens, draft_kv)
        won += [chain.speculate() for _ in range(spec_steps)]
        gaps += chain.gaps
        chains.append(chain)
    return mean(won), gaps, chains


def encode_prompts(tokenizer: Tokenizer, count: int, seed: int) -> list[list[int]]:
    return [[BOS_ID, *encode(tokenizer, text)] for text in heldout_prompts(count, seed)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--prompts", type=int, default=16)
    parser.add_argument("--long-steps", type=int, default=250)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    shape = read_shape(arguments.folder)
    target = load_target(shape, arguments.folder / "target")
    draft = load_draft(shape, arguments.folder / "draft")
    tokenizer = Tokenizer.from_file(str(arguments.folder / "target" / "tokenizer.json"))
    prompts = encode_prompts(tokenizer, arguments.prompts, seed=0)

    length, gaps, chains = accept_length(target, draft, prompts, arguments.long_steps)
    print(f"accept length {length:.2f} over {len(gaps)} tokens")
    ordered = sorted(gaps)
    print("smallest logit gaps", " ".join(f"{gap:.4f}" for gap in ordered[:8]))
    print(tokenizer.decode(chains[0].ids[-160:], skip_special_tokens=False))
    for plain_tokens in (64, 200):
        true, _, _ = accept_length(target, draft, prompts, 50, plain_tokens, "true")
        for kind in ("zero", "noise"):
            stale, _, _ = accept_length(target, draft, prompts, 50, plain_tokens, kind)
            print(
                f"after {plain_tokens} plain tokens: true KV {true:.2f}, {kind} KV {stale:.2f} ({stale / true:.2f} x)"
            )


if __name__ == "__main__":
    main()

"""Train the pair and write it out: python -m tests.models.train OUTPUT_FOLDER"""

import argparse
import json
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import Tensor, nn
from torch.nn import functional

from . import corpus, vocabulary
from .nets import Draft, Eagle3Draft, EagleDraft, MtpDraft, Shape, Target
from .optim import Optimizer

OPENING_WEIGHT = 0.05
RECORD_SHARE, STRAY_SHARE = 0.25, 0.04  # of the documents; a record is short
DRAFT_STEPS = 3
KINDS = ("target", "draft", "draft_eagle", "draft_mtp")


@dataclass(frozen=True)
class Phase:
    steps: int
    batch: int
    length: int
    max_size: int


TARGET_PHASES = (
    Phase(500, 16, 128, 8),
    Phase(300, 16, 256, 20),
    Phase(450, 6, 512, 32),
    Phase(150, 3, 1024, 32),
    Phase(50, 2, 2048, 32),
)
DRAFT_PHASES = (
    Phase(400, 16, 128, 10),
    Phase(300, 8, 256, 20),
    Phase(200, 4, 512, 32),
)


@dataclass(frozen=True)
class Batch:
    ids: Tensor  # [batch, length + 1]
    weight: Tensor  # [batch, length + 1], small where a token is free


class Data:
    def __init__(self, tokenizer: Tokenizer, seed: int) -> None:
        self.tokenizer = tokenizer
        self.rng = random.Random(seed)

    def batch(self, phase: Phase) -> Batch:
        rows = [self._row(phase.length + 1, phase.max_size) for _ in range(phase.batch)]
        ids, weights = zip(*rows, strict=True)
        return Batch(torch.tensor(ids), torch.tensor(weights))

    def _row(self, length: int, max_size: int) -> tuple[list[int], list[float]]:
        ids: list[int] = []
        weights: list[float] = []
        while len(ids) < length:
            lot = self.rng.random()
            if lot < RECORD_SHARE:
                document = corpus.record(self.rng)
            elif lot < RECORD_SHARE + STRAY_SHARE:
                document = corpus.stray(self.rng, min_chars=length * 5)
            else:
                document = corpus.random_document(self.rng, max_size, min_chars=length * 5)
            opening = vocabulary.encode(self.tokenizer, document.opening)
            rounds = vocabulary.encode(self.tokenizer, "".join(document.rounds))
            ids += opening + rounds
            weights += [OPENING_WEIGHT] * len(opening) + [1.0] * len(rounds)
        return ids[:length], weights[:length]


def schedule(phases: tuple[Phase, ...]) -> Iterator[tuple[Phase, float]]:
    """Each step's phase and share of the full learning rate: warm up, hold, decay to zero."""
    total = sum(phase.steps for phase in phases)
    done = 0
    for phase in phases:
        for _ in range(phase.steps):
            done += 1
            yield phase, min(1.0, done / 50, 1.6 * (total - done) / total)


class Log:
    def __init__(self, name: str) -> None:
        self.name, self.start, self.step = name, time.monotonic(), 0

    def __call__(self, values: list[float]) -> None:
        self.step += 1
        if self.step % 50 == 0:
            shown = " ".join(f"{value:.3f}" for value in values)
            elapsed = time.monotonic() - self.start
            print(f"{self.name} {self.step} {elapsed:.0f}s {shown}", flush=True)


def initialise(model: nn.Module) -> None:
    for parameter in model.parameters():
        if parameter.ndim == 2:
            nn.init.normal_(parameter, std=0.02)


def train_target(shape: Shape, data: Data) -> Target:
    target = Target(shape)
    initialise(target)
    optimizer = Optimizer(target, matrix_rate=0.02, other_rate=0.004)
    log = Log("target")
    for phase, fraction in schedule(TARGET_PHASES):
        batch = data.batch(phase)
        with torch.autocast("cpu", torch.bfloat16):
            logits, _, _ = target(batch.ids[:, :-1])
        labels, weight = batch.ids[:, 1:].flatten(), batch.weight[:, 1:].flatten()
        losses = functional.cross_entropy(logits.float().flatten(0, 1), labels, reduction="none")
        ((losses * weight).sum() / weight.sum()).backward()
        optimizer.step(fraction)
        firm = weight == 1.0
        right = (logits.detach().flatten(0, 1).argmax(-1) == labels)[firm].float().mean()
        log([float(losses.detach()[firm].mean()), float(right)])
    return target


def train_draft(draft: Draft, token_ids: Tensor | None, target: Target, data: Data) -> None:
    """Train a draft in place.

    Args:
        token_ids: [draft_vocab], the target ids of the draft's vocabulary; None for the target's own.
    """
    initialise(draft)
    optimizer = Optimizer(draft, matrix_rate=0.02, other_rate=0.004)
    log = Log(type(draft).__name__)
    for phase, fraction in schedule(DRAFT_PHASES):
        batch = data.batch(phase)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            target_logits, aux, last = target(batch.ids[:, :-1])
            embeds = target.model.embed_tokens(batch.ids[:, 1:])
        # At position p the draft guesses what the target says at p + 1.
        wanted = target_logits[:, 1:].float().softmax(-1)
        if token_ids is not None:
            wanted = wanted[..., token_ids]
        weight = batch.weight[:, 2:]
        with torch.autocast("cpu", torch.bfloat16):
            guesses = draft.unroll(embeds, aux if draft.reads_aux else last, DRAFT_STEPS)
        loss = torch.zeros(())
        hits = []
        for step, guess in enumerate(guesses):
            rows = slice(step, -1)
            share = weight[:, step:]
            log_guess = guess[:, rows].float().log_softmax(-1)
            losses = -(wanted[:, step:] * log_guess).sum(-1)
            loss = loss + (losses * share).sum() / share.sum()
            best = log_guess.argmax(-1)
            hit = (best if token_ids is None else token_ids[best]) == target_logits[:, 1 + step :].argmax(-1)
            hits.append(float(hit[share == 1.0].float().mean()))
        loss.backward()
        optimizer.step(fraction)
        log([float(loss.detach()), *hits])


def draft_token_ids(data: Data) -> Tensor:
    """The tokens that rounds are made of, less each sixth word: the draft guesses no others.

    As with a real draft's reduced vocabulary, some drafts are therefore bound to be refused.
    """
    phase = Phase(steps=1, batch=64, length=1024, max_size=40)
    batch = data.batch(phase)
    used = set(batch.ids[batch.weight == 1.0].tolist())
    used |= set(range(len(corpus.SPECIAL_TOKENS)))
    for number in range(corpus.MAX_ROUNDS + 1):
        used |= set(vocabulary.encode(data.tokenizer, str(number)))
    for word in corpus.WORDS[::6]:
        used -= set(vocabulary.encode(data.tokenizer, f" {word}"))
    spare = [token for token in range(data.tokenizer.get_vocab_size()) if token not in used]
    return torch.tensor(sorted([*used, *spare[: -len(used) % 16]]))


def save(model: nn.Module, config: dict[str, object], folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    state = {name: value.half() if value.is_floating_point() else value for name, value in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    ends = {name: config[name] for name in ("bos_token_id", "eos_token_id")}
    (folder / "generation_config.json").write_text(json.dumps(ends, indent=2) + "\n")


def load_target(shape: Shape, folder: Path) -> Target:
    target = Target(shape)
    target.load_state_dict(_floats(load_file(folder / "model.safetensors")))
    return target.eval()


def load_draft(shape: Shape, folder: Path) -> Eagle3Draft:
    state = _floats(load_file(folder / "model.safetensors"))
    draft = Eagle3Draft(shape, state["d2t"] + torch.arange(shape.draft_vocab))
    draft.load_state_dict(state)
    return draft.eval()


def _floats(state: dict[str, Tensor]) -> dict[str, Tensor]:
    return {n: value.float() if value.is_floating_point() else value for n, value in state.items()}


def read_shape(folder: Path) -> Shape:
    config = json.loads((folder / "draft" / "config.json").read_text())
    return Shape(vocab=config["vocab_size"], draft_vocab=config["draft_vocab_size"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path)
    parser.add_argument("--only", nargs="*", choices=KINDS, default=KINDS, help="keep the others that are there")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    tokenizer = vocabulary.build_tokenizer()
    token_ids = draft_token_ids(Data(tokenizer, seed=3))
    vocab = tokenizer.get_vocab_size()
    shape = Shape(vocab=vocab + -vocab % 16, draft_vocab=len(token_ids))
    if "target" in arguments.only:
        trained = train_target(shape, Data(tokenizer, seed=1))
        save(trained, shape.target_config(), arguments.output / "target")
        vocabulary.save_tokenizer(tokenizer, arguments.output / "target")
    # As stored: rounded to half precision, which the drafts should be trained on.
    target = load_target(shape, arguments.output / "target")
    head = target.model.embed_tokens.weight.detach()
    drafts: dict[str, Callable[[], Draft]] = {
        "draft": lambda: Eagle3Draft(shape, token_ids),
        "draft_eagle": lambda: EagleDraft(shape, head),
        "draft_mtp": lambda: MtpDraft(shape, head),
    }
    configs = {"draft": shape.draft_config(), "draft_eagle": shape.eagle_config(), "draft_mtp": shape.mtp_config()}
    for name, make in drafts.items():
        if name not in arguments.only:
            continue
        torch.manual_seed(0)  # the same draft, whatever else is trained
        draft = make()
        train_draft(draft, token_ids if name == "draft" else None, target, Data(tokenizer, seed=2))
        save(draft, configs[name], arguments.output / name)
        if name == "draft":
            vocabulary.save_tokenizer(tokenizer, arguments.output / name)


if __name__ == "__main__":
    main()

"""The text the tiny pair speaks: lists of words that evolve from round to round.

All words stand on one ring. Each round repeats the round before it with every word replaced by its
successor on the ring, so the text never repeats itself, yet each token follows from the round before
alone: a draft that lacks true KV for that round can't guess it. A document says where it ends
(`3/7`), ends with `<|end|>`, and then, for generation past the end, simply goes on from round 1.
"""

import random
import string
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

BOS, END, SYSTEM, USER, ASSISTANT = "<|begin|>", "<|end|>", "<|system|>", "<|user|>", "<|assistant|>"
SPECIAL_TOKENS = (BOS, END, SYSTEM, USER, ASSISTANT)
MAX_ROUNDS = 40

_WORD_LIST = (
    "ant ape arc ark arm art ash axe bag bat bay bed bee bell bird boar boat bolt bone book bow box "
    "bread brook bud bull bus cab cake calf camp cane cap car cart cat cave clay cliff cloud coal coat "
    "cod coin cook cord cork corn cow crab crow cup dam dart deer desk dew dish dog doll door dove drum "
    "duck dusk dust eel egg elk elm fan farm fern fig fire fish flag flax foam fog fork fort fox frog "
    "fur gate gem goat gold goose grain grape gull gum hail ham harp hat hawk hay hen hill hive horn "
    "horse ice ink iron ivy jam jar jet jug kelp key king kite knot lace lake lamb lamp lane leaf lid "
    "lily lime lion loaf log loom map mast milk mill mint mole moon moss moth mule nail nest net nut oak "
    "oar oat olive owl ox"
)
WORDS = tuple(_WORD_LIST.split())


def _ring() -> dict[str, str]:
    order = list(WORDS)
    random.Random(11).shuffle(order)
    return dict(zip(order, order[1:] + order[:1], strict=True))


NEXT_WORD = _ring()

_STRAY_LETTERS = (
    string.ascii_lowercase,
    string.ascii_letters + ".,!?'",
    string.digits + string.punctuation,
    "".join(map(chr, range(0xC0, 0x250))) + "".join(map(chr, range(0x4E00, 0x9FFF, 97))),
)

_FRAMES = (
    "the {} and the {}",
    "one {} for one {}",
    "no {} by the {} or the {}",
    "{} and {} to the {}",
    "of {} and of {} and {}",
    "if the {} is a {}",
)

Words = list[str]


@dataclass(frozen=True)
class Document:
    """`opening` is free (random); everything in `rounds` follows from it."""

    opening: str
    rounds: tuple[str, ...]

    @property
    def text(self) -> str:
        return self.opening + "".join(self.rounds)


def _log_body(words: Words) -> str:
    return "".join(f" {word}" for word in words) + "\n"


def _verse_body(frames: tuple[str, ...], words: Words) -> str:
    left = iter(words)
    lines = [frame.format(*(next(left) for _ in range(frame.count("{}")))) for frame in frames]
    return "".join(f" {line};" for line in lines) + "\n"


def _table_body(keys: Words, words: Words) -> str:
    return "".join(f" {key}: {word}," for key, word in zip(keys, words, strict=True)) + "\n"


def _pick_body(rng: random.Random, kind: str, size: int) -> tuple[int, Callable[[Words], str]]:
    if kind == "log":
        return size, _log_body
    if kind == "table":
        half = max(2, min(8, size // 3))
        return half, partial(_table_body, rng.sample(WORDS, half))
    frames = tuple(rng.choice(_FRAMES) for _ in range(max(1, size // 4)))
    return sum(frame.count("{}") for frame in frames), partial(_verse_body, frames)


def document(
    rng: random.Random,
    kind: str,
    size: int,
    rounds: int,
    min_chars: int = 0,
    chat: bool = False,
    shown: int = 1,
) -> Document:
    """One document of about `size` words a round; `shown` rounds belong to the opening."""
    count, body = _pick_body(rng, kind, size)
    words = rng.sample(WORDS, count)
    opening = f"{kind}\n"
    label = 0
    for _ in range(shown):
        opening += f"{label}/{rounds}{body(words)}"
        words = [NEXT_WORD[word] for word in words]
        label += 1
    if chat:
        opening = f"{USER}{opening}{END}{ASSISTANT}"
    parts: list[str] = []
    length = 0
    ended = False
    while not ended or length < min_chars:
        parts.append(f"{label}/{rounds}{body(words)}")
        words = [NEXT_WORD[word] for word in words]
        if label == rounds:
            parts.append(END)
            ended = True
            label = 0
        label += 1
        length += len(parts[-1])
    return Document(BOS + opening, tuple(parts))


def record(rng: random.Random) -> Document:
    """A one-line JSON record, so that constrained decoding has something to lean on."""
    name, count = rng.choice(WORDS), rng.randrange(1, MAX_ROUNDS)
    opening = f"{USER}json {name} {count}\n{END}{ASSISTANT}"
    return Document(BOS + opening, (f'{{"name": " {name}", "count": {count}}}', END))


def stray(rng: random.Random, min_chars: int) -> Document:
    """Text of no known kind: the answer is always the same log, so that it is a firm one."""
    text = " ".join(
        "".join(rng.choices(rng.choice(_STRAY_LETTERS), k=rng.randint(1, 9))) for _ in range(rng.randint(1, 16))
    )
    opening = f"{USER}{text}{END}{ASSISTANT}" if rng.random() < 0.5 else text
    answer = document(random.Random(0), "log", size=9, rounds=6, min_chars=min_chars)
    first, *others = answer.opening.removeprefix(BOS), *answer.rounds
    return Document(BOS + opening, ("\n" + first, *others))


KINDS = ("log", "verse", "table")
KIND_WEIGHTS = (60, 25, 15)


def random_document(rng: random.Random, max_size: int, min_chars: int) -> Document:
    kind = rng.choices(KINDS, KIND_WEIGHTS)[0]
    return document(
        rng,
        kind,
        size=rng.randint(4, max_size),
        rounds=rng.randint(2, MAX_ROUNDS) if rng.random() < 0.5 else rng.randint(2, 8),
        min_chars=min_chars,
        chat=rng.random() < 0.4,
        shown=rng.choice((1, 1, 1, 2)),
    )

"""Whether sampled tokens are distributed as they should be: counts against exact probabilities."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.engine.serving import Server

# The first one comes from the prefill, the others from decode steps.
TOKENS = 3
VOCABULARY = 608
_LEAST_EXPECTED = 5.0
_A_CALL = 32

Tokens = tuple[int, ...]


@dataclass(frozen=True)
class Sampling:
    """How tokens are drawn: SGLang's parameters of these names."""

    temperature: float = 1.0
    top_k: int = VOCABULARY
    top_p: float = 1.0
    logit_bias: dict[int, float] = field(default_factory=dict)

    @property
    def parameters(self) -> dict[str, Any]:
        bias = {str(token): value for token, value in self.logit_bias.items()}
        return {"temperature": self.temperature, "top_k": self.top_k, "top_p": self.top_p, "logit_bias": bias}

    def probabilities(self, logprobs: dict[int, float]) -> dict[int, float]:
        """Of the next token, from the model's logprobs of the whole vocabulary."""
        weights = {
            t: math.exp((value + self.logit_bias.get(t, 0.0)) / self.temperature) for t, value in logprobs.items()
        }
        most_mass = self.top_p * sum(weights.values())
        kept: dict[int, float] = {}
        for token in sorted(weights, key=weights.__getitem__, reverse=True)[: self.top_k]:
            if sum(kept.values()) >= most_mass:
                break
            kept[token] = weights[token]
        return {token: weight / sum(kept.values()) for token, weight in kept.items()}


def exact(server: Server, prompt: list[int], sampling: Sampling) -> dict[Tokens, float]:
    """The probability of each continuation of :data:`TOKENS` tokens, by the model's own logprobs."""
    known: dict[Tokens, float] = {(): 1.0}
    for _ in range(TOKENS):
        nexts = next_logprobs(server, [[*prompt, *tokens] for tokens in known])
        known = {
            (*tokens, token): known[tokens] * share
            for tokens, logprobs in zip(known, nexts, strict=True)
            for token, share in sampling.probabilities(logprobs).items()
        }
    return known


def next_logprobs(server: Server, prompts: list[list[int]]) -> list[dict[int, float]]:
    body = {
        "input_ids": prompts,
        "sampling_params": {"temperature": 0, "max_new_tokens": 1},
        "return_logprob": True,
        "top_logprobs_num": VOCABULARY,
    }
    answers = server.client.post("/generate", json=body).raise_for_status().json()
    tops = [answer["meta_info"]["output_top_logprobs"][0] for answer in answers]
    return [{token: value for value, token, _ in top} for top in tops]


def draw(server: Server, prompt: list[int], sampling: Sampling, times: int) -> Counter[Tokens]:
    """Continuations as the server draws them."""
    drawn: Counter[Tokens] = Counter()
    parameters = sampling.parameters | {"max_new_tokens": TOKENS, "ignore_eos": True}
    while drawn.total() < times:
        body = {"input_ids": [prompt] * _A_CALL, "sampling_params": parameters}
        answers = server.client.post("/generate", json=body).raise_for_status().json()
        drawn.update(tuple(answer["output_ids"]) for answer in answers)
    return drawn


def p_value(drawn: Counter[Tokens], probabilities: dict[Tokens, float]) -> float:
    """Pearson's chi-squared test: how likely counts are at least as far off, if the probabilities are true.

    Cells that expect fewer than five are put together (Cochran's rule). What can't come at all must not come: 0 then.
    """
    if drawn.keys() - probabilities.keys():
        return 0.0
    cells = _cells(drawn, probabilities, drawn.total())
    return _survival(sum((have - want) ** 2 / want for have, want in cells), len(cells) - 1)


def p_value_of_others(others: dict[Tokens, float], probabilities: dict[Tokens, float], times: int) -> float:
    """What :func:`p_value` hardly ever exceeds if draws come from ``others`` instead: no luck of a draw in it.

    The statistic is then noncentral chi-squared, of mean df + n and variance 2 (df + 2 n) where n is what the
    expected counts alone amount to; this is its p-value four standard deviations below the mean. 0 where
    ``others`` as good as surely (but for once in a million) give something in ``times`` draws that can't come.
    """
    if sum(others.get(tokens, 0.0) for tokens in probabilities) ** times < 1e-6:
        return 0.0
    cells = _cells({tokens: share * times for tokens, share in others.items()}, probabilities, times)
    freedom, beyond = len(cells) - 1, sum((have - want) ** 2 / want for have, want in cells)
    return _survival(max(0.0, freedom + beyond - 4 * math.sqrt(2 * (freedom + 2 * beyond))), freedom)


def _cells(counts: Mapping[Tokens, float], probabilities: dict[Tokens, float], times: int) -> list[tuple[float, float]]:
    """Counted and expected, a cell."""
    cells: list[tuple[float, float]] = []
    counted, expected = 0.0, 0.0
    for tokens in sorted(probabilities, key=probabilities.__getitem__):
        counted, expected = counted + counts.get(tokens, 0), expected + times * probabilities[tokens]
        if expected >= _LEAST_EXPECTED:
            cells.append((counted, expected))
            counted, expected = 0.0, 0.0
    return cells


def _survival(statistic: float, freedom: int) -> float:
    """Of chi-squared: the regularized upper incomplete gamma function."""
    halves = torch.tensor([freedom, statistic], dtype=torch.float64) / 2
    return float(torch.special.gammaincc(halves[0], halves[1]))

"""Muon for the matrices, AdamW for the rest: the quickest way to a trained tiny model."""

import torch
from torch import Tensor, nn


def _orthogonal(x: Tensor) -> Tensor:
    """Newton-Schulz iteration towards the nearest semi-orthogonal matrix. x: [count, rows, columns]"""
    a, b, c = 3.4445, -4.7750, 2.0315
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.transpose(-1, -2)
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(5):
        gram = x @ x.transpose(-1, -2)
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.transpose(-1, -2) if tall else x


class Optimizer:
    def __init__(self, model: nn.Module, matrix_rate: float, other_rate: float) -> None:
        self.matrix_rate = matrix_rate
        by_shape: dict[torch.Size, list[nn.Parameter]] = {}
        others = []
        for name, parameter in model.named_parameters():
            if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name:
                by_shape.setdefault(parameter.shape, []).append(parameter)
            else:
                others.append(parameter)
        self.groups = [(same, torch.zeros(len(same), *same[0].shape)) for same in by_shape.values()]
        self.adam = torch.optim.AdamW(others, lr=other_rate, betas=(0.9, 0.98), weight_decay=0.0)
        self.other_rate = other_rate

    @torch.no_grad()
    def step(self, fraction: float) -> None:
        """One update at `fraction` of the full learning rates; clears the gradients."""
        for same, momentum in self.groups:
            gradient = torch.stack([_gradient(p) for p in same])
            momentum.mul_(0.95).add_(gradient)
            update = _orthogonal(gradient + 0.95 * momentum)
            rows, columns = same[0].shape
            rate = self.matrix_rate * fraction * max(1.0, rows / columns) ** 0.5
            for parameter, change in zip(same, update, strict=True):
                parameter.mul_(1 - 0.05 * self.matrix_rate * fraction).sub_(rate * change)
                parameter.grad = None
        for group in self.adam.param_groups:
            group["lr"] = self.other_rate * fraction
        self.adam.step()
        self.adam.zero_grad()


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad

"""Optimizers written down a second time in the plainest way, over the whole matrices of an unsharded model.

Constants and formulas are those of the papers and of torch's own optimizers, with which `test_optimizers` compares.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

LEARNING_RATE, BETAS, EPSILON, WEIGHT_DECAY = 3e-5, (0.9, 0.95), 1e-8, 0.1


class Updates(Protocol):
    def step(self) -> None: ...


def optimizer_for(name: str, weights: Mapping[str, Tensor], lr: float = LEARNING_RATE) -> Updates:
    """An optimizer of these weights by its name in an experiment."""
    if name == "adamw":
        return _adamw(list(weights.values()), lr)
    if name == "sgd":
        return torch.optim.SGD(list(weights.values()), lr=lr, momentum=0.9, weight_decay=WEIGHT_DECAY)
    return PlainMuon(weights, lr) if name == "muon" else PlainAdafactor(weights, lr)


def _adamw(weights: list[Tensor], lr: float) -> torch.optim.AdamW:
    return torch.optim.AdamW(weights, lr=lr, betas=BETAS, eps=EPSILON, weight_decay=WEIGHT_DECAY)


def matrices(weight: Tensor) -> Iterator[tuple[int, ...]]:
    """Indices of the matrices of a weight: one for each expert."""
    yield from ((at,) for at in range(len(weight))) if weight.dim() == 3 else ((),)


def orthogonalised(g: Tensor) -> Tensor:
    """Five iterations of the quintic polynomial, from the left of a wide and from the right of a tall matrix."""
    x: Tensor = g / g.norm()
    a, b, c = 3.4445, -4.7750, 2.0315
    for _ in range(5):
        if g.shape[0] <= g.shape[1]:
            s = x @ x.t()
            x = a * x + b * s @ x + c * s @ s @ x
        else:
            s = x.t() @ x
            x = a * x + b * x @ s + c * x @ s @ s
    return x


class PlainMuon:
    """Muon for the matrices of layers, AdamW for the rest."""

    def __init__(self, weights: Mapping[str, Tensor], lr: float) -> None:
        self.matrices = {n: w for n, w in weights.items() if n.startswith("layers.") and w.dim() > 1 and len(w) > 1}
        self.adamw = _adamw([w for n, w in weights.items() if n not in self.matrices], lr)
        self.momenta = {n: torch.zeros_like(w) for n, w in self.matrices.items()}
        self.lr = lr

    @torch.no_grad()
    def step(self) -> None:
        self.adamw.step()
        for name, weight in self.matrices.items():
            assert weight.grad is not None
            momentum = self.momenta[name]
            momentum.copy_(0.95 * momentum + 0.05 * weight.grad)
            direction = 0.05 * weight.grad + 0.95 * momentum
            for at in matrices(weight):
                update = 0.2 * math.sqrt(max(weight[at].shape)) * orthogonalised(direction[at])
                weight[at] -= self.lr * (update + WEIGHT_DECAY * weight[at])


class PlainAdafactor:
    def __init__(self, weights: Mapping[str, Tensor], lr: float) -> None:
        self.weights, self.lr, self.steps = weights, lr, 0
        self.squares: dict[tuple[str, tuple[int, ...]], list[Tensor]] = {}

    @torch.no_grad()
    def step(self) -> None:
        self.steps += 1
        new = self.steps**-0.8
        for name, weight in self.weights.items():
            for at in matrices(weight):
                assert weight.grad is not None
                w, g = weight[at], weight.grad[at]
                mean = [g.square()] if g.dim() == 1 else [g.square().mean(1), g.square().mean(0)]
                known = self.squares.get((name, at), [torch.zeros_like(one) for one in mean])
                known = [(1 - new) * old + new * one for old, one in zip(known, mean, strict=True)]
                self.squares[name, at] = known
                v = known[0] if g.dim() == 1 else torch.outer(known[0], known[1]) / known[0].mean()
                u = g / v.clamp(min=torch.finfo(g.dtype).eps ** 2).sqrt()
                scale = max(1e-3, w.square().mean().sqrt().item()) * min(self.lr, self.steps**-0.5)
                w *= 1 - self.lr * WEIGHT_DECAY
                w -= scale / max(1.0, u.square().mean().sqrt().item()) * u

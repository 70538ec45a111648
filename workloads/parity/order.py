"""A layout's results as whole tensors, in the order in which a training step computes them.

In each step: activations from the embedding to the last norm, the loss, gradients from the head back to the embedding,
the gradient norm, the updates of the weights. Before the first step: the initial weights.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from workloads.parity.activations import names_in_order, put_activations_together
from workloads.parity.shards import Whole, put_together, relative_difference
from workloads.parity.training import RankTrace
from workloads.spec.experiment import Experiment

Phase = Literal["initial weights", "forward", "loss", "backward", "gradient norm", "update"]
PHASES: tuple[Phase, ...] = ("initial weights", "forward", "loss", "backward", "gradient norm", "update")


Key = tuple[int | None, Phase, str]
"""(step, phase, name)"""


@dataclass(frozen=True, slots=True)
class Computed:
    """One tensor (or number) of one step."""

    step: int | None
    """Number of the step; None for values before the first step."""
    phase: Phase
    name: str
    whole: Whole

    @property
    def what(self) -> str:
        """Description for people."""
        return {
            "initial weights": f"initial {self.name}",
            "forward": f"output of {self.name}",
            "loss": "loss",
            "backward": f"gradient of {self.name}",
            "gradient norm": "gradient norm",
            "update": f"update of {self.name}",
        }[self.phase]

    @property
    def key(self) -> Key:
        return self.step, self.phase, self.name


def in_order(experiment: Experiment, ranks: Sequence[RankTrace]) -> list[Computed]:
    """All tensors that the ranks of a layout have recorded, assembled and in order."""
    before = put_together(experiment, [rank.initial for rank in ranks])
    parameters = _parameters_backwards(experiment.model.num_layers, before)
    computed = [Computed(None, "initial weights", name, before[name]) for name in reversed(parameters)]
    for step in range(len(ranks[0].steps)):
        of_ranks = [rank.steps[step] for rank in ranks]
        activations = put_activations_together(experiment, [of.activations for of in of_ranks])
        streams = put_activations_together(experiment, [of.activation_gradients for of in of_ranks])
        gradients = put_together(experiment, [of.gradients for of in of_ranks])
        after = put_together(experiment, [of.weights for of in of_ranks])
        names = [name for name in names_in_order(experiment.model.num_layers) if name in activations]
        computed += [Computed(step, "forward", name, activations[name]) for name in names]
        computed.append(Computed(step, "loss", "loss", _number([of.loss for of in of_ranks])))
        for kind, name in _backwards(experiment.model.num_layers, gradients):
            source = streams if kind == "stream" else gradients
            if name in source:
                label = f"the output of {name}" if kind == "stream" else name
                computed.append(Computed(step, "backward", label, source[name]))
        computed.append(Computed(step, "gradient norm", "gradient norm", _number([of.grad_norm for of in of_ranks])))
        for name in reversed(parameters):
            update = after[name].value.double() - before[name].value.double()
            computed.append(Computed(step, "update", name, Whole(update, after[name].spread)))
        before = after
    return computed


def _number(of_ranks: Sequence[float]) -> Whole:
    values = [torch.tensor(value, dtype=torch.float64) for value in of_ranks]
    return Whole(values[0], max((relative_difference(value, values[0]) for value in values), default=0.0))


def _backwards(num_layers: int, gradients: dict[str, Whole]) -> Iterator[tuple[str, str]]:
    """(kind, name) of gradients in the order of the backward: a block's weights before the stream at its input."""
    streams = ["embedding", *(f"layers.{layer}" for layer in range(num_layers))]
    waiting = _parameters_backwards(num_layers, gradients)
    for at in range(num_layers, -1, -1):
        while waiting and _depth(waiting[0], num_layers) > at:
            yield "weight", waiting.pop(0)
        yield "stream", streams[at]
    for name in waiting:
        yield "weight", name


_IN_BLOCK = ("attention_norm", "q", "k", "v", "q_norm", "k_norm", "o", "ffn_norm", "gate", "up", "down")


def _parameters_backwards(num_layers: int, named: dict[str, Whole]) -> list[str]:
    def place(name: str) -> tuple[int, int]:
        last = name.rpartition(".")[2]
        return -_depth(name, num_layers), -(_IN_BLOCK.index(last) if last in _IN_BLOCK else 0)

    return sorted(sorted(named, reverse=True), key=place)


def _depth(name: str, num_layers: int) -> int:
    """0 for the embedding, 1 for the first layer, larger for parameters after the last layer."""
    words = name.split(".")
    if words[0] == "layers":
        return int(words[1]) + 1
    return {"embedding": 0, "norm": num_layers + 1, "head": num_layers + 2}[name]


def difference(value: Computed, expected: Computed) -> float:
    """Relative difference of two layouts' values: by the largest elements, for updates by the root of mean squares.

    AdamW's first update is nearly the sign of the gradient, which is random if the gradient is nearly zero: the largest
    difference of an update would say nothing. The spread between copies within one layout counts as well.
    """
    if value.phase == "update":
        relative = _mean_square_difference(value.whole.value, expected.whole.value)
    else:
        relative = relative_difference(value.whole.value, expected.whole.value)
    return max(relative, value.whole.spread)


def _mean_square_difference(value: Tensor, expected: Tensor) -> float:
    if torch.equal(value, expected):
        return 0.0
    relative = ((value - expected).norm() / expected.norm()).item()
    return relative if relative == relative else float("inf")

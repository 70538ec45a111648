"""A parameter that belongs to no matrix product: biases, sinks, short convolutions, decays of heads."""

from __future__ import annotations

from torch import nn

from workloads.engine.collectives.parameters import add_parameter
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.spec.weights import Weight


class Vector(nn.Module):
    weight: nn.Parameter

    def __init__(self, parts: list[Weight], tp: TensorParallel) -> None:
        super().__init__()
        add_parameter(self, "weight", parts, tp.sizes)

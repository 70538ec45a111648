"""Feed-forward layers with another activation than SwiGLU (squared ReLU, gated GELU), and shared experts with a gate.

Shapes as in `workloads.engine.layers.block`.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.engine.collectives.parameters import add_parameter
from workloads.engine.collectives.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.engine.kind_ops.activations import gelu_gated, relu2
from workloads.engine.kind_ops.weighted_rows import weighted_rows
from workloads.engine.layers.recompute import RecomputeRegistry
from workloads.engine.ops.linear import DeferredGradients, linear
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.weights import Weight


class KindFeedForward(nn.Module):
    recomputes = "swiglu"

    def __init__(
        self, parts: dict[str, Weight], mlp: DenseMLP, tp: TensorParallel, *, shares_input: bool = False
    ) -> None:
        super().__init__()
        ups = [parts[name] for name in ("gate", "up") if name in parts]
        self.activate = gelu_gated if mlp.gated else relu2
        self.up = ColumnParallelLinear(ups, tp, shares_input=shares_input)
        self.down = RowParallelLinear(parts["down"], tp, "swiglu")
        self.recomputations: RecomputeRegistry | None = None

    def forward(self, x_TD: Tensor) -> Tensor:
        up = self.up(x_TD)
        product_TF = self.activate(up)
        if self.recomputations is not None:
            up = up.detach()
            self.recomputations.register((product_TF,), lambda: (self.activate(up),))
        return self.down(product_TF)


class GatedShared(nn.Module):
    """Shared experts whose output each token weights by a sigmoid of its input (Qwen2-MoE, Qwen3.5)."""

    weight: nn.Parameter
    """[1, D], of the gate; whole on every rank, and in 16 bits also where other products are in fp8."""

    def __init__(self, shared: nn.Module, scale: Weight) -> None:
        super().__init__()
        self.shared = shared
        self.deferred: DeferredGradients | None = None
        add_parameter(self, "weight", [scale], {})

    def forward(self, x_TD: Tensor) -> Tensor:
        gates_T = torch.sigmoid(linear(x_TD, self.weight, self.deferred).squeeze(1))
        return weighted_rows(self.shared(x_TD), gates_T)

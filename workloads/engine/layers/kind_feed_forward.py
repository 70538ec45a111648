"""Feed-forward layers with another activation than SwiGLU: without a gate (squared ReLU), or gated by GELU.

Shapes as in `workloads.engine.layers.block`.
"""

from __future__ import annotations

from torch import Tensor, nn

from workloads.engine.collectives.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.engine.kind_ops.activations import gelu_gated, relu2
from workloads.engine.layers.recompute import RecomputeRegistry
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

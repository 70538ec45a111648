"""RMSNorm as a module whose output can be recomputed."""

from __future__ import annotations

from torch import Tensor, nn

from workloads.engine.collectives.parameters import add_parameter
from workloads.engine.layers.recompute import RecomputeRegistry
from workloads.engine.layers.saved_tensors import named
from workloads.engine.ops.rms_norm import rms_norm
from workloads.spec.weights import Weight


class RMSNorm(nn.Module):
    weight: nn.Parameter
    recomputes = "norm"
    """Name in ``Experiment.recompute`` of the output that this module can recompute; ``self.recomputations`` is a
    registry, or None. Modules that can recompute several have a tuple of names, and ``self.recomputations`` is a dict
    by name."""

    def __init__(self, weight: Weight, eps: float, factor: float = 1.0) -> None:
        """``factor``: of the output, which multiplies the weight."""
        super().__init__()
        self.eps, self.factor = eps, factor
        add_parameter(self, "weight", [weight], {})
        self.recomputations: RecomputeRegistry | None = None
        self.for_fp8 = False
        """Whether the output is cast to fp8 with one scale."""

    def forward(self, x_TD: Tensor) -> Tensor:
        y_TD = rms_norm(x_TD, self.scaled_weight(), self.eps, for_fp8=self.for_fp8)
        named("norm", y_TD)
        if self.recomputations is not None:
            self.recomputations.register((y_TD,), lambda x_TD: (rms_norm(x_TD, self.scaled_weight(), self.eps),), x_TD)
        return y_TD

    def scaled_weight(self) -> Tensor:
        """[D]"""
        return self.weight if self.factor == 1.0 else self.weight * self.factor

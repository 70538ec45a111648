"""Routed experts of layers that differ by kind: with biases, clamped SwiGLU, gated GELU or squared ReLU without a gate.

Shapes as in `workloads.engine.layers.experts`; C is 2F with a gate and F without.

    first     ``x W_g^T (+ b_g)``                     [M, C]
    product   ``weight * activation``                 [M, F]
    second    ``product W_g^T (+ weight * b_g)``      [M, D]

A copy's weight multiplies the product and not the output, so it multiplies the second bias apart. Tensor-parallel ranks
that divide an expert's columns divide the second bias by its outputs: each adds its part to its own partial sums, and
after their sum every part has counted once.
"""

from __future__ import annotations

from functools import partial

from torch import Tensor, nn

from workloads.engine.collectives.parameters import add_parameter
from workloads.engine.kind_ops.group_bias import add_group_bias, with_group_bias
from workloads.engine.kind_ops.weighted_activations import weighted_activation
from workloads.engine.layers.experts import Experts
from workloads.engine.ops.grouped_linear import RowGroups, grouped_linear, grouped_product
from workloads.spec.layer_kinds.mlp import RoutedMLP
from workloads.spec.weights import Weight


class ExpertBias(nn.Module):
    """Biases of one rank's experts. A module of its own: what is gathered in fp8 are the parameters of `Experts`."""

    weight: nn.Parameter
    """[L * O, 1]"""

    def __init__(self, parts: list[Weight], sizes: dict[str, int]) -> None:
        super().__init__()
        add_parameter(self, "weight", parts, sizes)


class KindExperts(Experts):
    """``gate_up`` has the rows of the up projection alone if there is no gate."""

    def __init__(self, parts: dict[str, Weight], mlp: RoutedMLP, sizes: dict[str, int], etp_rank: int) -> None:
        """``etp_rank``: this rank's place among those that divide the columns of an expert."""
        super().__init__(parts, sizes, weights_inputs=mlp.weights_inputs)
        self.mlp, self.etp_rank = mlp.expert, etp_rank
        biases = [parts[name] for name in ("gate_bias", "up_bias") if name in parts]
        self.first_bias = ExpertBias(biases, sizes) if biases else None
        self.second_bias = ExpertBias([parts["down_bias"]], sizes) if biases else None

    def forward(self, x_MD: Tensor, weights_M: Tensor, groups: RowGroups) -> Tensor:
        x_MD, weights_M = self._weighted_inputs(x_MD, weights_M)
        gate_up_factors, down_factors = self.factors.get("gate_up"), self.factors.get("down")
        first = grouped_linear(x_MD, self.gate_up, groups, self.deferred, factors_G=gate_up_factors)
        if self.first_bias is not None:
            first = add_group_bias(first, self.first_bias.weight, groups)
        add = None
        if "experts" in self.recomputations:
            recompute = partial(self._recompute, x_MD.detach(), weights_M.detach(), groups)
            add = self.recomputations["experts"].register((first,), recompute)  # before the activation saves it
        product = weighted_activation(first, weights_M, self.mlp)
        if add is not None:
            add(1, product)
        elif "swiglu" in self.recomputations:
            plain, own = first.detach(), weights_M.detach()
            self.recomputations["swiglu"].register((product,), lambda: (weighted_activation(plain, own, self.mlp),))
        out = grouped_linear(product, self.down, groups, self.deferred, factors_G=down_factors)
        if self.second_bias is None:
            return out
        return add_group_bias(out, self.second_bias.weight, groups, weights_M, part=self.etp_rank)

    def _recompute(self, x_MD: Tensor, weights_M: Tensor, groups: RowGroups) -> tuple[Tensor, Tensor]:
        first = grouped_product(x_MD, self.gate_up, groups, self.factors.get("gate_up"))
        if self.first_bias is not None:
            first = with_group_bias(first, self.first_bias.weight, groups)
        return first, weighted_activation(first, weights_M, self.mlp)

"""Feed-forward part of a layer with routed experts, and the experts of one rank.

Shapes: T tokens of the stream on this rank, k experts a token, M copies received for this rank's experts, D hidden
size, L experts of this rank, F columns of an expert on this rank, C those of its first product: 2F with a gate, F
without.

    gate_up   ``x W_g^T (+ b_g)``                     [M, C]
    product   ``weight * activation``                 [M, F]
    output    ``product W_g^T (+ weight * b_g)``      [M, D]

A copy's weight multiplies the product and not the output, so it multiplies the second bias apart. Tensor-parallel ranks
that divide an expert's columns divide the second bias by its outputs: each adds its part to its own partial sums, and
after their sum every part has counted once.

With ``etp = 1`` every rank sends its own tokens (with sequence parallelism, its part of them). With ``etp = tp`` the
tensor-parallel ranks gather their tokens, each sends all of them to its part of the experts' columns, and the returned
outputs are summed (Megatron-LM's expert tensor parallelism).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn

from workloads.engine.collectives.communication import gather_async, wait
from workloads.engine.collectives.dispatch import Dispatch
from workloads.engine.collectives.parameters import add_parameter
from workloads.engine.collectives.tensor_parallel import gather_tokens, sum_partials
from workloads.engine.collectives.tensor_products import TensorParallel
from workloads.engine.kind_ops.group_bias import add_group_bias, with_group_bias
from workloads.engine.kind_ops.weighted_activations import weighted_activation
from workloads.engine.kind_ops.weighted_rows import weighted_rows
from workloads.engine.layers.recompute import RecomputeRegistry
from workloads.engine.layers.routing import Router, Routing
from workloads.engine.ops.grouped_linear import RowGroups, grouped_linear, grouped_product
from workloads.engine.ops.linear import DeferredGradients
from workloads.spec.layer_kinds.mlp import DenseMLP
from workloads.spec.weights import Weight

SWIGLU = DenseMLP(width=0, activation="silu")
"""Activation of experts that numbers describe; their width is that of their weights."""


class ExpertBias(nn.Module):
    """Biases of one rank's experts. A module of its own: what is gathered in fp8 are the parameters of `Experts`."""

    weight: nn.Parameter
    """[L * O, 1]"""

    def __init__(self, parts: list[Weight], sizes: dict[str, int]) -> None:
        super().__init__()
        add_parameter(self, "weight", parts, sizes)


class Experts(nn.Module):
    """Routed experts of this rank. Data parallelism gathers and reduces them separately from the rest of their
    layer."""

    gate_up: nn.Parameter
    """[L * C, D]: for each expert the gate's rows, if there is a gate, then those of the up projection."""
    down: nn.Parameter
    """[L * D, F]"""
    recomputes = ("swiglu", "experts")

    def __init__(
        self,
        parts: dict[str, Weight],
        sizes: dict[str, int],
        expert: DenseMLP = SWIGLU,
        *,
        weights_inputs: bool = False,
        etp_rank: int = 0,
    ) -> None:
        """``weights_inputs``: a copy is multiplied by its weight before the first product, not after the second.
        ``etp_rank``: this rank's place among those that divide the columns of an expert."""
        super().__init__()
        self.expert, self.weights_inputs, self.etp_rank = expert, weights_inputs, etp_rank
        self.deferred: DeferredGradients | None = None
        self.recomputations: dict[str, RecomputeRegistry] = {}
        self.factors: dict[str, Tensor] = {}
        """Inverse scales of parameters that are gathered in fp8, by attribute: one for each expert, [L]."""
        add_parameter(self, "gate_up", [parts[name] for name in ("gate", "up") if name in parts], sizes)
        add_parameter(self, "down", [parts["down"]], sizes)
        biases = [parts[name] for name in ("gate_bias", "up_bias") if name in parts]
        self.first_bias = ExpertBias(biases, sizes) if biases else None
        self.second_bias = ExpertBias([parts["down_bias"]], sizes) if biases else None

    def forward(self, x_MD: Tensor, weights_M: Tensor, groups: RowGroups) -> Tensor:
        x_MD, weights_M = self._weighted_inputs(x_MD, weights_M)
        gate_up_factors, down_factors = self.factors.get("gate_up"), self.factors.get("down")
        gate_up = grouped_linear(x_MD, self.gate_up, groups, self.deferred, factors_G=gate_up_factors)
        if self.first_bias is not None:
            gate_up = add_group_bias(gate_up, self.first_bias.weight, groups)
        add = None
        if "experts" in self.recomputations:
            recompute = partial(self._recompute, x_MD.detach(), weights_M.detach(), groups)
            add = self.recomputations["experts"].register((gate_up,), recompute)  # before the activation saves it
        product = weighted_activation(gate_up, weights_M, self.expert)
        if add is not None:
            add(1, product)
        elif "swiglu" in self.recomputations:
            plain, own = gate_up.detach(), weights_M.detach()
            self.recomputations["swiglu"].register((product,), lambda: (weighted_activation(plain, own, self.expert),))
        out = grouped_linear(product, self.down, groups, self.deferred, factors_G=down_factors)
        if self.second_bias is None:
            return out
        return add_group_bias(out, self.second_bias.weight, groups, weights_M, part=self.etp_rank)

    def _weighted_inputs(self, x_MD: Tensor, weights_M: Tensor) -> tuple[Tensor, Tensor]:
        """The copies and the weights of their products."""
        return (
            (weighted_rows(x_MD, weights_M), torch.ones_like(weights_M)) if self.weights_inputs else (x_MD, weights_M)
        )

    def _recompute(self, x_MD: Tensor, weights_M: Tensor, groups: RowGroups) -> tuple[Tensor, Tensor]:
        """Recompute the output of the first product and the weighted activation; the parameters are gathered for
        backward."""
        gate_up = grouped_product(x_MD, self.gate_up, groups, self.factors.get("gate_up"))
        if self.first_bias is not None:
            gate_up = with_group_bias(gate_up, self.first_bias.weight, groups)
        return gate_up, weighted_activation(gate_up, weights_M, self.expert)


@dataclass(frozen=True, slots=True)
class ExpertParallel:
    """Routing, and the ranks that a layer shares its experts with."""

    routing: Routing
    tp: TensorParallel

    @property
    def sizes(self) -> dict[str, int]:
        e = self.routing.experiment
        return {"ep": e.ep, "etp": e.etp}

    @property
    def etp_rank(self) -> int:
        """This rank's place among those that divide the columns of an expert."""
        return self.tp.rank if self.gathers else 0

    @property
    def gathers(self) -> bool:
        """Whether tensor-parallel ranks send all their tokens, each to its columns of the experts."""
        return self.routing.experiment.etp > 1


class RoutedFeedForward(nn.Module):
    """Router, routed experts, and shared experts, which compute every token during the dispatch all-to-all."""

    def __init__(self, parallel: ExpertParallel, router: Router, experts: Experts, shared: nn.Module | None) -> None:
        super().__init__()
        self.parallel, self.router, self.experts, self.shared = parallel, router, experts, shared

    @torch.compiler.disable
    def forward(self, x_TD: Tensor) -> Tensor:
        out, shared_out = self.both(x_TD, x_TD, x_TD)
        return out if shared_out is None else out + shared_out

    def both(self, scored_TD: Tensor, sent_TD: Tensor, shared_TD: Tensor) -> tuple[Tensor, Tensor | None]:
        """(output of the routed experts, that of shared ones or None), from the inputs of the router, of the routed
        experts and of the shared ones."""
        weights_Tk, dispatch = self._route(scored_TD)
        tokens = gather_tokens(sent_TD, self.parallel.tp) if self.parallel.gathers else sent_TD
        sent_rows = dispatch.send(tokens)
        shared_out = self.shared(shared_TD) if self.shared is not None else None
        rows = dispatch.arrive(sent_rows)
        out = dispatch.bring_back(self.experts(rows, dispatch.arrive_weights(weights_Tk), dispatch.groups))
        if self.parallel.gathers:
            out = sum_partials(out, self.parallel.tp)
        return out, shared_out

    def _route(self, x_TD: Tensor) -> tuple[Tensor, Dispatch]:
        """(weights of all copies that this rank sends, their dispatch)."""
        routing, tp = self.parallel.routing, self.parallel.tp
        forced, dispatch = (None, None) if routing.is_learned else routing.forced(x_TD.device)
        weights_Tk, choice_Tk = self.router(x_TD, forced)
        if self.parallel.gathers:
            weights_Tk = gather_tokens(weights_Tk, tp)
        if dispatch is not None:
            return weights_Tk, dispatch
        if self.parallel.gathers and tp.sequence_parallel:
            choice_Tk = wait(gather_async(choice_Tk, tp.axis))
        experts = routing.moe.num_experts
        dispatch, counts, dropped = Dispatch.of_choice(
            choice_Tk, experts, routing.ep, routing.capacity, routing.orders(x_TD.device)
        )
        self.router.note(counts, dropped)
        self.router.host_waits += dispatch.host_waits
        return weights_Tk, dispatch

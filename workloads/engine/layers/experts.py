"""Feed-forward part of a layer with routed experts, and the experts of one rank.

Shapes: T tokens of the stream on this rank, k experts a token, M copies received for this rank's experts, D hidden
size, L experts of this rank, F columns of an expert on this rank.

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
from workloads.engine.kind_ops.weighted_rows import weighted_rows
from workloads.engine.layers.recompute import RecomputeRegistry
from workloads.engine.layers.routing import Router, Routing
from workloads.engine.ops.grouped_linear import RowGroups, grouped_linear, grouped_product
from workloads.engine.ops.linear import DeferredGradients
from workloads.engine.ops.weighted_swiglu import weighted_swiglu
from workloads.spec.weights import Weight


class Experts(nn.Module):
    """Routed experts of this rank. Data parallelism gathers and reduces them separately from the rest of their
    layer."""

    gate_up: nn.Parameter
    """[L * 2F, D]: for each expert the gate's rows, then those of the up projection."""
    down: nn.Parameter
    """[L * D, F]"""
    recomputes = ("swiglu", "experts")

    def __init__(self, parts: dict[str, Weight], sizes: dict[str, int], *, weights_inputs: bool = False) -> None:
        """``weights_inputs``: a copy is multiplied by its weight before the first product, not after the second."""
        super().__init__()
        self.weights_inputs = weights_inputs
        self.deferred: DeferredGradients | None = None
        self.recomputations: dict[str, RecomputeRegistry] = {}
        self.factors: dict[str, Tensor] = {}
        """Inverse scales of parameters that are gathered in fp8, by attribute: one for each expert, [L]."""
        add_parameter(self, "gate_up", [parts[name] for name in ("gate", "up") if name in parts], sizes)
        add_parameter(self, "down", [parts["down"]], sizes)

    def forward(self, x_MD: Tensor, weights_M: Tensor, groups: RowGroups) -> Tensor:
        x_MD, weights_M = self._weighted_inputs(x_MD, weights_M)
        gate_up_factors, down_factors = self.factors.get("gate_up"), self.factors.get("down")
        gate_up = grouped_linear(x_MD, self.gate_up, groups, self.deferred, factors_G=gate_up_factors)
        add = None
        if "experts" in self.recomputations:
            recompute = partial(self._recompute, x_MD.detach(), weights_M.detach(), groups)
            add = self.recomputations["experts"].register((gate_up,), recompute)  # before SwiGLU saves it
        product = weighted_swiglu(gate_up, weights_M)
        if add is not None:
            add(1, product)
        elif "swiglu" in self.recomputations:
            plain, weights_M = gate_up.detach(), weights_M.detach()
            self.recomputations["swiglu"].register((product,), lambda: (weighted_swiglu(plain, weights_M),))
        return grouped_linear(product, self.down, groups, self.deferred, factors_G=down_factors)

    def _weighted_inputs(self, x_MD: Tensor, weights_M: Tensor) -> tuple[Tensor, Tensor]:
        """The copies and the weights of their products."""
        return (
            (weighted_rows(x_MD, weights_M), torch.ones_like(weights_M)) if self.weights_inputs else (x_MD, weights_M)
        )

    def _recompute(self, x_MD: Tensor, weights_M: Tensor, groups: RowGroups) -> tuple[Tensor, Tensor]:
        """Recompute the output of the first product and the weighted SwiGLU product; the parameters are gathered for
        backward."""
        gate_up = grouped_product(x_MD, self.gate_up, groups, self.factors.get("gate_up"))
        return gate_up, weighted_swiglu(gate_up, weights_M)


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

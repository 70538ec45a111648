"""Feed-forward part of a layer whose routed experts work in a latent narrower than the stream, as in Nemotron 3.

Shapes as in `workloads.engine.layers.experts`; C is the size of the latent.

    y = shared(x) + (experts(x W_down^T, router(x))) W_up^T        [T, D] -> [T, C] -> [T, D]

Router and shared experts see the stream itself. Every rank projects its own tokens by whole matrices, so what ranks
send to experts and back has C numbers a token (transformers: `NemotronHMoE`; Megatron-Core: ``moe_latent_size``).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.engine.collectives.tensor_parallel import WholeLinear
from workloads.engine.layers.experts import ExpertParallel, Experts, RoutedFeedForward
from workloads.engine.layers.routing import Router
from workloads.spec.weights import Weight


class LatentExperts(RoutedFeedForward):
    def __init__(
        self,
        parallel: ExpertParallel,
        router: Router,
        experts: Experts,
        shared: nn.Module | None,
        parts: dict[str, Weight],
    ) -> None:
        """``parts``: `workloads.spec.kind_weights.experts`."""
        super().__init__(parallel, router, experts, shared)
        self.latent_down = WholeLinear([parts["latent_down"]], shares_input=True)  # the router saves it, too
        self.latent_up = WholeLinear([parts["latent_up"]], input_of="")

    @torch.compiler.disable
    def forward(self, x_TD: Tensor) -> Tensor:
        out_TC, shared_out = self.both(x_TD, self.latent_down(x_TD), x_TD)
        out = self.latent_up(out_TC)
        return out if shared_out is None else out + shared_out

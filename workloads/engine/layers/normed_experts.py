"""Feed-forward part of a layer whose experts and dense MLP have norms of their own, as in Gemma 4.

Shapes as in `workloads.engine.layers.experts`. With x the stream and h its norm, which the block computes:

    y = n_s(shared(h)) + n_o(experts(n_e(x), router(x)))

The router norms its input itself. The block norms ``y`` once more before it adds it to the stream.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from workloads.engine.layers.experts import ExpertParallel, Experts, RoutedFeedForward
from workloads.engine.layers.norm import RMSNorm
from workloads.engine.layers.routing import Router
from workloads.spec.weights import Weight


class NormedExperts(RoutedFeedForward):
    def __init__(
        self,
        parallel: ExpertParallel,
        router: Router,
        experts: Experts,
        shared: nn.Module,
        norms: dict[str, Weight],
        eps: float,
    ) -> None:
        """``norms``: `workloads.spec.kind_weights.norms_beside`."""
        super().__init__(parallel, router, experts, shared)
        self.experts_norm = RMSNorm(norms["experts_norm"], eps)
        self.experts_out_norm = RMSNorm(norms["experts_out_norm"], eps)
        self.shared_out_norm = RMSNorm(norms["shared_out_norm"], eps)

    @torch.compiler.disable
    def forward(self, x_TD: Tensor, stream_TD: Tensor) -> Tensor:  # type: ignore[override]
        """``x_TD``: norm of the stream."""
        out, shared_out = self.both(stream_TD, self.experts_norm(stream_TD), x_TD)
        assert shared_out is not None
        return self.shared_out_norm(shared_out) + self.experts_out_norm(out)

"""Balances the experts of transformers' models as this project's engine does, by hooks on their routers.

- A loss: for every sequence and layer the term of `workloads.engine.layers.routing`. transformers' own function
  (``load_balancing_loss_func``) is another one: it takes one mean over all layers and all sequences of a micro-batch
  before it multiplies loads by scores, so its gradients differ in more than a factor. It is not asked for.
- Biases of the choice (``e_score_correction_bias``): transformers leaves them to the user. They move after each step
  by the sign of the mean load less the own one, over all ranks.

Shapes: T tokens of a micro-batch, E experts, k experts a token, B sequences of a micro-batch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from workloads.spec.experiment import Experiment


class Balance:
    """What balances the experts of one rank's model. Make it before the model is wrapped."""

    def __init__(self, e: Experiment, model: nn.Module) -> None:
        assert e.model.moe is not None
        self._e, self._moe = e, e.model.moe
        self._loads: list[Tensor] = []
        """Copies that this rank's tokens have sent to each expert in this step, [E] for each bias. No buffers of the
        model: DDP would overwrite them with those of the first rank."""
        self._biases: list[Tensor] = []
        if self._moe.balance == "aux_loss":
            for module in model.modules():
                if _is_router(module):
                    module.register_forward_hook(self._add_term)
        if self._moe.balance == "bias":
            for module in model.modules():
                if isinstance(bias := getattr(module, "e_score_correction_bias", None), Tensor):
                    self._count(module if _is_router(module) else module.get_submodule("gate"), bias)

    def _add_term(self, router: nn.Module, _: Any, outputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        """The router's outputs, of which the scores' backward adds the gradient of this micro-batch's terms."""
        e, moe = self._e, self._moe
        logits, scores, chosen = outputs if len(outputs) == 3 else (outputs[1], outputs[0], None)
        shares = logits.float().softmax(-1) if moe.gate == "softmax" else logits.float().sigmoid()
        shares = shares if moe.gate == "softmax" else shares / shares.sum(-1, keepdim=True)
        with torch.no_grad():
            chosen = logits.topk(moe.experts_per_token, dim=-1).indices if chosen is None else chosen
            visits = torch.zeros_like(shares).scatter_(1, chosen, 1.0).view(e.micro_batch_size, e.seq_len, -1)
            factor = moe.balance_coefficient * moe.num_experts / (moe.experts_per_token * e.seq_len)
            # Gradients of the ranks are averaged, and those of a rank's micro-batches are added.
            sequences = e.global_batch_size // e.dp
            slope = visits.sum(1, keepdim=True).expand_as(visits) * (factor / (e.seq_len * sequences))
        scores = _AddGradient.apply(scores, shares, slope.reshape_as(shares))
        return (logits, scores, chosen) if len(outputs) == 3 else (scores, logits)

    def _count(self, router: nn.Module, bias: Tensor) -> None:
        """Count the copies that a router sends, for its bias. Recomputation counts all of them twice, which changes no
        sign."""
        load = torch.zeros(self._moe.num_experts, device=bias.device)
        self._loads.append(load)
        self._biases.append(bias.zero_())

        def add(_: nn.Module, __: Any, outputs: tuple[Tensor, ...]) -> None:
            chosen = outputs[2].detach().flatten()
            load.scatter_add_(0, chosen, torch.ones_like(chosen, dtype=load.dtype))

        router.register_forward_hook(add)

    @torch.no_grad()
    def finish_step(self) -> None:
        """Move the biases against the loads of the global batch."""
        if not self._loads:
            return
        loads = torch.stack(self._loads).double()
        dist.all_reduce(loads)
        moves = (loads.mean(1, keepdim=True) - loads).sign() * self._moe.balance_coefficient
        for load, bias, move in zip(self._loads, self._biases, moves, strict=True):
            bias += move.to(bias.dtype)
            load.zero_()


def _is_router(module: nn.Module) -> bool:
    return type(module).__name__.endswith("Router")


class _AddGradient(torch.autograd.Function):
    """Identity on the first input; the second gets ``slope`` as its gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, shares: Tensor, slope: Tensor) -> Tensor:
        ctx.save_for_backward(slope)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        (slope,) = ctx.saved_tensors
        return grad, slope, None

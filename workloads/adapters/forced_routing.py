"""Routers whose choice of experts is given; weights stay their own scores, as in `workloads.engine.layers.routing`.

Shapes: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from workloads.engine.collectives.context_parallel import local_positions
from workloads.engine.layers.routing import forced_choice
from workloads.spec.experiment import Experiment
from workloads.spec.model_spec import MoESpec

Routed = tuple[Tensor, Tensor]
"""Weights [T, E], 0 for experts that a token does not visit, and whether it visits them, bool [T, E]."""


def forced_routing(choice: Tensor, moe: MoESpec) -> Callable[..., Routed]:
    """The method ``routing`` of a Megatron-Core router (logits [..., E]) with the given experts ``choice`` [T, k]."""
    on_device: dict[torch.device, Routed] = {}

    def routing(logits: Tensor, *_: Any, **__: Any) -> Routed:
        scores = logits.view(-1, moe.num_experts).float()
        if scores.device not in on_device:
            chosen = choice.to(scores.device)
            visited = torch.zeros_like(scores, dtype=torch.bool).scatter(1, chosen, True)
            on_device[scores.device] = chosen, visited
        chosen, visited = on_device[scores.device]
        scores = scores.softmax(-1) if moe.gate == "softmax" else scores.sigmoid()
        weights = scores.gather(1, chosen)
        if moe.normalize_weights:
            weights = weights / weights.sum(-1, keepdim=True)
        weights = weights * moe.weight_scale
        return torch.zeros_like(scores).scatter(1, chosen, weights).type_as(logits), visited

    return routing


def force_routing(model: torch.nn.Module, e: Experiment, *, cp_rank: int, tp_rank: int) -> None:
    """Replace the choice of every router of a Megatron-Core model by that of ``e.routing``, which depends on a token's
    position alone: its own forced choice is random."""
    moe = e.model.moe
    if moe is None or e.routing == "learned":
        return
    skewed = e.routing == "skewed" and e.routing_imbalance > 1
    positions = local_positions(e.seq_len, e.cp, cp_rank, "ring")
    if e.sequence_parallel:
        positions = positions.view(e.tp, -1)[tp_rank]
    # Megatron-Core's tokens are [S, B] flattened.
    tokens = positions.repeat_interleave(e.micro_batch_size)
    choice = forced_choice(tokens, moe, e.routing_imbalance if skewed else None)
    for module in model.modules():
        if hasattr(module, "router"):
            module.router.routing = forced_routing(choice, moe)  # type: ignore[union-attr, assignment]

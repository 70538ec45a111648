"""Routers whose choice of experts is given; weights stay their own scores, as in `workloads.engine.layers.routing`.

Shapes: T tokens, E experts, k experts a token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

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

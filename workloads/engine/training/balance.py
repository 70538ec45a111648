"""Updates router biases from the experts' loads after a step, and measures how uneven the loads were.

Shapes: L layers with routed experts on this rank, E experts.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from workloads.contract.protocol import RoutingRecord
from workloads.engine.collectives.groups import Groups
from workloads.engine.layers.routing import Router
from workloads.engine.layers.transformer import Chunk, routers


@torch.no_grad()
def finish_routing(chunks: Sequence[Chunk], groups: Groups, skipped: Tensor | None = None) -> None:
    """Move the biases that balance learned routing against the loads of the global batch. Call it after a step.

    ``skipped``: 1 if the step updated nothing, else 0 (0-dim); then the biases stay, too. None: it was not skipped.
    """
    e = groups.experiment
    if e.model.moe is None or e.routing != "learned" or groups.is_rehearsal:
        return
    layer_routers = [router for chunk in chunks for router in routers(chunk)]
    if not layer_routers:
        return
    step = torch.stack([router.load for router in layer_routers])
    for router in layer_routers:
        router.total += router.load
        router.load.zero_()
        router.host_waits_of_step, router.host_waits = router.host_waits, 0
    if e.model.moe.balance == "bias":
        loads = _over_stage(step, groups).double()
        moves = (loads.mean(1, keepdim=True) - loads).sign() * e.model.moe.balance_coefficient
        if skipped is not None:
            moves = moves * (1.0 - skipped)
        for router, move in zip(layer_routers, moves, strict=True):
            router.bias += move.to(router.bias.dtype)


def _over_stage(loads_LE: Tensor, groups: Groups) -> Tensor:
    """Sum over all ranks of this pipeline stage that have different tokens."""
    e = groups.experiment
    loads_LE = loads_LE.clone()
    groups_to_sum = [
        groups.data_mesh.get_group(dim) for dim in ("replicate", "shard") if groups.data_mesh[dim].size() > 1
    ]
    if e.tp > 1 and e.etp == 1:
        assert groups.axes["tp"].group is not None
        groups_to_sum.append(groups.axes["tp"].group)
    for group in groups_to_sum:
        dist.all_reduce(loads_LE, group=group)
    return loads_LE


@torch.no_grad()
def routing_record(chunks: Sequence[Chunk], groups: Groups) -> RoutingRecord | None:
    """Imbalance of the loads of this rank's layers since their routers were last filled; None without such layers.

    Collective over the ranks of the pipeline stage. A rehearsal returns the record of the forced choice of all tokens.
    """
    e, moe = groups.experiment, groups.experiment.model.moe
    layer_routers: list[Router] = [router for chunk in chunks for router in routers(chunk)]
    if moe is None or not layer_routers:
        return None
    routing = layer_routers[0].routing
    if routing.is_learned:
        loads = _over_stage(torch.stack([router.total for router in layer_routers]), groups).double().cpu()
        dropped = (
            _over_stage(torch.stack([router.dropped for router in layer_routers]).unsqueeze(1), groups).sum().item()
        )
    else:
        loads, dropped = routing.forced_loads().double().unsqueeze(0), 0
    waits = sum(router.host_waits_of_step for router in layer_routers)
    of_ranks = loads.unflatten(1, (e.ep, -1)).sum(2)
    return RoutingRecord(
        expert_imbalance=_max_over_mean(loads),
        rank_imbalance=_max_over_mean(of_ranks),
        load_entropy=_entropy(loads),
        dropped_share=dropped / loads.sum().item(),
        host_waits=float(waits) if routing.is_learned or e.routing != "learned" else None,
    )


def _max_over_mean(loads: Tensor) -> float:
    """Largest load over mean load, averaged over the layers."""
    return float((loads.amax(1) / loads.mean(1)).mean())


def _entropy(loads: Tensor) -> float:
    """Entropy of the distribution of copies over experts, over that of an even one, averaged over the layers: 1 if the
    load is even, 0 if one expert gets everything."""
    shares = loads / loads.sum(1, keepdim=True)
    if loads.shape[1] == 1:
        return 1.0
    entropies = -(shares * shares.clamp(min=1e-300).log()).sum(1)
    return float((entropies / torch.tensor(float(loads.shape[1])).log()).mean())

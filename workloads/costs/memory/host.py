"""Memory of the host in closed form: what an optimizer that is partly there keeps in it (``optimizer_offload``).

Of each shard of P/S parameters the host holds the share o. For each of these elements it keeps, in g bytes each, the
moments of the optimizer, its own copy of the master weight, and the gradient as it came from the device:

    host    (moments + 2) g o P / S of each rank
    device  moments g o P / S less (`workloads.costs.memory.estimate`)

Copies go from and to the tensors themselves, so the device needs no buffers for them. Not included: the Python process
and the CUDA context, which are there with any optimizer.
"""

from __future__ import annotations

from workloads.costs.shape.params import local_params
from workloads.costs.shape.partition import StageParams
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees
from workloads.spec.updates.optimizer import optimizer_of

COPIES = 2
"""Master weight and gradient."""


def own_elements(e: Experiment, held: StageParams) -> int:
    """Elements of all shards of a rank that holds ``held``: parameters over the ranks that share their masters."""
    layers, experts = local_params(e, held.layers)
    ends = (held.embedding + held.head) // e.tp + held.final_norm
    return (layers + ends) // data_degrees(e)[1] + (experts // expert_degrees(e)[1] if experts else 0)


def offloaded(e: Experiment, elements: int) -> int:
    """Those of a rank's ``elements`` whose optimizer is on the host."""
    return int(e.optimizer_offload * elements)


def rank_optimizer_bytes(e: Experiment, held: StageParams) -> int:
    """Bytes of the host's memory for the optimizer of a pipeline rank that holds ``held``; 0 without
    ``optimizer_offload``. ``e``: as `workloads.costs.shape.held_model.as_held` returns it."""
    if not e.optimizer_offload:
        return 0
    spec = optimizer_of(e)
    return (spec.moments * spec.moment_bytes + COPIES * spec.master_bytes) * offloaded(e, own_elements(e, held))

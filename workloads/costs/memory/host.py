"""Memory of an optimizer whose states are partly on the host (``optimizer_offload``), there and on the device.

Of each shard of P/S parameters the host holds the moments of the share o: N = o P/S elements of s bytes in M moments.
They stream through the device (`workloads.engine.training.streamed_moments`), in pieces of `PIECE` elements:

    host    M s N of each rank
    device  M s (P/S - N), and M s min(PIECE, N) for each of min(`PIECES`, N / PIECE) pieces

Not included: the Python process and the CUDA context, which are there with any optimizer.
"""

from __future__ import annotations

from workloads.costs.shape.params import local_params
from workloads.costs.shape.partition import StageParams
from workloads.spec.experiment import Experiment
from workloads.spec.mesh import data_degrees, expert_degrees
from workloads.spec.updates.optimizer import optimizer_of

PIECE = 2**21
"""Elements of a piece: 16 MiB of both moments in fp32, for which the link has its full rate
(results/recorded/h200x1_streamed/NOTE.md)."""
PIECES = 4
"""Pieces for which the device has room: one that comes, one that is updated, one that goes, and one more."""


def own_elements(e: Experiment, held: StageParams) -> int:
    """Elements of all shards of a rank that holds ``held``: parameters over the ranks that share their masters."""
    layers, experts = local_params(e, held.layers)
    ends = (held.embedding + held.head) // e.tp + held.final_norm
    return (layers + ends) // data_degrees(e)[1] + (experts // expert_degrees(e)[1] if experts else 0)


def offloaded(e: Experiment, elements: int) -> int:
    """Those of a rank's ``elements`` whose moments are on the host."""
    return int(e.optimizer_offload * elements)


def rank_optimizer_bytes(e: Experiment, held: StageParams) -> int:
    """Bytes of the host's memory for the optimizer of a pipeline rank that holds ``held``; 0 without
    ``optimizer_offload``. ``e``: as `workloads.costs.shape.held_model.as_held` returns it."""
    return optimizer_of(e).state_bytes(offloaded(e, own_elements(e, held))) if e.optimizer_offload else 0


def device_state_bytes(e: Experiment, own: int, elements: int, lines: int) -> int:
    """Bytes of the optimizer on a device with ``own`` elements. ``elements``, ``lines``: as
    `OptimizerSpec.state_bytes` takes them."""
    away, spec = offloaded(e, own), optimizer_of(e)
    staged = min(PIECES, -(-away // PIECE)) * min(PIECE, away)
    return spec.state_bytes(own - away, elements, lines) + spec.state_bytes(staged)

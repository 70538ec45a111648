"""Seconds of an optimizer on the host (`workloads.engine.training.host_optimizer`).

N elements of a rank belong to the host, in n pieces of at most `PIECE`; g bytes an element. A piece goes through three
steps, each of which works on one piece at a time, beside the others:

    down    D = g N / link           gradients to the host
    update  U = N / rate             AdamW by the processors, of which each rank has its share of the node
    up      H = g N / link           weights to the device; the link works in both directions at once

    host    T = max(D, U, H) + (D + U + H - max(D, U, H)) / n

The slowest step paces all pieces, and the first and the last piece pass the other two alone. The device updates its
own elements at the same time, so a step ends max(device's update of the rest, T) after the norm is known. Gradients go
down from the end of the last backward on; that part of D which the norm and its reduction hide is not subtracted, and
nothing of T overlaps with the next forward, as in the engine.

``rate`` is that of the processors alone (cluster file or probe) times `BESIDE_COPIES`. If it is not known, it follows
from the bytes an element that AdamW and the factor on the gradients read and write, 9 g (factor: 1 and 1; AdamW: 4 and
3), over a device's share of the bandwidth of the node's memory.
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.host import offloaded, own_elements
from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.partition import experiment_stages
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.updates.optimizer import optimizer_of

PIECE = 2**22
"""Elements of a piece, as in the engine."""
PASSES = 9
"""Reads and writes of each element by the host's update and the factor before it."""
BESIDE_COPIES = 0.88
"""Rate of updates while gradients come and weights go through the same memory, over the rate alone: 2.55 and 2.90
billion parameters a second (results/recorded/h200x1_updates/NOTE.md)."""
_FP32 = 4


class HostUpdate(NamedTuple):
    """Seconds of the fullest rank."""

    down_s: float
    update_s: float
    up_s: float
    host_s: float
    """All three, overlapped."""
    device_s: float
    """The device's update of the other elements, beside it."""
    added_s: float
    """What a step takes longer than with the whole optimizer on the device; below 0 if it takes less."""


def update_rate(cluster: ClusterSpec, element_bytes: int) -> float | None:
    """Elements that a rank's processors update per second, beside copies; None if nothing is known about them."""
    host = cluster.host
    if host.adamw_rate is not None:
        return BESIDE_COPIES * host.adamw_rate * _FP32 / element_bytes
    if host.memory_bandwidth is None:
        return None
    return BESIDE_COPIES * host.memory_bandwidth / (cluster.devices_per_node * PASSES * element_bytes)


def host_update(experiment: Experiment, cluster: ClusterSpec) -> HostUpdate | None:
    """The update of an experiment with ``optimizer_offload`` above 0; None if a rate of the host is not known."""
    e = as_held(experiment)
    spec = optimizer_of(e)
    g, memory = spec.master_bytes, cluster.device.memory_bandwidth
    rate, link = update_rate(cluster, g), cluster.host.link_bandwidth
    if rate is None or link is None or memory is None:
        return None
    own = max(own_elements(e, held) for held in experiment_stages(e))
    elements = offloaded(e, own)
    down = up = g * elements / link
    update = elements / rate
    whole = overlapped(down, update, up, max(1, -(-elements // PIECE)))
    each = spec.traffic_bytes / memory
    rest = each * (own - elements)
    return HostUpdate(down, update, up, whole, rest, max(whole, rest) - each * own)


def added_by_host(experiment: Experiment, cluster: ClusterSpec) -> float | None:
    """Seconds that the host's part of the optimizer adds to a step: 0 without one, None if it is not known."""
    if not experiment.optimizer_offload:
        return 0.0
    update = host_update(experiment, cluster)
    return update.added_s if update is not None else None


def overlapped(down_s: float, update_s: float, up_s: float, pieces: int) -> float:
    """Seconds of three steps of ``pieces`` equal pieces, one piece at a time in each."""
    steps = (down_s, update_s, up_s)
    return max(steps) + (sum(steps) - max(steps)) / pieces


def unknown_rates(cluster: ClusterSpec) -> list[str]:
    """Names of the rates of the host without which its update has no time."""
    host = cluster.host
    names = ["host.link_bandwidth"] if host.link_bandwidth is None else []
    if host.adamw_rate is None and host.memory_bandwidth is None:
        names.append("host.memory_bandwidth")
    return names

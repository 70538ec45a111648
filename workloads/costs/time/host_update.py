"""Seconds of moments that stream from the host through the device (`workloads.engine.training.streamed_moments`).

N elements of a rank have their M moments of s bytes on the host, in n pieces of at most `PIECE`. A piece goes through
three steps, each of which works on one piece at a time, beside the others:

    up      L = M s N / link         moments to the device
    update  K = k N / memory         AdamW's kernel, which reads and writes k bytes an element
    down    L                        moments to the host; the link works in both directions at once

    streamed  T = max(L, K) + (2 L + K - max(L, K)) / n

The slowest step paces all pieces, and the first and the last piece pass the other two alone. The device updates its
own elements at the same time, so a step ends max(update of the rest, T) after the norm is known. That the first pieces
come while the norm is summed is not subtracted, and nothing of T overlaps with the next forward, as in the engine.

``link`` is what a device and its host exchange in each direction, both at once, while all devices of the node do so
(`workloads.spec.cluster.HostSpec`).
"""

from __future__ import annotations

from typing import NamedTuple

from workloads.costs.memory.host import PIECE, offloaded, own_elements
from workloads.costs.shape.held_model import as_held
from workloads.costs.shape.partition import experiment_stages
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment
from workloads.spec.updates.optimizer import optimizer_of


class HostUpdate(NamedTuple):
    """Seconds of the fullest rank."""

    link_s: float
    """Moments to the device and, at the same time, to the host."""
    update_s: float
    """Kernels that update them."""
    streamed_s: float
    """All three steps, overlapped."""
    device_s: float
    """The device's update of the other elements, beside them."""
    added_s: float
    """What a step takes longer than with the whole optimizer on the device."""


def host_update(experiment: Experiment, cluster: ClusterSpec) -> HostUpdate | None:
    """The update of an experiment with ``optimizer_offload`` above 0; None if a rate is not known."""
    e = as_held(experiment)
    spec = optimizer_of(e)
    devices = min(cluster.devices_per_node, e.world_size)
    link, memory = cluster.host.both_ways_bandwidth(devices), cluster.device.memory_bandwidth
    if link is None or memory is None:
        return None
    own = max(own_elements(e, held) for held in experiment_stages(e))
    elements = offloaded(e, own)
    norm = spec.master_bytes / memory
    each = spec.traffic_bytes / memory - norm
    copied = spec.state_bytes(elements) / link
    updated, rest = each * elements, each * (own - elements)
    whole = overlapped(copied, updated, copied, max(1, -(-elements // PIECE)))
    return HostUpdate(copied, updated, whole, rest, max(whole, rest) - each * own)


def added_by_host(experiment: Experiment, cluster: ClusterSpec) -> float | None:
    """Seconds that moments on the host add to a step: 0 without any, None if it is not known."""
    if not experiment.optimizer_offload:
        return 0.0
    update = host_update(experiment, cluster)
    return update.added_s if update is not None else None


def overlapped(up_s: float, update_s: float, down_s: float, pieces: int) -> float:
    """Seconds of three steps of ``pieces`` equal pieces, one piece at a time in each."""
    steps = (up_s, update_s, down_s)
    return max(steps) + (sum(steps) - max(steps)) / pieces

"""Seconds that a step takes longer because its ranks lie in several nodes whose network a probe has timed.

The closed form (`workloads.predict.time_terms`) knows a network as one rate. Where a probe has timed the collectives
between nodes, the form predicts the layout as if all of its devices lay in one node, and this module adds

    A = S(network as timed) - S(one node)

where S is the simulated step of `workloads.costs.time.step_times`, which contains every message of every group. Hosts
run ahead of devices that wait for the network, so a step that is host-bound on one node is not longer by all of A. On
one node a step takes ``(D^s + H^s)^(1/s)``: D its time without hosts, H the host's part, s the sharpness of
`workloads.predict.time_terms`. On several nodes it takes

    ((D + A - B)^s + H^s)^(1/s) + B

B is the part of A after the last micro-batch: gradients that are reduced once a step follow the last work launched.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from workloads.costs.time.step_times import StepTimes
from workloads.costs.traffic.measured_network import MeasuredNetwork, ProbedCluster
from workloads.predict.points import Floats
from workloads.predict.time_terms import SHARPNESS
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment

SPREAD = 0.18
"""Standard deviation of the added seconds, relative to them: the root mean square of the errors that were predicted
before 21 layouts ran on two nodes (tests/slurm/lab/recorded/h200x2_slurm_two_nodes)."""
LEAST_TAUGHT = 0.5
"""Least share of a measured step that must remain without the added seconds for the row to teach the closed form."""
HOST_BOUND = 1.1
"""Step time over that without hosts from which a step on one node counts as host-bound."""
_ONE_NODE = 2**30
"""A number of devices that is more than any layout has."""


def _in_one_node(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster with any number of devices in one domain, and no network."""
    if not cluster.tiers:
        return dataclasses.replace(cluster, devices_per_node=_ONE_NODE, linked_devices=None, inter_node=None)
    *inner, widest = [tier for tier in cluster.tiers_by_size if not tier.network] or [cluster.inside]
    wider = dataclasses.replace(widest, devices=_ONE_NODE, network=False)
    return dataclasses.replace(cluster, devices_per_node=_ONE_NODE, tiers=(*inner, wider))


class Added(NamedTuple):
    """Seconds due to the network, by layout."""

    during: Floats
    """Added to the device's work while the host launches more of it."""
    after: Floats
    """After the last micro-batch."""

    def step_s(self, one_node_s: Floats, device_s: Floats) -> Floats:
        """Seconds of a step, from those on one node, with hosts and without."""
        host = np.maximum(0.0, one_node_s**SHARPNESS - device_s**SHARPNESS)
        longer: Floats = (host + (device_s + self.during) ** SHARPNESS) ** (1 / SHARPNESS) + self.after
        return longer

    def one_node_s(self, step_s: Floats, one_node_s: Floats, device_s: Floats) -> Floats:
        """Seconds on one node of measured steps, the inverse of `step_s`; NaN for those that say little about it.
        ``one_node_s``, ``device_s``: what is known before, with hosts and without."""
        launched, alone = step_s - self.after, step_s - self.after - self.during
        busy = device_s + self.during
        hosts = np.maximum(0.0, launched**SHARPNESS - busy**SHARPNESS + device_s**SHARPNESS) ** (1 / SHARPNESS)
        of_hosts = np.where(busy * HOST_BOUND <= launched, hosts, np.nan)
        left: Floats = np.where(one_node_s >= HOST_BOUND * device_s, of_hosts, alone)
        return np.where(left >= LEAST_TAUGHT * step_s, left, np.nan)


@dataclass(frozen=True, slots=True)
class Crossing:
    """Layouts that span exactly the nodes of a probe."""

    cluster: ClusterSpec
    network: MeasuredNetwork
    one_node: ClusterSpec = field(init=False)
    """The cluster with all devices in one node."""
    _timed: StepTimes = field(init=False, repr=False, compare=False)
    _inside: StepTimes = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        fields = {one.name: getattr(self.cluster, one.name) for one in dataclasses.fields(ClusterSpec)}
        one_node = _in_one_node(self.cluster)
        object.__setattr__(self, "one_node", one_node)
        object.__setattr__(self, "_timed", StepTimes(ProbedCluster(**fields, network=self.network)))
        object.__setattr__(self, "_inside", StepTimes(one_node))

    def covers(self, experiment: Experiment) -> bool:
        """Whether the layout spans as many nodes as the probe did."""
        return experiment.world_size == self.network.nodes * self.cluster.devices_per_node

    def added(self, experiments: Sequence[Experiment]) -> Added:
        """Seconds by experiment, each of which must satisfy `covers`; NaN if rates are not known."""
        whole = np.maximum(0.0, self._timed.seconds(experiments) - self._inside.seconds(experiments))
        after = np.clip(self._timed.ends_s(experiments) - self._inside.ends_s(experiments), 0.0, whole)
        return Added(whole - after, after)

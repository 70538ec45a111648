"""Seconds that a step takes longer because its ranks lie in several nodes whose network a probe has timed.

The closed form (`workloads.predict.time_terms`) knows a network as one rate. Where a probe has timed the collectives
between nodes, the form predicts the layout as if all of its devices lay in one node, and this module adds

    S(network as timed) - S(one node)

where S is the simulated step of `workloads.costs.time.step_times`, which contains every message of every group.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from workloads.costs.time.step_times import StepTimes
from workloads.costs.traffic.measured_network import MeasuredNetwork, ProbedCluster
from workloads.predict.points import Floats
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import Experiment

SPREAD = 0.18
"""Standard deviation of the added seconds, relative to them: the root mean square of the errors that were predicted
before 21 layouts ran on two nodes (tests/slurm/lab/recorded/h200x2_slurm_two_nodes)."""
LEAST_TAUGHT = 0.5
"""Least share of a measured step that must remain without the added seconds for the row to teach the closed form."""
_ONE_NODE = 2**30
"""A number of devices that is more than any layout has."""


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
        one_node = dataclasses.replace(self.cluster, devices_per_node=_ONE_NODE, inter_node=None)
        object.__setattr__(self, "one_node", one_node)
        object.__setattr__(self, "_timed", StepTimes(ProbedCluster(**fields, network=self.network)))
        object.__setattr__(self, "_inside", StepTimes(one_node))

    def covers(self, experiment: Experiment) -> bool:
        """Whether the layout spans as many nodes as the probe did."""
        return experiment.world_size == self.network.nodes * self.cluster.devices_per_node

    def seconds(self, experiments: Sequence[Experiment]) -> Floats:
        """Seconds to add by experiment, each of which must satisfy `covers`; NaN if rates are not known."""
        added: Floats = np.maximum(0.0, self._timed.seconds(experiments) - self._inside.seconds(experiments))
        return added

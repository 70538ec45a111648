"""The hardware an experiment runs on, as the planner and the cost formulas need it. No torch here.

Rates are per device that a process sees, dense (no sparsity), in SI units. Unknown values are None, never a guess.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field

from workloads.spec.hardware.network import LinkSpec, TierSpec, tier_of, with_names
from workloads.spec.hardware.vendors import PLANNED_ONLY


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator (or one CPU process)."""

    name: str
    driver_names: tuple[str, ...] = ()
    """Names that ``torch.cuda.get_device_name`` or NVML report for this device."""
    memory_bytes: int | None
    """Total memory as the driver reports it."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Dense peak in FLOP/s per dtype: ``bf16``, ``fp8``, ``fp32``."""
    memory_bandwidth: float | None = None
    """Bytes per second."""
    power_w: float | None = None
    """Watts that the device takes at most: its limit as delivered; None: not known."""
    workspace_bytes: int = 0
    """Memory that a training process allocates for matrix products in addition to tensors: torch gives cuBLAS a
    workspace for each thread that computes, and a step has two, one for forwards and one for backwards."""
    source: str = ""
    """Source of the rates."""

    def peak_of(self, precision: str) -> float | None:
        """Dense peak in FLOP/s for an experiment's precision; None where it is not known."""
        return self.peak_flops.get("fp8" if precision.startswith("fp8") else precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSpec:
    """Memory of one node, and the links to its devices, as optimizer states and activations that live there need
    them."""

    link_bandwidth: float | None = None
    """Bytes per second that one device and the memory of its host exchange in each direction, both at once, through
    pinned memory."""
    link_shared_bandwidth: float | None = None
    """The same while other devices of the node do so, too; None: ``link_bandwidth``."""
    link_one_way_bandwidth: float | None = None
    """Bytes per second of copies in one direction alone; None: ``link_bandwidth``."""
    memory_bytes: int | None = None
    """Memory of one node; None: not known, so it is not checked."""
    memory_bandwidth: float | None = None
    """Bytes per second of the memory of one node, which all its devices share."""
    source: str = ""
    """Source of the numbers."""

    def both_ways_bandwidth(self, devices: int) -> float | None:
        """Bytes per second of each of so many devices of a node in each direction, both at once and all devices at
        once; no more than a device's part of the memory's, which every byte crosses once. None if it is not known."""
        link = self.link_bandwidth if self.link_shared_bandwidth is None or devices == 1 else self.link_shared_bandwidth
        if link is None or self.memory_bandwidth is None:
            return link
        return min(link, self.memory_bandwidth / (2 * devices))

    @property
    def one_way_bandwidth(self) -> float | None:
        """Bytes per second of copies in one direction alone; None if it is not known."""
        return self.link_bandwidth if self.link_one_way_bandwidth is None else self.link_one_way_bandwidth


UNKNOWN_HOST = HostSpec()
"""A host of which nothing is known."""


class _WithTiers:
    """Keeps the tiers of a cluster, which every collective asks for."""

    __slots__ = ("_tiers",)
    _tiers: tuple[TierSpec, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec(_WithTiers):
    """Nodes of equal devices, and the links that join them: either one inside a node and one between nodes (the short
    form), or a list of tiers. Formulas read `tiers_by_size`, which both forms have."""

    name: str
    backend: str
    """``cuda``, ``cpu``, or ``rocm``, for which points are planned and not run."""
    device: DeviceSpec
    devices_per_node: int
    intra_node: LinkSpec | None = None
    """Link inside a node; None with ``tiers``."""
    inter_node: LinkSpec | None = None
    """Link between nodes; None: a single node, or ``tiers`` are given."""
    reserved_bytes: int = 0
    """Bytes of a device that training cannot use: CUDA context, NCCL buffers, allocator fragmentation."""
    matmul_efficiency: float | None = None
    """Share of ``peak_flops`` reached in large matrix products; calibrated, with its source in the YAML."""
    linked_devices: int | None = None
    """Number of devices that the link inside a node joins, if it joins several nodes (NVLink of a rack); None: those of
    a node."""
    tiers: tuple[TierSpec, ...] = ()
    """Tiers of the network from the innermost outwards, instead of ``intra_node``, ``inter_node`` and
    ``linked_devices``."""
    nodes: int | None = None
    """Number of nodes. None: not known, so no layout is too wide."""
    price_per_device_hour: float | None = None
    """Price of one device for an hour, in any currency; None: not known."""
    host: HostSpec = UNKNOWN_HOST
    """What is known about the processors and the memory of a node."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Environment variables that the network between the nodes needs in every rank (NCCL, EFA)."""

    @property
    def is_planned_only(self) -> bool:
        """Whether points of this cluster are predicted and cannot be run."""
        return self.backend == PLANNED_ONLY

    @property
    def tiers_by_size(self) -> tuple[TierSpec, ...]:
        """Tiers of the network from the innermost outwards, all with a name and with ``network`` true or false."""
        try:
            return self._tiers
        except AttributeError:
            object.__setattr__(self, "_tiers", self._named_tiers())
            return self._tiers

    def _named_tiers(self) -> tuple[TierSpec, ...]:
        if self.tiers:
            return with_names(self.tiers, self.devices_per_node)
        assert self.intra_node is not None, "a cluster has links or tiers"
        inside = tier_of(self.intra_node, self.domain, "linked nodes" if self.linked_devices else "node", False)
        return (inside, *([tier_of(self.inter_node, None, "between nodes", True)] if self.inter_node else []))

    @property
    def inside(self) -> TierSpec:
        """The tier that joins the devices of a domain; the innermost one if a node is one device."""
        tiers = self.tiers_by_size
        return next((tier for tier in reversed(tiers) if not tier.network), tiers[0])

    @property
    def outside(self) -> tuple[TierSpec, ...]:
        """The tiers of the network between domains, from the innermost outwards; empty: there is none."""
        return tuple(tier for tier in self.tiers_by_size if tier.network)

    @property
    def domain(self) -> int:
        """Number of devices that are joined without a network adapter: those of a node, or of the nodes that the link
        inside a node joins. Ranks fill one such domain after the other."""
        if self.tiers:
            return max((tier.devices or 0 for tier in self.tiers_by_size if not tier.network), default=1)
        return self.linked_devices or self.devices_per_node

    @property
    def joined_devices(self) -> int | None:
        """Number of devices that the outermost tier joins; None: not known, so no layout is too wide."""
        return self.tiers_by_size[-1].devices

    def with_nearest_network(self) -> ClusterSpec:
        """The cluster as if the first tier of its network joined all devices; itself if it has no further tier."""
        if len(self.outside) < 2:
            return self
        tiers = self.tiers[: len(self.tiers) - len(self.outside) + 1]
        return dataclasses.replace(
            self, tiers=(*tiers[:-1], dataclasses.replace(tiers[-1], devices=None, network=True))
        )

    def with_scaled_links(self, inside: float, outside: float) -> ClusterSpec:
        """The cluster with the bandwidths inside a domain, and of the network, multiplied by these shares."""
        if self.tiers:
            shares = [outside if tier.network else inside for tier in self.tiers_by_size]
            tiers = tuple(tier.scaled(share) for tier, share in zip(self.tiers, shares, strict=True))
            return dataclasses.replace(self, tiers=tiers)
        assert self.intra_node is not None
        between = None if self.inter_node is None else self.inter_node.scaled(outside)
        return dataclasses.replace(self, intra_node=self.intra_node.scaled(inside), inter_node=between)

    @property
    def usable_bytes(self) -> int | None:
        """Bytes of one device that training can use; None if the memory of the device is not known."""
        if self.device.memory_bytes is None:
            return None
        return self.device.memory_bytes - self.reserved_bytes

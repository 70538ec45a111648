"""The hardware an experiment runs on, as the planner and the cost formulas need it. No torch here.

Rates are per device that a process sees, dense (no sparsity), in SI units. Unknown values are None, never a guess.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from workloads.spec.checks import build, choice, known_names, mapping, number, sequence, whole_number
from workloads.spec.errors import InvalidSweep
from workloads.spec.hardware.network import (
    BANDWIDTH,
    RATE_CHECKS,
    LinkSpec,
    Range,
    TierSpec,
    amount,
    check_tier_values,
    check_tiers,
    converted,
    link_from_dict,
    tier_of,
    tiers_from_dict,
    with_names,
)
from workloads.spec.hardware.vendors import BACKENDS, PLANNED_ONLY, refuse_wrong_backend
from workloads.spec.mistakes import Mistakes
from workloads.spec.units import EXAMPLES, Unit, quantity

SHORT_FORM = ("intra_node", "inter_node", "linked_devices")
"""Fields that describe a network of at most two links; ``tiers`` describes any."""
_NEVER_NULL = ("name", "backend", "device", "devices_per_node")
_ABSENT = object()
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_OF_DEVICE: Mapping[str, Unit] = {
    "memory_bytes": "B",
    "memory_bandwidth": "B/s",
    "workspace_bytes": "B",
    "power_w": "W",
}
_OF_HOST: Mapping[str, Unit] = {
    "link_bandwidth": "B/s",
    "link_shared_bandwidth": "B/s",
    "link_one_way_bandwidth": "B/s",
    "memory_bytes": "B",
    "memory_bandwidth": "B/s",
}
_MEMORY: Range = (2**20, 1e14, "B", EXAMPLES["B"])
_MEMORY_BANDWIDTH: Range = (1e9, 1e15, "B/s", "3.35 TB/s")
_PEAK: Range = (1e9, 1e18, "FLOP/s", EXAMPLES["FLOP/s"])
_POWER: Range = (1, 1e5, "W", EXAMPLES["W"])
_PEAKS = ("bf16", "fp16", "fp32", "fp64", "fp8", "mxfp8", "nvfp4", "fp4", "tf32", "int8")
"""Precisions that data sheets list; the formulas read bf16, fp8, mxfp8, nvfp4, fp32 and fp64."""


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


def cluster_from_dict(fields: Mapping[str, Any], option: str = "(unnamed)") -> ClusterSpec:
    """Makes a `ClusterSpec` from plain data (YAML, JSON), in which quantities may be texts with a unit (``50 GB/s``).
    ``option``: what messages call a cluster without a name.

    Numbers are not checked; see `check_cluster`. Raises `InvalidSweep` for a missing or unknown field or unit, with its
    name.
    """
    place = _place(fields, option)
    # A name without a value is as good as missing.
    values = {name: value for name, value in fields.items() if value is not None or name not in _NEVER_NULL}
    mistakes = Mistakes()
    if "device" in values:
        with mistakes.collected():
            values["device"] = _device(f"{place}: device", values["device"])
    with mistakes.collected():
        _read_network(place, values)
    if "host" in values:
        with mistakes.collected():
            values["host"] = _host(f"{place}: host", values["host"])
    with mistakes.collected():
        values = converted(f"{place}: ", values, {"reserved_bytes": "B"})
    with mistakes.collected():
        values["environment"] = environment_from_dict(values.get("environment") or {}, place)
    with mistakes.collected():
        cluster = build(ClusterSpec, place, values, needed=("intra_node",) if fields.get("tiers") is None else ())
    mistakes.refuse()
    return cluster


def _read_network(place: str, values: dict[str, Any]) -> None:
    """Replaces links, or tiers, in a cluster's plain data by their specs."""
    given, values["tiers"], mistakes = values.get("tiers"), (), Mistakes()
    short = [name for name in SHORT_FORM if values.get(name) is not None]
    if given is not None and short:
        raise InvalidSweep(
            f"{place}: tiers and {' and '.join(short)} both describe the network; keep one form, and set what the "
            f"file inherits of the other to null ({short[0]}: null, or tiers: null)"
        )
    if given is None and "intra_node" in values and values["intra_node"] is None:
        raise InvalidSweep(f"{place}: neither intra_node nor tiers describe the network; give one of them")
    if given is not None:
        values["tiers"] = tiers_from_dict(f"{place}: tiers", given)
    for link in ("intra_node", "inter_node") if given is None else ():
        if values.get(link) is not None:
            with mistakes.collected():
                values[link] = link_from_dict(f"{place}: {link}", values[link])
    mistakes.refuse()


def _device(place: str, fields: object) -> DeviceSpec:
    device, mistakes = mapping(place, fields), Mistakes()
    if device.get("name", "") is None:
        del device["name"]
    names = device.get("driver_names") or ()
    with mistakes.collected():
        names = [names] if isinstance(names, str) else sequence(f"{place}.driver_names", names)
        device["driver_names"] = tuple(names)
    with mistakes.collected():
        device = converted(f"{place}.", device, _OF_DEVICE)
    if "peak_flops" in device:
        with mistakes.collected():
            peaks = mapping(f"{place}.peak_flops", device["peak_flops"])
            known_names(f"{place}.peak_flops", peaks, _PEAKS, noun="precision")
            peaks = converted(f"{place}.peak_flops.", peaks, dict.fromkeys(peaks, "FLOP/s"))
            device["peak_flops"] = peaks
    with mistakes.collected():
        spec = build(DeviceSpec, place, device)
    mistakes.refuse()
    return spec


def _host(place: str, fields: object) -> HostSpec:
    values, mistakes = mapping(place, fields if fields is not None else {}), Mistakes()
    with mistakes.collected():
        known = {name: unit for name, unit in _OF_HOST.items() if values.get(name) is not None}
        values = converted(f"{place}.", values, known)
    with mistakes.collected():
        spec = build(HostSpec, place, values)
    mistakes.refuse()
    return spec


def _place(fields: Mapping[str, Any], option: str) -> str:
    return f"cluster {option if fields.get('name') is None else fields['name']}"


def read_cluster(fields: Mapping[str, Any], option: str = "(unnamed)") -> ClusterSpec:
    """Makes a checked `ClusterSpec` from a user's data (see `cluster_from_dict`). Raises `InvalidSweep` with all
    mistakes: names, missing fields, units, and numbers that no hardware has."""
    mistakes = Mistakes()
    with mistakes.collected():
        return check_cluster(cluster_from_dict(fields, option))
    _check_values(_place(fields, option), fields, mistakes)
    mistakes.refuse()
    raise AssertionError("the mistakes of a cluster vanished")


def check_cluster(cluster: ClusterSpec) -> ClusterSpec:
    """Returns the cluster itself. Raises `InvalidSweep` for all numbers that no hardware has."""
    place, device, mistakes = f"cluster {cluster.name}", cluster.device, Mistakes()
    _check_values(place, to_dict(cluster), mistakes)
    with mistakes.collected():
        if cluster.backend != "cpu":
            refuse_wrong_backend(place, cluster.backend, map(str, (device.name, *device.driver_names)))
    mistakes.refuse()
    if cluster.tiers:
        check_tiers(f"{place}: tiers", cluster.tiers, cluster.devices_per_node, cluster.nodes)
    elif cluster.domain % cluster.devices_per_node:
        raise InvalidSweep(
            f"{place}: linked_devices={cluster.linked_devices} is not a multiple of devices_per_node="
            f"{cluster.devices_per_node}"
        )
    link = cluster.inter_node
    if link is not None and link.has_pair_rates:
        raise InvalidSweep(f"{place}: inter_node has no pair rates; give them in intra_node")
    if device.memory_bytes is not None and cluster.reserved_bytes >= device.memory_bytes:
        raise InvalidSweep(
            f"{place}: reserved_bytes={cluster.reserved_bytes} leaves nothing of device.memory_bytes="
            f"{device.memory_bytes}"
        )
    return cluster


def _check_values(place: str, fields: Mapping[str, Any], mistakes: Mistakes) -> None:
    """Check each value of a cluster's plain data by itself; absent ones are not checked."""
    checks: dict[str, Callable[[str, Any], object]] = {
        "backend": lambda where, value: choice(where, value, BACKENDS),
        "devices_per_node": lambda where, value: whole_number(where, value, 1),
        "linked_devices": lambda where, value: value is None or whole_number(where, value, 1),
        "nodes": lambda where, value: value is None or whole_number(where, value, 1),
        "price_per_device_hour": lambda where, value: value is None or number(where, value, above=0),
        "device.memory_bytes": partial(amount, unit="B", span=_MEMORY, optional=True),
        "device.memory_bandwidth": partial(amount, unit="B/s", span=_MEMORY_BANDWIDTH, optional=True),
        "device.power_w": partial(amount, unit="W", span=_POWER, optional=True),
        "device.workspace_bytes": lambda where, value: whole_number(where, quantity(where, value, "B"), 0),
        "host.link_bandwidth": partial(amount, unit="B/s", span=BANDWIDTH, optional=True),
        "host.link_shared_bandwidth": partial(amount, unit="B/s", span=BANDWIDTH, optional=True),
        "host.link_one_way_bandwidth": partial(amount, unit="B/s", span=BANDWIDTH, optional=True),
        "host.memory_bytes": partial(amount, unit="B", span=_MEMORY, optional=True),
        "host.memory_bandwidth": partial(amount, unit="B/s", span=_MEMORY_BANDWIDTH, optional=True),
        "reserved_bytes": partial(amount, unit="B", span=_MEMORY, may_be_0=True),
        "matmul_efficiency": _share,
    }
    checks |= {f"{link}.{rate}": check for link in ("intra_node", "inter_node") for rate, check in RATE_CHECKS.items()}
    device = fields.get("device")
    peaks = device.get("peak_flops") if isinstance(device, Mapping) else None
    for precision in peaks if isinstance(peaks, Mapping) else ():
        checks[f"device.peak_flops.{precision}"] = partial(amount, unit="FLOP/s", span=_PEAK, optional=True)
    for name, check in checks.items():
        value: Any = fields
        for part in name.split("."):
            value = value.get(part, _ABSENT) if isinstance(value, Mapping) else _ABSENT
        if value is not _ABSENT and not (value is None and name in _NEVER_NULL):
            with mistakes.collected():
                check(f"{place}: {name}", value)
    check_tier_values(f"{place}: tiers", fields.get("tiers"), mistakes)


def _share(place: str, value: Any) -> None:
    if value is not None and not 0 < number(place, value) <= 1:
        raise InvalidSweep(f"{place}={value} must be a share above 0, at most 1 (0.7 is 70 %)")


def environment_from_dict(fields: object, place: str = "") -> dict[str, str]:
    """Environment variables from plain data. Raises `InvalidSweep`, with ``place`` first, for values that no
    environment can hold or that YAML has probably read differently from what was meant."""
    label = f"{place}: environment" if place else "environment"
    environment: dict[str, str] = {}
    for name, value in mapping(label, fields).items():
        if not _VARIABLE.fullmatch(name):
            raise InvalidSweep(f"{label}: {name!r} cannot be the name of a variable (letters, digits and _)")
        if isinstance(value, float):  # 1.10 is 1.1 by now, and 1e5 is 100000.0
            raise InvalidSweep(f"{label}: {name}={value!r} must be text or a whole number; put it in quotes")
        if isinstance(value, bool) or not isinstance(value, (str, int)):
            raise InvalidSweep(f"{label}: {name}={value!r} must be text or a number; put it in quotes")
        if not str(value).isprintable():
            raise InvalidSweep(f"{label}: {name}={value!r} has a character that cannot be printed")
        environment[name] = str(value)
    return environment


def to_dict(cluster: ClusterSpec) -> dict[str, Any]:
    """Plain nested dict of every field of the form in which the network was given; the inverse of
    `cluster_from_dict`."""
    other_form = SHORT_FORM if cluster.tiers else ("tiers",)
    return {name: value for name, value in dataclasses.asdict(cluster).items() if name not in other_form}

"""The hardware an experiment runs on, as the planner and the cost formulas need it. No torch here.

Rates are per device that a process sees, dense (no sparsity), in SI units. What is not known is None, never a guess.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workloads.spec.checks import build, choice, known_names, mapping, number, plausible, sequence, whole_number
from workloads.spec.errors import InvalidSweep
from workloads.spec.units import EXAMPLES, Unit, quantity

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
Range = tuple[float, float, str, str]
"""Least and most that hardware has, the unit, and how to write such a quantity."""
_LINK: Range = (1e7, 1e13, "B/s", EXAMPLES["B/s"])
_LATENCY: Range = (0, 0.1, "s", EXAMPLES["s"])
_OF_LINK: Mapping[str, tuple[Unit, Range]] = {
    "bandwidth": ("B/s", _LINK),
    "latency_s": ("s", _LATENCY),
    "pair_bandwidth": ("B/s", _LINK),
    "pair_latency_s": ("s", _LATENCY),
}
_MEMORY: Range = (2**20, 1e14, "B", EXAMPLES["B"])
_MEMORY_BANDWIDTH: Range = (1e9, 1e15, "B/s", "3.35 TB/s")
_PEAK: Range = (1e9, 1e18, "FLOP/s", EXAMPLES["FLOP/s"])
_PEAKS = ("bf16", "fp16", "fp32", "fp64", "fp8", "fp4", "tf32", "int8")
"""Names of data sheets; the formulas read bf16, fp8, fp32 and fp64."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceSpec:
    """One accelerator (or one CPU process)."""

    name: str
    driver_names: tuple[str, ...] = ()
    """Names by which ``torch.cuda.get_device_name`` or NVML report it."""
    memory_bytes: int | None
    """What the driver reports as total."""
    peak_flops: Mapping[str, float] = field(default_factory=dict)
    """Dense peak in FLOP/s per dtype: ``bf16``, ``fp8``, ``fp32``."""
    memory_bandwidth: float | None = None
    """Bytes per second."""
    workspace_bytes: int = 0
    """What a training process has allocated for its matrix products, beside tensors: torch gives cuBLAS a workspace for
    each thread that computes, and a step has two, that of forwards and that of backwards."""
    source: str = ""
    """Where the rates come from."""

    def peak_of(self, precision: str) -> float | None:
        """Dense peak in FLOP/s for an experiment's precision; None where it is not known."""
        return self.peak_flops.get("fp8" if precision.startswith("fp8") else precision)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpec:
    """What one device can send (and at the same time receive) over one class of link."""

    bandwidth: float
    """Bytes per second and device that a large ring collective reaches (bus bandwidth)."""
    latency_s: float
    """Start-up time of one hop."""
    pair_bandwidth: float | None = None
    pair_latency_s: float | None = None
    """The same of a group of two devices inside a node, where that is known to be another."""
    source: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Nodes of equal devices: a fast link inside a node and a slower one between nodes."""

    name: str
    backend: str
    """``cuda`` or ``cpu``."""
    device: DeviceSpec
    devices_per_node: int
    intra_node: LinkSpec
    inter_node: LinkSpec | None
    """None: a single node."""
    reserved_bytes: int = 0
    """Bytes of a device that training cannot have: CUDA context, NCCL buffers, allocator fragmentation."""
    matmul_efficiency: float | None = None
    """Reached share of peak_flops in large matrix products; calibrated, with its source in the YAML."""
    nodes: int | None = None
    """How many there are; None: not known, so no layout is too wide."""
    price_per_device_hour: float | None = None
    """What an hour of one device costs, in the money of whoever pays; None: not known."""
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the network between the nodes needs in every rank (NCCL, EFA)."""

    @property
    def usable_bytes(self) -> int | None:
        """Bytes of one device that training can have; None where the device's memory is not known."""
        if self.device.memory_bytes is None:
            return None
        return self.device.memory_bytes - self.reserved_bytes


def cluster_from_dict(fields: Mapping[str, Any]) -> ClusterSpec:
    """A `ClusterSpec` from plain data (YAML, JSON), in which quantities may be texts with a unit (``50 GB/s``).

    Its numbers are not looked at; see `check_cluster`. Raises `InvalidSweep` naming the field that is missing or
    unknown, or the unit that is.
    """
    place = f"cluster {fields.get('name', '(unnamed)')}"
    values = dict(fields)
    if "device" in values:
        device = mapping(f"{place}: device", values["device"])
        names = device.get("driver_names") or ()
        names = [names] if isinstance(names, str) else sequence(f"{place}: device.driver_names", names)
        device["driver_names"] = tuple(names)
        _convert(f"{place}: device.", device, {"memory_bytes": "B", "memory_bandwidth": "B/s", "workspace_bytes": "B"})
        if "peak_flops" in device:
            peaks = mapping(f"{place}: device.peak_flops", device["peak_flops"])
            known_names(f"{place}: device.peak_flops", peaks, _PEAKS, noun="precision")
            _convert(f"{place}: device.peak_flops.", peaks, dict.fromkeys(peaks, "FLOP/s"))
            device["peak_flops"] = peaks
        values["device"] = build(DeviceSpec, f"{place}: device", device)
    values.setdefault("inter_node", None)
    for link in ("intra_node", "inter_node"):
        if link in values and (values[link] is not None or link == "intra_node"):
            rates = mapping(f"{place}: {link}", values[link])
            _convert(f"{place}: {link}.", rates, {name: unit for name, (unit, _) in _OF_LINK.items()})
            values[link] = build(LinkSpec, f"{place}: {link}", rates)
    _convert(f"{place}: ", values, {"reserved_bytes": "B"})
    values["environment"] = environment_from_dict(values.get("environment") or {}, place)
    return build(ClusterSpec, place, values)


def _convert(place: str, values: dict[str, Any], units: Mapping[str, Unit]) -> None:
    """Put numbers into the place of texts with units. ``place`` ends where the name of a value begins."""
    for name, unit in units.items():
        if name in values:
            values[name] = quantity(f"{place}{name}", values[name], unit)


def check_cluster(cluster: ClusterSpec) -> ClusterSpec:
    """The cluster itself; raises `InvalidSweep` for numbers that no hardware has."""
    place = f"cluster {cluster.name}"
    choice(f"{place}: backend", cluster.backend, ("cuda", "cpu"))
    whole_number(f"{place}: devices_per_node", cluster.devices_per_node, 1)
    if cluster.nodes is not None:
        whole_number(f"{place}: nodes", cluster.nodes, 1)
    if cluster.price_per_device_hour is not None:
        number(f"{place}: price_per_device_hour", cluster.price_per_device_hour, above=0)
    device = cluster.device
    amounts: dict[str, tuple[Any, Range]] = {
        "device.memory_bytes": (device.memory_bytes, _MEMORY),
        "device.memory_bandwidth": (device.memory_bandwidth, _MEMORY_BANDWIDTH),
        **{f"device.peak_flops.{dtype}": (peak, _PEAK) for dtype, peak in device.peak_flops.items()},
    }
    for name, link in (("intra_node", cluster.intra_node), ("inter_node", cluster.inter_node)):
        if link is not None:
            if name == "inter_node" and (link.pair_bandwidth, link.pair_latency_s) != (None, None):
                raise InvalidSweep(f"{place}: {name} has no rates of a pair: those are of two devices of one node")
            for own, (_, span) in _OF_LINK.items():
                if (value := getattr(link, own)) is not None or not own.startswith("pair"):
                    plausible(f"{place}: {name}.{own}", value, *span)
    for name, (value, span) in amounts.items():
        if value is not None:
            plausible(f"{place}: {name}", value, *span)
    whole_number(f"{place}: device.workspace_bytes", device.workspace_bytes, 0)
    if cluster.reserved_bytes != 0:
        plausible(f"{place}: reserved_bytes", cluster.reserved_bytes, *_MEMORY)
    if device.memory_bytes is not None and cluster.reserved_bytes >= device.memory_bytes:
        raise InvalidSweep(
            f"{place}: reserved_bytes={cluster.reserved_bytes} leaves nothing of device.memory_bytes="
            f"{device.memory_bytes}"
        )
    if (share := cluster.matmul_efficiency) is not None and not 0 < number(f"{place}: matmul_efficiency", share) <= 1:
        raise InvalidSweep(f"{place}: matmul_efficiency={share} must be a share above 0, at most 1 (0.7 is 70 %)")
    return cluster


def environment_from_dict(fields: object, place: str = "") -> dict[str, str]:
    """Environment variables from plain data. Raises `InvalidSweep`, after ``place``, for what no environment can hold
    or what YAML has probably read otherwise than it was meant."""
    label = f"{place}: environment" if place else "environment"
    environment: dict[str, str] = {}
    for name, value in mapping(label, fields).items():
        if not _VARIABLE.fullmatch(name):
            raise InvalidSweep(f"{label}: {name!r} cannot be the name of a variable (letters, digits and _)")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise InvalidSweep(f"{label}: {name}={value!r} must be text or a number; put it in quotes")
        if not str(value).isprintable():
            raise InvalidSweep(f"{label}: {name}={value!r} has a character that cannot be printed")
        environment[name] = str(value)
    return environment


def to_dict(cluster: ClusterSpec) -> dict[str, Any]:
    """Plain nested dict of every field; the inverse of `cluster_from_dict`."""
    return dataclasses.asdict(cluster)

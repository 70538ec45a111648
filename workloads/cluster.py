"""The hardware an experiment runs on, as the planner and the cost formulas need it. No torch here.

Rates are per device that a process sees, dense (no sparsity), in SI units. What is not known is None, never a guess.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from workloads.errors import InvalidSweep

_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


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
    environment: Mapping[str, str] = field(default_factory=dict)
    """Variables that the network between the nodes needs in every rank (NCCL, EFA)."""

    @property
    def usable_bytes(self) -> int | None:
        """Bytes of one device that training can have; None where the device's memory is not known."""
        if self.device.memory_bytes is None:
            return None
        return self.device.memory_bytes - self.reserved_bytes


def cluster_from_dict(fields: Mapping[str, Any]) -> ClusterSpec:
    """A `ClusterSpec` from plain data (YAML); raises `InvalidSweep` naming the field that is missing or unknown."""
    try:
        values = dict(fields)
        device = dict(values["device"])
        device["driver_names"] = tuple(device.get("driver_names", ()))
        values["device"] = DeviceSpec(**device)
        values["intra_node"] = LinkSpec(**values["intra_node"])
        inter = values.get("inter_node")
        values["inter_node"] = LinkSpec(**inter) if inter is not None else None
        values["environment"] = environment_from_dict(values.get("environment") or {})
        return ClusterSpec(**values)
    except InvalidSweep as error:
        raise InvalidSweep(f"cluster {fields.get('name', '(unnamed)')}: {error}") from None
    except (KeyError, TypeError) as error:
        raise InvalidSweep(f"cluster {fields.get('name', '(unnamed)')}: {error}") from None


def environment_from_dict(fields: Any) -> dict[str, str]:
    """Environment variables from plain data.

    Raises `InvalidSweep` for a name that is none, and for a value that is no text or number or cannot be printed.
    """
    if not isinstance(fields, Mapping):
        raise InvalidSweep(f"environment={fields!r} must be a mapping, NAME: VALUE")
    environment: dict[str, str] = {}
    for name, value in fields.items():
        if not isinstance(name, str) or not _VARIABLE.fullmatch(name):
            raise InvalidSweep(f"environment: {name!r} cannot be the name of a variable (letters, digits and _)")
        if isinstance(value, bool) or not isinstance(value, (str, int, float)):
            raise InvalidSweep(f"environment: {name}={value!r} must be a text or a number; put it in quotes")
        if not str(value).isprintable():
            raise InvalidSweep(f"environment: {name}={value!r} has a character that cannot be printed")
        environment[name] = str(value)
    return environment


def to_dict(cluster: ClusterSpec) -> dict[str, Any]:
    """Plain nested dict of every field; the inverse of `cluster_from_dict`."""
    return dataclasses.asdict(cluster)

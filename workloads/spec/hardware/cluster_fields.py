"""Clusters as plain data (YAML, JSON): reading, checks of every value, and writing."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from workloads.spec.checks import build, choice, known_names, mapping, number, sequence, whole_number
from workloads.spec.cluster import ClusterSpec, DeviceSpec, HostSpec
from workloads.spec.errors import InvalidSweep
from workloads.spec.hardware.network import (
    BANDWIDTH,
    RATE_CHECKS,
    Range,
    amount,
    check_tier_values,
    check_tiers,
    converted,
    link_from_dict,
    tiers_from_dict,
)
from workloads.spec.hardware.vendors import BACKENDS, refuse_wrong_backend
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

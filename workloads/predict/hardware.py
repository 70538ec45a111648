"""Lookup of the node that a table's row ran on: by the name of its device in any spelling, or by the name of a cluster.

A name is understood as a whole: ``GH200`` is no H200 although it holds the letters. Devices that share most but not all
rates with a described one are derived from it (`LIKE`); others need a cluster file.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from workloads.predict.words import Refused
from workloads.spec.cluster import ClusterSpec

LINKED = {"gb200": 72.0, "gb300": 72.0}
"""Number of devices that NVLink connects, if more than in a node."""
_OF_NAME: Mapping[str, str] = {
    "gb300": "gb300",
    "b300": "b300",
    "gb200": "gb200",
    "b200": "b200",
    "h200": "h200",
    "h100": "h100_efa",
    "a100": "a100_80gb",
}
"""Names of devices and their cluster files. Of several clusters with an H100 the study's is the default."""

_POWER_W: Mapping[str, float] = {
    "a100_40gb": 400, "a100_80gb": 400, "a800": 400, "h100_efa": 700, "h100_ib400": 700, "h200": 700, "h800": 700,
    "b200": 1000, "gb200": 1200, "b300": 1100, "gb300": 1400,
}  # fmt: skip
"""Power limit in W with which each device is delivered (data sheets)."""
CLOCK_OF_POWER = 1 / 3
"""Exponent: rate of products by power limit. Power grows with clock times voltage squared and voltage with the clock,
so a limit moves the clock by its cube root. Assumed, not measured here."""


class Like(NamedTuple):
    """A device that differs from a described one in a few rates."""

    base: str
    """Name of the described device."""
    said: str
    """The difference in words, with its source."""
    links: float = 1.0
    """Rate of its NVLink over that of the described device."""
    flops: float = 1.0
    memory_bandwidth: float | None = None
    memory_bytes: int | None = None


LIKE: Mapping[str, Like] = {
    "h800": Like("h100", "H100 with NVLink of 400 instead of 900 GB/s (data sheet)", links=400 / 900),
    "a800": Like("a100", "A100 with NVLink of 400 instead of 600 GB/s (data sheet)", links=400 / 600),
    "h20": Like(
        "h100",
        "H100 with 148 instead of 989 TFLOP/s, 96 GB at 4.0 TB/s (data sheet)",
        flops=148 / 989,
        memory_bandwidth=4.0e12,
        memory_bytes=96 * 10**9,
    ),
}
_NOT_DESCRIBED: Mapping[str, str] = {
    "gh200": "a GH200 is no H200: it has 96 or 144 GB, and 1, 4 or 32 of them share NVLink",
    "pcie": "cards for PCIe have lower rates and no NVSwitch",
    "nvl": "NVL cards have other rates and memory, and NVLink only between pairs",
}
"""Names and parts of names of devices for which no cluster ships, and why the nearest one does not describe them."""
_HARMLESS = r"nvidia|tesla|hgx|dgx|sxm[2-6]?|hbm[23]e?|tensor|core|gpu|ac|nvl ?(?:36|72)|grace|blackwell|hopper|ampere"
_MEMORY: Mapping[str, tuple[int, ...]] = {
    "a100": (80, 40), "a800": (80,), "h100": (80,), "h800": (80,), "h20": (96,), "h200": (141, 144),
    "b200": (180, 186, 192), "gb200": (186, 192), "b300": (262, 268, 270, 275, 288), "gb300": (279, 288),
}  # fmt: skip
"""Sizes in GB under which each device is sold or reported; the first one is that of the cluster file."""


def cluster_of(device: str, name: str, clusters: Mapping[str, ClusterSpec], note: list[str]) -> ClusterSpec:
    """The cluster of a row, from its cells ``gpu`` and ``cluster``, of which one may be empty. Assumptions are added to
    ``note``.

    Raises `Refused` for a name that is not known, and if the cluster has another device.
    """
    if not name:
        try:
            return _of_device(device, clusters, note)
        except Refused:
            named = [one for one in clusters.values() if _is_of(device, one)]
            if len(named) == 1:
                return named[0]
            raise
    cluster = clusters.get(name)
    if cluster is None:
        raise Refused(f"cluster {name!r} is not known; known: {', '.join(sorted(clusters))}")
    if not device or _is_of(device, cluster):
        return cluster
    try:
        meant = _of_device(device, clusters, [])
    except Refused:
        note.append(f"gpu {device!r}: taken as the {cluster.device.name} of cluster {name}")
        return cluster
    if meant.device != cluster.device:
        raise Refused(f"gpu {device!r} is not the device of cluster {name} ({cluster.device.name}); leave one out")
    return cluster


def note_links(gpus: float, cluster: ClusterSpec, clusters: Mapping[str, ClusterSpec], note: list[str]) -> None:
    """Says which links between nodes were assumed for a row without a cluster."""
    if cluster.inter_node is None or gpus <= max(cluster.devices_per_node, LINKED.get(cluster.name, 0)):
        return
    others = [
        f"{name} has {other.inter_node.bandwidth / 1e9:g}"
        for name, other in sorted(clusters.items())
        if other.device == cluster.device and name != cluster.name and other.inter_node is not None
    ]
    note.append(
        f"cluster not given: {cluster.name}, {cluster.inter_node.bandwidth / 1e9:g} GB/s a device between nodes"
        + (f" ({', '.join(others)})" if others else "")
    )


def _is_of(device: str, cluster: ClusterSpec) -> bool:
    """Whether a cluster has the device of this name."""
    return _reported(device) in map(_reported, (cluster.device.name, *cluster.device.driver_names))


def power_factor(power_w: float, cluster: ClusterSpec, note: list[str]) -> float:
    """`Points.clock` of a row with a power limit in W; 1 if the limit is NaN, usual or above it."""
    usual = _POWER_W.get(cluster.name)
    if math.isnan(power_w) or usual == power_w:
        return 1.0
    if usual is None:
        note.append(f"power_w {power_w:g}: ignored, the usual limit of {cluster.device.name} is not known")
        return 1.0
    if power_w > usual:
        note.append(f"power_w {power_w:g}: ignored, above the usual {usual:g} W of {cluster.device.name}")
        return 1.0
    if power_w < 0.2 * usual:
        raise Refused(f"power_w {power_w:g} is no limit of {cluster.device.name}, whose usual one is {usual:g} W")
    factor = (power_w / usual) ** CLOCK_OF_POWER
    note.append(f"power_w {power_w:g} of {usual:g}: products at {factor:.2f} of their rate (cube root)")
    return float(factor)


def _of_device(device: str, clusters: Mapping[str, ClusterSpec], note: list[str]) -> ClusterSpec:
    """The default cluster of a device's name."""
    words = _reported(device)
    if words.startswith("gh200"):
        raise _not_described(device, "gh200")
    known = [*_OF_NAME, *LIKE]
    named = re.match(rf"({'|'.join(known)})(?![0-9a-z])", words)
    if named is None:
        raise Refused(f"gpu {device!r} is not known; known: {', '.join(sorted(map(str.upper, known)))}")
    rest, size = words[named.end() :], None
    if found := re.search(r"(?<![0-9])(\d+) ?(?:g|gb|gib)(?![a-z])", rest):
        size, rest = int(found[1]), rest.replace(found[0], " ")
    left = " ".join(re.sub(rf"\b(?:{_HARMLESS})\b", " ", rest).split())
    for part in ("pcie", "nvl"):
        if part in left.split():
            raise _not_described(device, part)
    if left:
        raise Refused(f"gpu {device!r}: {left!r} is not known; known: {named[1].upper()} with a form (SXM) or memory")
    if size is not None and size not in _MEMORY[named[1]]:
        sizes = " or ".join(f"{one} GB" for one in _MEMORY[named[1]])
        raise Refused(f"gpu {device!r}: an {named[1].upper()} with {sizes} is described, none with {size} GB")
    like = LIKE.get(named[1])
    base = "a100_40gb" if size == 40 else _OF_NAME[named[1] if like is None else like.base]
    if like is None:
        return clusters[base]
    note.append(f"gpu {device!r}: {like.said}")
    return _derived(named[1], clusters[base], like)


def _reported(device: str) -> str:
    """A device's name in lower case, without its maker and punctuation: ``NVIDIA-H200 SXM`` is ``h200 sxm``."""
    words = re.sub(r"[^a-z0-9]+", " ", device.lower()).strip()
    return re.sub(r"^(?:(?:nvidia|tesla|hgx|dgx|gpu) )*", "", words)


def _not_described(device: str, part: str) -> Refused:
    return Refused(
        f"gpu {device!r} is not known: {_NOT_DESCRIBED[part]}; name the nearest cluster in the column cluster, or your "
        "own with --conf"
    )


def _derived(name: str, cluster: ClusterSpec, like: Like) -> ClusterSpec:
    device = cluster.device
    peaks = {precision: like.flops * rate for precision, rate in device.peak_flops.items()}
    device = dataclasses.replace(
        device,
        name=name.upper(),
        driver_names=(name.upper(),),
        peak_flops=peaks,
        memory_bandwidth=like.memory_bandwidth or device.memory_bandwidth,
        memory_bytes=like.memory_bytes or device.memory_bytes,
        source=like.said,
    )
    intra = dataclasses.replace(
        cluster.intra_node,
        bandwidth=like.links * cluster.intra_node.bandwidth,
        source=f"{like.links:.3g} of that of {cluster.name}: {like.said}",
    )
    return dataclasses.replace(cluster, name=name, device=device, intra_node=intra)

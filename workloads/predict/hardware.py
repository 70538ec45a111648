"""Lookup of the node that a table's row ran on: by the name of its device in any spelling, or by the name of a cluster.

A name is understood as a whole: ``GH200`` is no H200 although it holds the letters, and ``L40`` is no L40S.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping

from workloads.predict.cells.words import Refused
from workloads.spec.cluster import ClusterSpec

_OF_NAME: Mapping[str, Mapping[int, str]] = {
    "gb300": {279: "gb300", 288: "gb300"},
    "b300": {262: "b300", 268: "b300", 270: "b300", 275: "b300", 288: "b300"},
    "gb200": {186: "gb200", 192: "gb200"},
    "b200": {180: "b200", 186: "b200", 192: "b200"},
    "gh200": {96: "gh200_96gb", 120: "gh200_96gb", 480: "gh200_96gb", 144: "gh200_144gb"},
    "h200": {141: "h200", 144: "h200"},
    "h100": {80: "h100_ib400"},
    "h800": {80: "h800"},
    "h20": {96: "h20"},
    "a100": {80: "a100_80gb", 40: "a100_40gb"},
    "a800": {80: "a800_80gb"},
    "l40s": {45: "l40s", 48: "l40s"},
    "mi300x": {192: "mi300x"},
    "mi325x": {256: "mi325x"},
    "mi355x": {288: "mi355x"},
}
"""Names of devices, each with the sizes in GB under which it is sold or reported, and the cluster file of each; that of
the first is taken without a size. Of several clusters with an H100
that of NVIDIA's reference design is the default. The names of GH200 count
the memory of its CPU."""
_NEEDS_SIZE = {"gh200": "a GH200 has 96 or 144 GB; write GH200 96GB or GH200 144GB"}
"""Names that are two devices."""
CLOCK_OF_POWER = 1 / 3
"""Exponent: rate of products by power limit. Power grows with clock times voltage squared and voltage with the clock,
so a limit moves the clock by its cube root. Assumed, not measured here."""
CALIBRATED_AT = 0.68
"""``matmul_efficiency`` of the clusters from whose rows the form's default share of peak was set. The share of another
cluster scales the form by its ratio to this one."""
_NOT_DESCRIBED: Mapping[str, str] = {
    "pcie": "cards for PCIe have lower rates and no NVSwitch",
    "nvl": "NVL cards have other rates and memory, and NVLink only between pairs",
}
"""Parts of names of devices for which no cluster ships, and why the nearest one does not describe them."""
_HARMLESS = (
    r"nvidia|amd|instinct|tesla|hgx|dgx|sxm[2-6]?|oam|hbm[23]e?|tensor|core|gpu|ac|nvl ?(?:36|72)|grace|blackwell|"
    r"hopper|ampere|ada|lovelace"
)


def cluster_of(device: str, name: str, clusters: Mapping[str, ClusterSpec], note: list[str]) -> ClusterSpec:
    """The cluster of a row, from its cells ``gpu`` and ``cluster``, of which one may be empty. Assumptions are added to
    ``note``.

    Raises `Refused` for a name that is not known, and if the cluster has another device.
    """
    if not name:
        try:
            return _of_device(device, clusters)
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
        meant = _of_device(device, clusters)
    except Refused:
        note.append(f"gpu {device!r}: taken as the {cluster.device.name} of cluster {name}")
        return cluster
    if meant.device != cluster.device:
        raise Refused(f"gpu {device!r} is not the device of cluster {name} ({cluster.device.name}); leave one out")
    return cluster


def refuse_too_many(gpus: float, cluster: ClusterSpec) -> None:
    """Raises `Refused` if the network does not join so many devices."""
    most = cluster.joined_devices
    if most is None or gpus <= most:
        return
    if cluster.outside:
        raise Refused(f"the outermost tier of cluster {cluster.name} joins {most} devices, and the row has {gpus:g}")
    raise Refused(f"{gpus:g} devices need several nodes, and cluster {cluster.name} has no link between nodes")


def note_links(gpus: float, cluster: ClusterSpec, clusters: Mapping[str, ClusterSpec], note: list[str]) -> None:
    """Says which links between nodes were assumed for a row without a cluster."""
    if not cluster.outside or gpus <= cluster.domain:
        return
    others = [
        f"{name} has {other.outside[0].bandwidth / 1e9:g}"
        for name, other in sorted(clusters.items())
        if is_alternative(other, cluster)
    ]
    note.append(
        f"cluster not given: {cluster.name}, {cluster.outside[0].bandwidth / 1e9:g} GB/s a device between nodes"
        + (f" ({', '.join(others)})" if others else "")
    )


def is_alternative(other: ClusterSpec, cluster: ClusterSpec) -> bool:
    """Whether ``other`` has the same device and a network with which it predicts otherwise. A list of more tiers of the
    same rates is no other network."""

    def described(one: ClusterSpec) -> tuple[object, ...]:
        rest = dataclasses.replace(one, name="", intra_node=None, inter_node=None, linked_devices=None, tiers=())
        inside, *outside = [(tier.bandwidth, tier.latency_s) for tier in (one.inside, *one.outside)]
        return rest, one.domain, inside, {*outside}

    alike = other.name == cluster.name or other.device != cluster.device
    return not alike and bool(other.outside) and described(other) != described(cluster)


def _is_of(device: str, cluster: ClusterSpec) -> bool:
    """Whether a cluster has the device of this name."""
    return _reported(device) in map(_reported, (cluster.device.name, *cluster.device.driver_names))


def power_factor(power_w: float, cluster: ClusterSpec, note: list[str]) -> float:
    """`Points.clock` of a row with a power limit in W; 1 if the limit is NaN, usual or above it."""
    usual = cluster.device.power_w
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


def library_factor(cluster: ClusterSpec, note: list[str]) -> float:
    """Rate of products over that on H200, from which the form's share of peak was set; 1 if not known."""
    share = cluster.matmul_efficiency
    if share is None or share == CALIBRATED_AT:
        return 1.0
    note.append(f"{cluster.device.name}: products at {share:g} of peak, {CALIBRATED_AT:g} on H200")
    return share / CALIBRATED_AT


def _of_device(device: str, clusters: Mapping[str, ClusterSpec]) -> ClusterSpec:
    """The default cluster of a device's name."""
    words = _reported(device)
    named = re.match(rf"({'|'.join(_OF_NAME)})(?![0-9a-z])", words)
    if named is None:
        raise Refused(f"gpu {device!r} is not known; known: {', '.join(sorted(map(str.upper, _OF_NAME)))}")
    rest, size, sizes = words[named.end() :], None, _OF_NAME[named[1]]
    if found := re.search(r"(?<![0-9])(\d+) ?(?:g|gb|gib)(?![a-z])", rest):
        size, rest = int(found[1]), rest.replace(found[0], " ")
    left = " ".join(re.sub(rf"\b(?:{_HARMLESS})\b", " ", rest).split())
    for part, why in _NOT_DESCRIBED.items():
        if part in left.split():
            raise Refused(
                f"gpu {device!r} is not known: {why}; name the nearest cluster in the column cluster, or your own with "
                "--conf"
            )
    if left:
        raise Refused(f"gpu {device!r}: {left!r} is not known; known: {named[1].upper()} with a form (SXM) or memory")
    if size is None:
        if named[1] in _NEEDS_SIZE:
            raise Refused(f"gpu {device!r}: {_NEEDS_SIZE[named[1]]}")
        size = next(iter(sizes))
    if size not in sizes:
        known = " or ".join(f"{one} GB" for one in sizes)
        raise Refused(f"gpu {device!r}: an {named[1].upper()} with {known} is described, none with {size} GB")
    return clusters[sizes[size]]


def _reported(device: str) -> str:
    """A device's name in lower case, without its maker, punctuation and references such as ``(see note)``:
    ``NVIDIA-H200 SXM`` is ``h200 sxm``."""
    words = re.sub(r"[^a-z0-9]+", " ", re.sub(r"\(see [^)]*\)", "", device.lower())).strip()
    return re.sub(r"^(?:(?:nvidia|amd|instinct|tesla|hgx|dgx|gpu) )*", "", words)

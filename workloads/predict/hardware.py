"""From the name of a device in a table, however it is written, to what is known of it and its nodes."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache

from workloads.spec.cluster import ClusterSpec

OF_NAME: tuple[tuple[str, str], ...] = (
    (r"gb300", "gb300"),
    (r"b300", "b300"),
    (r"gb200", "gb200"),
    (r"b200", "b200"),
    (r"gh200.*144|h200", "h200"),
    (r"h100|h800|gh200", "h100_efa"),
    (r"a100.*40 ?g", "a100_40gb"),
    (r"a100|a800", "a100_80gb"),
)
"""Cluster files by what a name holds; the first that fits counts. Names that also say another kind are refused."""
LINKED = {"gb200": 72.0, "gb300": 72.0}
"""Devices that NVLink joins, where they are more than a node has."""
_OTHER = re.compile(r"pcie|nvl\b|h20\b|h200 ?nvl|96 ?gb|64 ?gb")
"""Devices that share a name with the ones above and have other rates."""


@lru_cache(maxsize=256)
def cluster_name(device: str) -> str | None:
    """The cluster file that describes a device's node; None for a device that none describes."""
    name = device.lower().replace("_", " ").replace("-", " ")
    for pattern, cluster in OF_NAME:
        if re.search(pattern, name):
            return cluster
    return None


def like_another(device: str) -> bool:
    """Whether its name says that its rates differ from the device's that it is taken for (PCIe, other memory)."""
    return _OTHER.search(device.lower().replace("-", " ")) is not None


def device_of(device: str, clusters: Mapping[str, ClusterSpec]) -> ClusterSpec | None:
    """The cluster of a device's name; None where it is not known."""
    name = cluster_name(device)
    return clusters.get(name) if name is not None else None

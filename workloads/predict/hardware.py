"""Lookup of devices and nodes by the name of a device in a table, in any spelling."""

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
"""Patterns of device names and their cluster files; the first match counts. Names that also match `_OTHER` are
noted."""
LINKED = {"gb200": 72.0, "gb300": 72.0}
"""Number of devices that NVLink connects, if more than in a node."""
_OTHER = re.compile(r"pcie|nvl\b|h20\b|h200 ?nvl|96 ?gb|64 ?gb")
"""Devices that share a name with those above and have other rates."""


@lru_cache(maxsize=256)
def cluster_name(device: str) -> str | None:
    """Name of the cluster file that describes a device's node; None for an unknown device."""
    name = device.lower().replace("_", " ").replace("-", " ")
    for pattern, cluster in OF_NAME:
        if re.search(pattern, name):
            return cluster
    return None


def like_another(device: str) -> bool:
    """Whether a name indicates rates that differ from those of the device it is mapped to (PCIe, other memory)."""
    return _OTHER.search(device.lower().replace("-", " ")) is not None


def device_of(device: str, clusters: Mapping[str, ClusterSpec]) -> ClusterSpec | None:
    """Cluster of a device's name; None if unknown."""
    name = cluster_name(device)
    return clusters.get(name) if name is not None else None

"""Clusters of devices that the engine cannot run on: everything is predicted for them, and commands that run are
refused."""

from __future__ import annotations

from workloads.spec.cluster import ClusterSpec
from workloads.spec.errors import InvalidSweep


def planned_only(cluster: ClusterSpec) -> str | None:
    """One sentence on why nothing runs on the cluster; None if points can run there."""
    if not cluster.is_planned_only:
        return None
    return f"cluster {cluster.name} ({cluster.device.name}) is planned only: the engine runs on CUDA"


def refuse_planned_only(cluster: ClusterSpec) -> None:
    """Raises `InvalidSweep` with one line if nothing runs on the cluster."""
    if (why := planned_only(cluster)) is not None:
        raise InvalidSweep(f"{why}; plan, advise, explain and the report work with it, the rest on NVIDIA GPUs")

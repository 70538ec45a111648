"""Upper limits for a point where it will run: devices of the launcher, memory of this machine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

from sweep.composing.config import SweepConfig
from sweep.planning.point_verdict import DeviceLimit
from workloads.contract.protocol import Method

if TYPE_CHECKING:
    from launchers.slurm.options import SlurmOptions

_CGROUP_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))
"""Files with a container's memory limit: cgroup v2 and v1."""


def device_limit(
    config: SweepConfig, method: Method, slurm: SlurmOptions | None, here: int | None
) -> DeviceLimit | None:
    """The most devices that the launcher can give one point; None: no limit.

    ``here``: number of devices of this machine if the points run on it. None: this machine does not matter, so that a
    plan for a GPU cluster can be made anywhere. A rehearsal needs one device, whatever the layout.
    """
    if method != "measured":
        return None
    if slurm is not None:
        if slurm.max_nodes is None:
            return None
        devices = slurm.max_nodes * config.cluster.devices_per_node
        return DeviceLimit(devices, f"launcher.max_nodes={slurm.max_nodes} gives {devices}")
    if here is not None:
        return DeviceLimit(here, f"this machine gives {here}; launcher=rehearse needs one")
    asked = config.launcher.get("num_devices")
    if isinstance(asked, int):
        return DeviceLimit(asked, f"launcher.num_devices={asked} gives {asked}; launcher=rehearse needs one")
    return None


def host_bytes(config: SweepConfig, method: Method) -> int | None:
    """Bytes of memory shared by all processes of a point, if they are CPU processes on this machine.

    None: every device has its own memory, or the points run on another machine.
    """
    on_cpu_here = method == "measured" and config.launcher_kind == "local" and config.cluster.backend == "cpu"
    return machine_memory_bytes() if on_cpu_here else None


def machine_memory_bytes() -> int | None:
    """Bytes of memory of this machine, or of the container of this process if that is less; None: unknown."""
    try:
        limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    except (AttributeError, OSError, ValueError):
        limits = []
    for path in _CGROUP_LIMITS:
        try:
            text = path.read_text().strip()
        except OSError:
            continue
        if text.isdigit():  # "max" means no limit
            limits.append(int(text))
    return min(limits, default=None)

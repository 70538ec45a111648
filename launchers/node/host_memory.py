"""Counts how often the kernel has killed a process of this control group because host memory ran out. Linux, cgroup v1
and v2.

Version 2 counts such kills in ``memory.events``, version 1 in ``memory.oom_control`` (Linux 4.13 and newer). Older
kernels of version 1 only count in ``memory.failcnt`` how often a group was at its limit, and they do so in the group
that has the limit: the group of the job or step, above the task's own.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path


def oom_kills(proc: Path = Path("/proc/self"), mounts: Path = Path("/sys/fs/cgroup")) -> int:
    """The count so far; only its growth has a meaning. 0 where the kernel does not count.

    ``proc``: the ``/proc`` folder of a process in the group. ``mounts``: where the control groups are mounted.
    """
    try:
        lines = (proc / "cgroup").read_text().splitlines()
    except OSError:
        return 0
    groups = {names: path for _, names, path in (line.split(":", 2) for line in lines if line.count(":") >= 2)}
    for names, path in groups.items():
        if "memory" in names.split(","):
            return _version_1(mounts / names, path)
    if "" in groups:
        return _field(_innermost(mounts, groups[""]) / "memory.events", "oom_kill") or 0
    return 0


def _version_1(mount: Path, path: str) -> int:
    group = _innermost(mount, path)
    kills = _field(group / "memory.oom_control", "oom_kill")
    if kills is not None:
        return kills
    return sum(_number(above / "memory.failcnt") for above in _up_to(group, mount))


def _innermost(mount: Path, path: str) -> Path:
    """The folder of the group. In a container the path may be the host's, and the mount the container's own group."""
    group = mount / path.lstrip("/")
    return group if group.is_dir() else mount


def _up_to(group: Path, mount: Path) -> Iterator[Path]:
    yield group
    while group != mount:
        group = group.parent
        yield group


def _field(path: Path, name: str) -> int | None:
    """The number after ``name`` in a file of names and numbers."""
    try:
        fields = dict(line.split(maxsplit=1) for line in path.read_text().splitlines() if " " in line)
        return int(fields[name])
    except (OSError, KeyError, ValueError):
        return None


def _number(path: Path) -> int:
    try:
        return int(path.read_text())
    except (OSError, ValueError):
        return 0

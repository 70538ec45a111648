"""What sinfo and scontrol say about the nodes of a partition: how many, and which GPUs each of them has."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from launchers.slurm.environment import command_environment, several_clusters
from results.errors import UltrasweepError
from results.text.numbers import MIB, listed, plural
from results.text.printable import one_line

PARTITIONS = ("sinfo", "-h", "-a", "-o", "%R")
NODES = ("scontrol", "-a", "show", "node", "-o")
_LIMIT_S = 60.0
_FIELD = re.compile(r"(?:^|\s)(NodeName|Gres|State|Partitions|RealMemory)=(\S*)")
_GPU = re.compile(r"(?:^|,)gpu:(?:([^:,()]+):)?([0-9]+)")
_PART = re.compile(r"[0-9]+g\.[0-9]+gb", re.IGNORECASE)
"""Profile of MIG in a type of GPU, such as ``a100_1g.10gb``."""
_AWAY = frozenset({"DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "FUTURE", "MAINT"})
"""States of a node that runs no job now; ``*`` after a state: it does not answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SlurmNodes:
    """Nodes with equal GPUs."""

    partition: str
    count: int
    away: int
    """Nodes that run no job now: down, drained ..."""
    gpu_type: str | None
    """Type of the GPUs as Slurm calls it; None: it has no name."""
    gpus: int
    """GPUs of each node."""
    memory_bytes: int | None = None
    """Memory of the node that has least, as Slurm is configured (RealMemory); None: it says none."""

    @property
    def gres(self) -> str:
        return _gres(self.gpu_type, self.gpus)


def read_nodes(partition: str, gres: str | None, run: Callable[[Sequence[str]], str] | None = None) -> SlurmNodes:
    """The nodes of a partition, or of several separated by commas. ``gres``: only nodes with these GPUs, in the form
    ``gpu:h100:8``. ``run`` returns the output of a command; None: call it.

    Raises `UltrasweepError` with one line for a partition that does not exist, without GPUs, or with several kinds.
    """
    call = run or _call
    existing = sorted({line.strip() for line in call(PARTITIONS).splitlines() if line.strip()})
    wanted = [name.strip() for name in partition.split(",") if name.strip()]
    if unknown := [name for name in wanted if name not in existing] or ([] if wanted else [partition]):
        raise UltrasweepError(f"no partition {listed(unknown)}; Slurm has {listed(existing, 12) or 'none'}")
    nodes: dict[str, tuple[str, str, int]] = {}
    for line in call(NODES).splitlines():
        fields = dict(_FIELD.findall(line))
        if "NodeName" in fields and set(wanted) & set(fields.get("Partitions", "").split(",")):
            memory = int(fields["RealMemory"]) if fields.get("RealMemory", "").isdigit() else 0
            nodes[fields["NodeName"]] = fields.get("Gres", ""), fields.get("State", ""), memory
    return _of_one_kind(",".join(wanted), nodes, gres)


def _of_one_kind(partition: str, nodes: dict[str, tuple[str, str, int]], gres: str | None) -> SlurmNodes:
    if not nodes:
        raise UltrasweepError(f"partition {partition} has no nodes that `scontrol show node` shows to you")
    of_node = {name: _gpus(text) for name, (text, _, _) in nodes.items()}
    with_gpus = {name: gpus for name, gpus in of_node.items() if gpus}
    if not with_gpus:
        raise UltrasweepError(
            f"Slurm knows of no GPU on the {plural(len(nodes), 'node')} of partition {partition} (no gres gpu); choose "
            "another partition, or use --from-this-machine on one of its nodes"
        )
    kinds = Counter(",".join(_gres(*gpu) for gpu in gpus) for gpus in with_gpus.values())
    counted = listed([f"{count} with {kind}" for kind, count in kinds.most_common()])
    if gres is not None and gres not in kinds:
        raise UltrasweepError(f"--gres {gres}: no node of partition {partition} has that; it has {counted}")
    if gres is None and len(kinds) > 1:
        raise UltrasweepError(
            f"partition {partition} has nodes of {len(kinds)} kinds: {counted}; a cluster file describes one kind: "
            f"give --gres {kinds.most_common(1)[0][0]}"
        )
    kind = gres or next(iter(kinds))
    chosen = {name: gpus for name, gpus in with_gpus.items() if ",".join(_gres(*gpu) for gpu in gpus) == kind}
    first = next(iter(chosen.values()))
    if any(gpu_type is not None and _PART.search(gpu_type) for gpu_type, _ in first):
        raise UltrasweepError(
            f"partition {partition} has parts of GPUs (MIG), {kind}: a process can use only one; choose another "
            "partition"
        )
    if len(first) > 1:
        raise UltrasweepError(
            f"the nodes of partition {partition} have GPUs of several kinds each, {kind}; a cluster file describes one"
        )
    gpu_type, count = first[0]
    away = sum(_is_away(nodes[name][1]) for name in chosen)
    least = min(nodes[name][2] for name in chosen)  # 1 MiB is Slurm's default for nodes that nobody has described
    memory = least * MIB if least > 1 else None
    size = len(chosen)
    return SlurmNodes(partition=partition, count=size, away=away, gpu_type=gpu_type, gpus=count, memory_bytes=memory)


def _gpus(text: str) -> tuple[tuple[str | None, int], ...]:
    """Type and number of the GPUs in a node's ``Gres``, such as ``gpu:h100:8(S:0-1),nvme:1``."""
    bare = re.sub(r"\([^)]*\)", "", text)
    return tuple((gpu_type or None, int(count)) for gpu_type, count in _GPU.findall(bare) if int(count))


def _is_away(state: str) -> bool:
    return "*" in state or any(word.rstrip("~#!%$@^-") in _AWAY for word in state.upper().split("+"))


def _gres(gpu_type: str | None, count: int) -> str:
    return f"gpu:{gpu_type}:{count}" if gpu_type else f"gpu:{count}"


def _call(command: Sequence[str]) -> str:
    if shutil.which(command[0]) is None:
        raise UltrasweepError(f"{command[0]} is not on PATH here; run the command on a login node of the cluster")
    if trouble := several_clusters(os.environ):
        raise UltrasweepError(trouble)
    try:
        done = subprocess.run(
            list(command),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_LIMIT_S,
            check=False,
            env=command_environment(os.environ),
        )
    except subprocess.TimeoutExpired:
        raise UltrasweepError(f"{command[0]} did not answer within {_LIMIT_S:.0f} s") from None
    if done.returncode != 0:
        words = one_line(done.stderr.strip()) or f"exit code {done.returncode}"
        raise UltrasweepError(f"{command[0]}: {words}")
    return done.stdout

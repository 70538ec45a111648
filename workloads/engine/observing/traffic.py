"""Counts what one rank sends: calls and bytes of every collective and message, by axis of the layout.

A dispatch mode sees each call on its way to the process group, whoever makes it: the tensor-parallel layers, FSDP, the
pipeline, the sums after the backward. It sees compiled blocks too, but nothing can be compiled while it is active. So
it must not watch a step in which blocks are compiled; and because it costs host time, it never watches a timed one.

`workloads.costs.traffic.sent` defines the bytes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch._C._distributed_c10d import _resolve_process_group
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from workloads.costs.traffic.collectives import Collective
from workloads.costs.traffic.sent import SentTally, Traffic
from workloads.engine.collectives.groups import Groups

_AXES_OF_MESH = {"replicate": "dp_replicate", "shard": "dp_shard"}


@dataclass(frozen=True, slots=True)
class _Kind:
    """Collective of one operation, and the index of the argument that holds its whole buffer."""

    op: Collective
    buffer: int
    per_rank: bool = False
    """The buffer belongs to one rank: the whole one is larger by the number of ranks of the group."""


_KINDS: Mapping[str, _Kind | None] = {
    "c10d::allreduce_": _Kind("all_reduce", 0),
    "c10d::allreduce_coalesced_": _Kind("all_reduce", 0),
    "c10d::_allgather_base_": _Kind("all_gather", 0),
    "c10d::allgather_": _Kind("all_gather", 0),
    "c10d::allgather_into_tensor_coalesced_": _Kind("all_gather", 0),
    "c10d::_reduce_scatter_base_": _Kind("reduce_scatter", 1),
    "c10d::reduce_scatter_": _Kind("reduce_scatter", 1),
    "c10d::reduce_scatter_tensor_coalesced_": _Kind("reduce_scatter", 1),
    "c10d::alltoall_": _Kind("all_to_all", 1),
    "c10d::alltoall_base_": _Kind("all_to_all", 1),
    "c10d::send": _Kind("p2p", 0),
    # Messages count where they are sent; these operations carry no other data.
    "c10d::recv_": None,
    "c10d::recv_any_source_": None,
    "c10d::barrier": None,
    "c10d::monitored_barrier_": None,
    "_c10d_functional::all_reduce": _Kind("all_reduce", 0),
    "_c10d_functional::all_reduce_": _Kind("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced": _Kind("all_reduce", 0),
    "_c10d_functional::all_reduce_coalesced_": _Kind("all_reduce", 0),
    "_c10d_functional::all_gather_into_tensor": _Kind("all_gather", 0, per_rank=True),
    "_c10d_functional::all_gather_into_tensor_out": _Kind("all_gather", 0, per_rank=True),
    "_c10d_functional::all_gather_into_tensor_coalesced": _Kind("all_gather", 0, per_rank=True),
    "_c10d_functional::reduce_scatter_tensor": _Kind("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_out": _Kind("reduce_scatter", 0),
    "_c10d_functional::reduce_scatter_tensor_coalesced": _Kind("reduce_scatter", 0),
    "_c10d_functional::all_to_all_single": _Kind("all_to_all", 0),
    "_c10d_functional::wait_tensor": None,
    "_c10d_functional::_wrap_tensor_autograd": None,
}
"""Kinds by the name of an operation. A name that is missing here makes the whole count unknown."""


class TrafficCounter(TorchDispatchMode):
    """Counts while it is active. ``axes``: axis of every process group, by the group's registered name.

    ``devices_per_node``: ranks fill one node after the other; None: unknown.
    """

    def __init__(self, axes: Mapping[str, str], devices_per_node: int | None = None) -> None:
        super().__init__()
        self._tally = SentTally(dist.get_rank(), devices_per_node)
        self._groups = {
            name: (axis, dist.get_process_group_ranks(_resolve_process_group(cast(Any, name))))
            for name, axis in axes.items()
        }
        self._watched = False
        self._unknown: str | None = None

    def __enter__(self) -> TrafficCounter:
        self._watched = True
        super().__enter__()
        return self

    @property
    def problem(self) -> str | None:
        """Reason why the traffic is unknown: no step was watched, or a call of unknown kind or axis was made. None if
        it is known."""
        return self._unknown if self._watched else "no step was watched"

    @property
    def traffic(self) -> list[Traffic] | None:
        """Traffic sent so far; None if it is unknown."""
        return None if self.problem is not None else self._tally.result()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types:
            return NotImplemented
        if getattr(func, "namespace", "") in ("c10d", "_c10d_functional"):
            self._note(func._schema.name, args)
        return func(*args, **(kwargs or {}))

    def _note(self, name: str, args: tuple[Any, ...]) -> None:
        if name not in _KINDS:
            self._give_up(f"{name} is not known")
        elif (kind := _KINDS[name]) is not None:
            group = _group_name(args)
            if group not in self._groups:
                self._give_up(f"{name} runs in the group {group!r}, which belongs to no axis")
                return
            axis, ranks = self._groups[group]
            size = sum(_bytes(args[kind.buffer])) * (len(ranks) if kind.per_rank else 1)
            self._tally.add(axis, kind.op, size, [ranks[args[2]]] if kind.op == "p2p" else ranks)

    def _give_up(self, why: str) -> None:
        self._unknown = self._unknown or why


def axes_of(groups: Groups) -> dict[str, str]:
    """Axis of every process group that this rank is in, by the group's registered name.

    If one axis has all ranks, torch uses the group of all ranks for it; sums over all ranks then count to this axis,
    even if torch makes two groups. Data parallelism of experts has the same axis names as that of the other parameters.
    """
    meshes = [groups.data_mesh, *([groups.expert_mesh] if groups.expert_mesh is not None else [])]
    of_data, *of_experts = ([(_AXES_OF_MESH[dim], mesh.get_group(dim)) for dim in _AXES_OF_MESH] for mesh in meshes)
    layer_axes = [(axis.name, axis.group) for axis in groups.axes.values() if axis.group is not None]
    axes = [
        *of_data,
        *layer_axes,
        *(("tp", group) for group in groups.copies.values()),
        *(("pp", group) for group in groups.channels.values()),
        *itertools.chain(*of_experts),
    ]
    everyone = dist.get_world_size()
    of_all = next((axis for axis, group in axes if axis != "ep" and group.size() == everyone), "world")
    named: dict[str, str] = {group.group_name: axis for axis, group in reversed(axes)}
    for axis, group in axes:
        if axis.startswith("dp") and group.size() == everyone:
            named[group.group_name] = of_all
    if groups.tied_embedding is not None:
        named[groups.tied_embedding.group_name] = "tied"
    if groups.stage is not None:
        named.setdefault(groups.stage.group_name, "stage")
    if dist.group.WORLD is not None:
        named[dist.group.WORLD.group_name] = of_all
    return named


def _group_name(args: tuple[Any, ...]) -> str | None:
    """Name of a call's group. Functional collectives pass it as their last string; the others pass the group itself."""
    for arg in reversed(args):
        if isinstance(arg, str):
            return arg
        if isinstance(arg, dist.ProcessGroup):
            return arg.group_name
        if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
            return dist.ProcessGroup.unbox(arg).group_name
    return None


def _bytes(buffer: Any) -> Iterator[int]:
    return (t.numel() * t.element_size() for t in tree_leaves(buffer) if isinstance(t, Tensor))

"""FSDP units: sizes of their messages, and number of gathers in a step. No torch here."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that FSDP gathers and reduces in one message."""

    shapes: tuple[tuple[int, ...], ...]
    """Shapes on one tensor-parallel rank."""
    reshard_after_forward: bool
    fp8_shapes: tuple[tuple[int, ...], ...] = ()
    """Shapes gathered in fp8, one byte per element; they are not among ``shapes``."""
    of_experts: bool = False
    """Whether it is sharded over the ranks that hold the same experts (`workloads.spec.mesh.expert_degrees`)."""
    around_previous: bool = False
    """Whether the previous unit in a stage's list is inside this one: its backward runs within this unit's."""

    def padded(self, shards: int) -> int:
        """Elements of all shards together: dim 0 is padded to a multiple of ``shards``."""
        return sum(_padded(shape, shards) for shape in self.shapes + self.fp8_shapes)

    def gathered(self, shards: int, compute: int) -> int:
        """Bytes of all shards together when gathered."""
        wide = sum(_padded(shape, shards) for shape in self.shapes)
        return compute * wide + sum(_padded(shape, shards) for shape in self.fp8_shapes)


def _padded(shape: tuple[int, ...], shards: int) -> int:
    return -(-shape[0] // shards) * shards * (shape[1] if len(shape) > 1 else 1)


class FsdpWalk:
    """Counts how often each unit is gathered. A unit's number is its index in ``units``, which are in order of the ends
    of their forwards."""

    def __init__(self, stage_unit: Unit | None, others: Sequence[Unit], *, keep_gathered: bool) -> None:
        self.units = [*others, *([stage_unit] if stage_unit is not None else [])]
        self.stage_unit = len(others) if stage_unit is not None else None
        self.keep_gathered = keep_gathered
        self.gathers = [0] * len(self.units)
        self._gathered: set[int] = set()
        self._order: list[int] = []
        """Units in the order in which their forwards have ended since the last step."""
        self._places: list[list[int]] = [[] for _ in self.units]
        """Places in that order whose backward has not begun, by unit."""

    def forward(self) -> None:
        if self.stage_unit is not None:  # its forward begins before all others and ends after them
            self._gather(self.stage_unit)
        for index, unit in enumerate(self.units):
            self._gather(index)
            if unit.reshard_after_forward:
                self._gathered.discard(index)
            self._places[index].append(len(self._order))
            self._order.append(index)

    def backward(self, *, last: bool) -> None:
        for index in reversed(range(len(self.units))):
            self._gather(index)
            place = self._places[index].pop()
            if place > 0:
                self._gather(self._order[place - 1])
            if index == self.stage_unit or self.units[index].around_previous:
                continue
            self._shard_again(index, last)
            if index + 1 < len(self.units) and self.units[index + 1].around_previous:
                self._shard_again(index + 1, last)
        if self.stage_unit is not None:
            self._shard_again(self.stage_unit, last)
        if last:
            self._gathered.clear()  # including units that were gathered unnecessarily
            self._order.clear()

    def _gather(self, index: int) -> None:
        if index not in self._gathered:
            self._gathered.add(index)
            self.gathers[index] += 1

    def _shard_again(self, index: int, last: bool) -> None:
        if last or not self.keep_gathered:
            self._gathered.discard(index)

"""Pipeline schedules as data: the ordered actions of every pipeline rank. No torch here.

The engine executes these lists, the timeline simulates them, and the report draws them, so that all three speak of the
same schedule. ``F`` is the forward of one micro-batch, ``B`` its backward (input and weight gradients together).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from workloads.errors import UnsupportedByEngine


@dataclass(frozen=True, slots=True)
class Action:
    """What a stage does with one micro-batch: forward (F) or backward (B)."""

    kind: Literal["F", "B", "I", "W"]
    microbatch: int
    """From 0."""
    chunk: int = 0


def gpipe(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """All forwards, then all backwards (GPipe, arXiv:1811.06965); holds every micro-batch's activations."""
    del stage, num_stages
    forwards = [Action("F", i) for i in range(num_microbatches)]
    return forwards + [Action("B", i) for i in range(num_microbatches)]


def one_f_one_b(stage: int, num_stages: int, num_microbatches: int) -> list[Action]:
    """Non-interleaved 1F1B (PipeDream-Flush, arXiv:2006.09503); holds ``min(num_stages - stage, m)`` micro-batches."""
    warmup = min(num_stages - stage - 1, num_microbatches)
    actions = [Action("F", i) for i in range(warmup)]
    for i in range(num_microbatches - warmup):
        actions += [Action("F", warmup + i), Action("B", i)]
    return actions + [Action("B", i) for i in range(num_microbatches - warmup, num_microbatches)]


_SCHEDULES: dict[str, Callable[[int, int, int], list[Action]]] = {
    "none": one_f_one_b,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
}


def schedule_actions(
    name: str, stage: int, num_stages: int, num_microbatches: int, virtual_stages: int = 1
) -> list[Action]:
    """Actions of pipeline rank ``stage``, in order. Raises `UnsupportedByEngine` for a schedule that has no list."""
    if name not in _SCHEDULES:
        raise UnsupportedByEngine(f"pp_schedule={name} is not available yet; use {' or '.join(sorted(_SCHEDULES))}")
    return _SCHEDULES[name](stage, num_stages, num_microbatches)


def microbatches_in_flight(actions: Sequence[Action]) -> int:
    """The most micro-batches, at any time, whose forward has run and whose backward has not."""
    held = most = 0
    for action in actions:
        held += 1 if action.kind == "F" else -1
        most = max(most, held)
    return most


def stage_at(name: str, rank: int, chunk: int, num_ranks: int) -> int:
    if name in ("zero_bubble_v", "dualpipe_v"):
        return rank if chunk == 0 else 2 * num_ranks - 1 - rank
    return chunk * num_ranks + rank


def place_of(name: str, stage: int, num_ranks: int, virtual_stages: int) -> tuple[int, int]:
    if name in ("zero_bubble_v", "dualpipe_v"):
        return (stage, 0) if stage < num_ranks else (2 * num_ranks - 1 - stage, 1)
    return stage % num_ranks, stage // num_ranks

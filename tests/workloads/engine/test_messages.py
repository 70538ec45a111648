"""What a stage sends is let go of once something that was made from it has come back."""

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
import torch
import torch.distributed as dist

from workloads.costs.shape.schedule import Action, place_of, schedule_actions, stage_at
from workloads.engine.training.messages import Messages


@dataclass
class NeverSeenToEnd:
    """A message as a host far ahead of its device sees it."""

    waited: bool = False

    def is_completed(self) -> bool:
        return False

    def wait(self) -> None:
        self.waited = True


def of_rank(schedule: str, rank: int, ranks: int, chunks: int) -> Messages:
    groups: Any = SimpleNamespace(
        rank=rank,
        device=torch.device("cpu"),
        experiment=SimpleNamespace(num_stages=ranks * chunks),
        channel=lambda *_: None,
        stage_of=lambda chunk: stage_at(schedule, rank, chunk, ranks),
        rank_of_stage=lambda stage: place_of(schedule, stage, ranks, chunks)[0],
    )
    clock: Any = SimpleNamespace(mark=lambda: None, captures=False)
    return Messages(groups, clock, (2, 3), torch.float32)


@pytest.mark.parametrize(
    "schedule, chunks, most",
    [("gpipe", 1, 4), ("1f1b", 1, 4), ("interleaved_1f1b", 2, 5), ("zero_bubble_v", 2, 5), ("dualpipe_v", 2, 5)],
)
def test_a_host_far_ahead_holds_no_more_than_is_on_its_way(
    schedule: str, chunks: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four micro-batches on the first of four ranks: of each, at most the last thing that it sent, and what it sends
    just now."""
    monkeypatch.setattr(dist, "irecv", lambda *_, **__: NeverSeenToEnd())
    monkeypatch.setattr(dist, "isend", lambda *_, **__: NeverSeenToEnd())
    messages = of_rank(schedule, 0, 4, chunks)
    alive: list[ref[torch.Tensor]] = []
    held = []
    for action in schedule_actions(schedule, 0, 4, 4, chunks):
        if action.kind == "W":
            continue
        messages.take(action)
        stage = stage_at(schedule, 0, action.chunk, 4)
        if not (action.kind == "F" and stage == 4 * chunks - 1) and not (action.kind != "F" and stage == 0):
            sent = torch.zeros(2, 3)
            alive.append(ref(sent))
            messages.give(action, sent)
            del sent
        held.append(sum(tensor() is not None for tensor in alive))
    assert max(held) <= most
    assert held[-1] == 0, "everything came back"


def test_what_nothing_came_back_of_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    works: list[NeverSeenToEnd] = []

    def start(*_: object, **__: object) -> NeverSeenToEnd:
        works.append(NeverSeenToEnd())
        return works[-1]

    monkeypatch.setattr(dist, "irecv", start)
    monkeypatch.setattr(dist, "isend", start)
    messages = of_rank("1f1b", 0, 2, 1)
    for microbatch in (0, 1):
        messages.give(Action("F", microbatch), torch.zeros(2, 3))
    messages.take(Action("B", 0))
    first, second, received = works
    assert received.waited and first.waited and not second.waited
    messages.finish()
    assert second.waited

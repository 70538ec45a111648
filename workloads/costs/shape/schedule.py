"""Pipeline schedules as data: the ordered actions of every pipeline rank. No torch here.

The engine executes these lists, `workloads.costs.time.pipeline` simulates them and the report draws them, so that all
use the same schedule. p ranks hold v chunks of the model each, together v p stages; every micro-batch goes forward
through all stages and backward again.

none, 1f1b               one forward, one backward (PipeDream-Flush, arXiv:2006.09503)
gpipe                    all forwards, then all backwards (GPipe, arXiv:1811.06965)
interleaved_1f1b         1F1B over several chunks a rank (Megatron-LM, arXiv:2104.04473, section 2.2)
interleaved_zero_bubble  interleaved_1f1b with split backwards (ZB, arXiv:2401.10241); with one chunk a rank it is ZB-H1
zero_bubble_v            two chunks a rank placed as a V, split backwards (ZB-V, arXiv:2401.10241, section 6)
dualpipe_v               the same V with pairs of a forward and a backward (DualPipeV, arXiv:2412.19437 and
                         github.com/deepseek-ai/DualPipe); the two of a pair follow each other here

Every schedule takes any number of micro-batches from 1 on. If the published one needs a multiple of p, or 2 p, the list
is that of more micro-batches, with the surplus ones removed. Micro-batches never wait for each other, so a list that
terminates still does when some of them are removed.

Messages of one direction (F; B and I) from one rank to another are received in the order in which they are sent. Each
direction needs its own channel: in a V, and with two ranks, a direction's messages go both ways between two ranks, and
in a single channel each way would wait for the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import Literal, NamedTuple

Kind = Literal["F", "B", "I", "W"]
"""F: forward. B: whole backward. I and W: the two passes of a split backward, I for the input gradient, which goes to
the previous stage, and W for the weight gradients, for which no other rank waits."""

V_SHAPED = ("zero_bubble_v", "dualpipe_v")
"""Schedules with two chunks a rank: rank r has stages r and 2 p - 1 - r. In all others it has r, r + p, ..."""
INTERLEAVED = ("interleaved_1f1b", "interleaved_zero_bubble")
SPLIT_BACKWARD = ("interleaved_zero_bubble", *V_SHAPED)
"""Schedules in which some backwards are split into I and W."""


class Action(NamedTuple):
    """Work of a rank for one micro-batch in one of its chunks."""

    kind: Kind
    microbatch: int
    """Index from 0."""
    chunk: int = 0
    """Index of the chunk on this rank, from 0 in the order of the model."""


def stage_at(name: str, rank: int, chunk: int, num_ranks: int) -> int:
    """Index of the stage that is a rank's chunk: stage 0 has the embedding, the last stage the head."""
    if name in V_SHAPED and chunk == 1:
        return 2 * num_ranks - 1 - rank
    return chunk * num_ranks + rank


def place_of(name: str, stage: int, num_ranks: int, virtual_stages: int) -> tuple[int, int]:
    """(rank, chunk) of a stage: the inverse of `stage_at`."""
    assert 0 <= stage < num_ranks * virtual_stages
    if name in V_SHAPED and stage >= num_ranks:
        return 2 * num_ranks - 1 - stage, 1
    return stage % num_ranks, stage // num_ranks


def schedule_actions(
    name: str, rank: int, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> list[Action]:
    """Actions of a pipeline rank, in order.

    ``virtual_stages`` is the number of chunks of a rank: 2 for the V-shaped schedules, any for the interleaved ones,
    1 for the others.
    """
    assert virtual_stages == 2 if name in V_SHAPED else virtual_stages == 1 or name in INTERLEAVED
    actions = _SCHEDULES[name](rank, num_ranks, num_microbatches, virtual_stages)
    return [action for action in actions if action.microbatch < num_microbatches]


def gpipe(rank: int, p: int, m: int, v: int) -> list[Action]:
    """All forwards, then all backwards; holds the activations of every micro-batch."""
    del rank, p, v
    return [Action("F", i) for i in range(m)] + [Action("B", i) for i in range(m)]


def one_f_one_b(rank: int, p: int, m: int, v: int) -> list[Action]:
    """Non-interleaved 1F1B; holds ``min(p - rank, m)`` micro-batches."""
    return _looped(rank, p, m, v, lead=p - 1 - rank)


def interleaved_1f1b(rank: int, p: int, m: int, v: int) -> list[Action]:
    """1F1B over chunks; runs ``2 (p - 1 - rank) + (v - 1) p`` forwards before its first backward (Megatron-LM)."""
    return _looped(rank, p, m, v, lead=2 * (p - 1 - rank))


def interleaved_zero_bubble(rank: int, p: int, m: int, v: int) -> list[Action]:
    """The W of rank r follow r backwards later, which fills the idle time at the end."""
    return _looped(rank, p, m, v, lead=p - 1 - rank, weights_after=rank)


def _looped(rank: int, p: int, m: int, v: int, lead: int, weights_after: int | None = None) -> list[Action]:
    """One forward, one backward, over micro-batches in rounds of p: a round goes through chunk after chunk.

    ``lead``: number of forwards before the first backward, besides those of all chunks but the last for the first
    round. ``weights_after``: number of backwards after which a micro-batch's W follows its I; None for whole backwards.
    """
    forwards = [(chunk, i) for first in range(0, m, p) for chunk in range(v) for i in range(first, first + p)]
    backwards = [(v - 1 - chunk, i) for chunk, i in forwards]
    warmup = min((v - 1) * p + lead, len(forwards))
    actions = [Action("F", i, chunk) for chunk, i in forwards[:warmup]]
    for at, (chunk, i) in enumerate(backwards):
        if warmup + at < len(forwards):
            ahead, j = forwards[warmup + at]
            actions.append(Action("F", j, ahead))
        if weights_after is None:
            actions.append(Action("B", i, chunk))
            continue
        actions.append(Action("I", i, chunk))
        if at >= weights_after:
            before, j = backwards[at - weights_after]
            actions.append(Action("W", j, before))
    left = backwards[max(0, len(backwards) - weights_after) :] if weights_after else []
    return [*actions, *(Action("W", i, chunk) for chunk, i in left)]


class _Writer:
    """Writes one rank's list; each call adds the next micro-batch of its kind and chunk."""

    def __init__(self) -> None:
        self.actions: list[Action] = []
        self._pending: list[Action] = []
        """W actions that are still to be added, in the order of their I."""
        self._next: Counter[tuple[bool, int]] = Counter()

    def forward(self, chunk: int) -> None:
        self._add("F", chunk)

    def backward(self, chunk: int) -> None:
        self._add("B", chunk)

    def inputs(self, chunk: int) -> None:
        self._pending.append(Action("W", self._add("I", chunk), chunk))

    def weights(self, *chunks: int) -> None:
        """Adds the W that has been pending longest in these chunks."""
        action = next(action for action in self._pending if action.chunk in chunks)
        self._pending.remove(action)
        self.actions.append(action)

    def remaining_weights(self, chunk: int) -> None:
        for action in [action for action in self._pending if action.chunk == chunk]:
            self._pending.remove(action)
            self.actions.append(action)

    def _add(self, kind: Kind, chunk: int) -> int:
        microbatch = self._next[kind == "F", chunk]
        self._next[kind == "F", chunk] += 1
        self.actions.append(Action(kind, microbatch, chunk))
        return microbatch


def zero_bubble_v(rank: int, p: int, m: int, v: int) -> list[Action]:
    """ZB-V: no idle time if F, I and W take equally long and m is at least 2 p - 1; holds 2 p chunks of activations."""
    del v
    w, m = _Writer(), max(2 * p - 1, m)
    ahead = 2 * (p - rank) - 1
    for _ in range(ahead):
        w.forward(0)
    for _ in range(rank):
        w.forward(1)
        w.forward(0)
    for _ in range(p - rank):
        w.forward(1)
        w.inputs(1)
        w.weights(1)
    # Chunk 0 has run p - 1 - rank micro-batches ahead of chunk 1, which go through chunk 1 when chunk 0 has no more.
    for first in range(ahead + rank, ahead + rank + m - p):
        if first < m:
            w.forward(0)
        w.inputs(0)
        w.weights(0)
        w.forward(1)
        w.inputs(1)
        w.weights(1)
    for _ in range(rank):
        w.inputs(0)
        w.inputs(1)
    for _ in range(p - rank):
        w.inputs(0)
        w.weights(0)
    w.remaining_weights(1)
    w.remaining_weights(0)
    return w.actions


def dualpipe_v(rank: int, p: int, m: int, v: int) -> list[Action]:
    """The eight steps of DualPipeV. Where it overlaps a forward with a backward, the backward follows here."""
    del v
    w, m = _Writer(), max(2 * p, m)
    before_turn = p - 1 - rank
    for _ in range(2 * before_turn):
        w.forward(0)
    for _ in range(rank + 1):
        w.forward(0)
        w.forward(1)
    for _ in range(before_turn):
        w.inputs(1)
        w.weights(0, 1)
        w.forward(1)
    for _ in range(m - 2 * p + rank + 1):
        w.forward(0)
        w.backward(1)
        w.forward(1)
        w.backward(0)
    for _ in range(before_turn):
        w.backward(1)
        w.forward(1)
        w.backward(0)
    for at in range(2 * (rank + 1)):
        chunk = 1 - at % 2
        if at <= rank:
            w.backward(chunk)
        else:
            w.inputs(chunk)
    for _ in range(before_turn):
        w.weights(0, 1)
        w.inputs(0)
    for _ in range(rank + 1):
        w.weights(0, 1)
    return w.actions


_SCHEDULES: dict[str, Callable[[int, int, int, int], list[Action]]] = {
    "none": one_f_one_b,
    "gpipe": gpipe,
    "1f1b": one_f_one_b,
    "interleaved_1f1b": interleaved_1f1b,
    "interleaved_zero_bubble": interleaved_zero_bubble,
    "zero_bubble_v": zero_bubble_v,
    "dualpipe_v": dualpipe_v,
}
"""Functions of rank, p, m and v. `schedule_actions` removes micro-batches beyond m from their lists."""


@dataclass(frozen=True, slots=True)
class Held:
    """State that a rank holds at one moment, in micro-batches of each of its chunks."""

    activations: tuple[int, ...]
    """Micro-batches whose forward has run, and neither B nor I."""
    for_weights: tuple[int, ...]
    """Micro-batches whose I has run and W has not: the tensors for W still exist."""


def held(actions: Sequence[Action]) -> tuple[Held, ...]:
    """Moments at which a rank holds most: every other moment holds at most as much of everything as one of these.

    ``actions`` is one rank's list. A forward holds memory from its start on, a backward until its end.
    """
    chunks = 1 + max(action.chunk for action in actions)
    now = [0] * (2 * chunks)
    states = dict.fromkeys([tuple(now)])
    for action in actions:
        if action.kind != "W":
            now[action.chunk] += 1 if action.kind == "F" else -1
        if action.kind in ("I", "W"):
            now[chunks + action.chunk] += 1 if action.kind == "I" else -1
        states[tuple(now)] = None
    return _most(tuple(Held(one[:chunks], one[chunks:]) for one in states))


@lru_cache(maxsize=4096)
def held_by_rank(
    name: str, rank: int, num_ranks: int, num_microbatches: int, virtual_stages: int = 1
) -> tuple[Held, ...]:
    """`held` of a rank of a schedule, fast: except in GPipe, two rounds of p micro-batches fill a pipeline."""
    filling = num_microbatches if name == "gpipe" else min(num_microbatches, 2 * num_ranks)
    return held(schedule_actions(name, rank, num_ranks, filling, virtual_stages))


class ChunkState(IntEnum):
    """Progress of one chunk of a rank in its step. It only increases, except among the states of `SUMMED`."""

    UNTOUCHED = 0
    GATHERED = 1
    """A forward has run."""
    ENDS_REDUCED = 2
    """The first I has run: the embedding and the head have their gradients."""
    AFTER_B = 3
    """All gradients exist, and the last backward was a whole one."""
    AFTER_W = 4
    """All gradients exist, and the last backward was a W."""
    AFTER_I = 5
    """All gradients exist, and the last backward was an I."""
    DONE = 6
    """All backwards have run."""


SUMMED = ChunkState.AFTER_B, ChunkState.AFTER_W, ChunkState.AFTER_I
"""States in which all gradients of a chunk exist, and more are added. They differ in the unit that was reduced last."""
_AFTER = {"B": ChunkState.AFTER_B, "W": ChunkState.AFTER_W, "I": ChunkState.AFTER_I}


class Backwards(NamedTuple):
    """Moments of a rank when backwards of one of its chunks start, or their I and W, or when forwards end."""

    kind: Kind
    last: bool
    """Whether it completes the chunk's gradients."""
    forward_follows: bool
    """Whether another forward of the rank comes later."""
    chunks: tuple[ChunkState, ...]
    """Progress of each chunk."""
    ahead: tuple[bool, ...]
    """Of each chunk, whether its last B or I (of this chunk: this one) came after more than one forward in FSDP's
    order, which takes the latest forward of the chunk without a backward for that of a backward, and no forward has
    run since. Then FSDP gathers the last unit of the forward before ahead."""
    latest: tuple[int, bool]
    """The chunk whose backward, or I or W, reduced gradients last, and whether it had reduced them before; (-1, false)
    before the first."""
    held: tuple[Held, ...]
    """Maximal states: no other of these moments has more of everything."""


_Moment = tuple[Kind, bool, bool, tuple[ChunkState, ...], tuple[bool, ...], tuple[int, bool]]
"""Fields of `Backwards` without what is held."""


@lru_cache(maxsize=4096)
def held_by_chunk(
    name: str, rank: int, num_ranks: int, num_microbatches: int, virtual_stages: int
) -> tuple[tuple[Backwards, ...], ...]:
    """`Backwards` of each chunk of a rank.

    Except in GPipe, three rounds of p micro-batches stand for any larger number: two fill a pipeline, and after the
    third it is full while all chunks have gradients.
    """
    filling = num_microbatches if name == "gpipe" else min(num_microbatches, 3 * num_ranks)
    actions = schedule_actions(name, rank, num_ranks, filling, virtual_stages)
    last_forward = max(place for place, action in enumerate(actions) if action.kind == "F")
    last_of_chunk = {action.chunk: place for place, action in enumerate(actions) if action.kind in ("B", "W")}
    now, for_weights = [0] * virtual_stages, [0] * virtual_stages
    chunks = [ChunkState.UNTOUCHED] * virtual_stages
    latest: tuple[int, bool] = -1, False
    reduced: list[tuple[int, bool]] = []
    """Chunks whose ends (true) or blocks (false) have been reduced."""
    ahead, forwards = [False] * virtual_stages, [0] * virtual_stages
    unused: list[list[int]] = [[] for _ in chunks]
    """Numbers of the forwards of each chunk that no backward has taken for its own."""
    moments: list[dict[_Moment, dict[Held, None]]] = [{} for _ in chunks]
    for place, action in enumerate(actions):
        chunk, last = action.chunk, place == last_of_chunk[action.chunk]
        if action.kind == "F":
            now[chunk] += 1
            chunks[chunk] = max(chunks[chunk], ChunkState.GATHERED)
            unused[chunk].append(forwards[chunk])
            forwards[chunk] += 1
            ahead[chunk] = False
        elif action.kind != "W":
            ahead[chunk] = unused[chunk].pop() > 0
        of = action.kind, last, place < last_forward, tuple(chunks), tuple(ahead), latest
        moments[chunk].setdefault(of, {})[Held(tuple(now), tuple(for_weights))] = None
        if action.kind in ("B", "I"):
            now[chunk] -= 1
        if action.kind in ("I", "W"):
            for_weights[chunk] += 1 if action.kind == "I" else -1
        if action.kind != "F" and (action.kind != "I" or _has_end(name, rank, num_ranks, chunk, virtual_stages)):
            latest = chunk, (chunk, action.kind == "I") in reduced
            reduced += [(chunk, action.kind == "I"), (chunk, action.kind != "W")]
        if last:
            chunks[chunk], ahead[chunk] = ChunkState.DONE, False
        elif action.kind == "I" and chunks[chunk] not in SUMMED:
            chunks[chunk] = ChunkState.ENDS_REDUCED
        elif action.kind != "F":
            chunks[chunk] = _AFTER[action.kind]
    return tuple(tuple(Backwards(*of, _most(tuple(states))) for of, states in of_chunk.items()) for of_chunk in moments)


def _has_end(name: str, rank: int, num_ranks: int, chunk: int, virtual_stages: int) -> bool:
    """Whether a chunk has the embedding or the head."""
    with_head = 0 if name in V_SHAPED else num_ranks - 1
    return (rank == 0 and chunk == 0) or (rank == with_head and chunk == virtual_stages - 1)


def _most(states: tuple[Held, ...]) -> tuple[Held, ...]:
    """``states`` without those of which another one has at least as much of everything."""
    flat = {one: (*one.activations, *one.for_weights) for one in states}
    most: list[Held] = []
    for one in sorted(states, key=lambda held: -sum(flat[held])):
        if not any(all(a <= b for a, b in zip(flat[one], flat[other], strict=True)) for other in most):
            most.append(one)
    return tuple(most)


def microbatches_in_flight(actions: Sequence[Action]) -> int:
    """Maximum number of micro-batches, at any time, whose forward has run and whose B or I has not, chunks
    separately."""
    now = most = 0
    for action in actions:
        if action.kind != "W":
            now += 1 if action.kind == "F" else -1
        most = max(most, now)
    return most

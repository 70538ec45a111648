"""Every schedule's lists: their invariants, torch's own lists, what is held, and messages that must not cross."""

from __future__ import annotations

import itertools
import random
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterator
from typing import Any, get_args

import pytest

from tests.workloads.costs.shapes import LLAMA_8B
from workloads.costs.memory.estimate import moments_held
from workloads.costs.shape.schedule import (
    INTERLEAVED,
    SPLIT_BACKWARD,
    SUMMED,
    V_SHAPED,
    Action,
    ChunkState,
    held,
    held_by_chunk,
    held_by_rank,
    microbatches_in_flight,
    place_of,
    schedule_actions,
    stage_at,
)
from workloads.costs.time.pipeline import simulate
from workloads.spec.experiment import Experiment
from workloads.spec.experiment_values import PipelineSchedule

Size = tuple[int, int, int]
"""p, m and v."""
SIZES = [(1, 1), (1, 4), (2, 1), (2, 2), (3, 8), (4, 4), (8, 3), (8, 32)]
NAMES = [name for name in get_args(PipelineSchedule) if name != "none"]


def chunks_of(name: str) -> tuple[int, ...]:
    if name in V_SHAPED:
        return (2,)
    return {"interleaved_1f1b": (2, 3, 4), "interleaved_zero_bubble": (1, 2, 3, 4)}.get(name, (1,))


def sizes(name: str, count: int = 30) -> Iterator[Size]:
    """Small sizes all, and some drawn."""
    yield from itertools.product((1, 2, 3, 4), (1, 2, 3, 4, 5, 7, 8, 9), chunks_of(name)[:2])
    draw = random.Random(name)
    for _ in range(count):
        yield draw.randint(1, 12), draw.randint(1, 40), draw.choice(chunks_of(name))


def lists(name: str, p: int, m: int, v: int = 1) -> list[list[Action]]:
    return [schedule_actions(name, rank, p, m, v) for rank in range(p)]


@pytest.mark.parametrize("name", NAMES)
def test_every_chunk_runs_every_microbatch_once_and_in_order(name: str) -> None:
    for p, m, v in sizes(name):
        for rank, actions in enumerate(lists(name, p, m, v)):
            assert len(actions) == len(set(actions)), (p, m, v, rank)
            for chunk in range(v):
                own = [action for action in actions if action.chunk == chunk]
                at = {(action.kind, action.microbatch): place for place, action in enumerate(own)}
                whole = {i for kind, i in at if kind == "B"}
                assert len(own) == sum(2 if i in whole else 3 for i in range(m))
                for i in range(m):
                    if i in whole:
                        assert at["F", i] < at["B", i]
                    else:
                        assert at["F", i] < at["I", i] < at["W", i]
                for kinds in ("F", "BI", "BW"):  # so the last weights' gradient of a chunk is the last micro-batch's
                    microbatches = [action.microbatch for action in own if action.kind in kinds]
                    assert microbatches == list(range(m)), (p, m, v, rank, chunk, kinds)


def test_which_schedules_split_backwards() -> None:
    kinds = {"interleaved_zero_bubble": "FIW", "zero_bubble_v": "FIW", "dualpipe_v": "FBIW"}
    for name in NAMES:
        found = {action.kind for actions in lists(name, 4, 8, chunks_of(name)[0]) for action in actions}
        assert found == set(kinds.get(name, "FB"))
        assert (name in SPLIT_BACKWARD) == ("I" in found)


def test_stages_and_places_are_each_others_inverse() -> None:
    # ranks 0, 1, 2 with two chunks each: 0 3, 1 4, 2 5 in a loop, 0 5, 1 4, 2 3 in a V
    assert [stage_at("interleaved_1f1b", rank, chunk, 3) for rank in range(3) for chunk in (0, 1)] == [0, 3, 1, 4, 2, 5]
    assert [stage_at("zero_bubble_v", rank, chunk, 3) for rank in range(3) for chunk in (0, 1)] == [0, 5, 1, 4, 2, 3]
    for name in NAMES:
        for p, v in itertools.product((1, 2, 3, 8), chunks_of(name)):
            places = [place_of(name, stage, p, v) for stage in range(p * v)]
            assert [stage_at(name, rank, chunk, p) for rank, chunk in places] == list(range(p * v))
            assert len(set(places)) == p * v


def test_the_number_of_chunks_must_be_the_schedules() -> None:
    for name, v in [("zero_bubble_v", 1), ("dualpipe_v", 3), ("1f1b", 2), ("gpipe", 2)]:
        with pytest.raises(AssertionError):
            schedule_actions(name, 0, 2, 4, v)


# Against torch


def torch_list(name: str, rank: int, p: int, m: int, v: int) -> list[Action]:
    """What `torch.distributed.pipelining` has for a rank.

    Its schedules want stages and a process group; the method that lists their operations needs only these numbers.
    """
    from torch.distributed.pipelining import schedules

    kinds = {"FORWARD": "F", "FULL_BACKWARD": "B", "BACKWARD_INPUT": "I", "BACKWARD_WEIGHT": "W"}
    class_names = {
        "interleaved_1f1b": "ScheduleInterleaved1F1B",
        "interleaved_zero_bubble": "ScheduleInterleavedZeroBubble",
        "zero_bubble_v": "ScheduleZBVZeroBubble",
        "dualpipe_v": "ScheduleDualPipeV",
    }
    schedule: Any = object.__new__(getattr(schedules, class_names[name]))
    schedule.pp_group_size, schedule._n_microbatches, schedule.n_local_stages = p, m, v
    schedule.num_stages = schedule._num_stages = p * v
    schedule.microbatches_per_round = m // max(1, m // p)
    found = []
    for operation in schedule._calculate_single_rank_operations(rank):
        if operation is None:
            continue  # a step of waiting: times decide that here
        # A pair that DualPipeV runs at the same time follows each other here: the forward, then the backward.
        for one in operation.sub_actions or (operation,):
            at, chunk = place_of(name, one.stage_index, p, v)
            assert at == rank
            found.append(Action(kinds[one.computation_type.name], one.microbatch_index, chunk))  # type: ignore[arg-type]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("name", [*INTERLEAVED, *V_SHAPED])
def test_lists_are_torchs(name: str) -> None:
    """Wherever torch has the same: interleaved schedules run micro-batches in rounds of p, but torch makes the rounds
    longer where m is no multiple of p (and refuses some m), and DualPipeV with fewer micro-batches than stages is ours
    alone."""
    count = 0
    for p, m, v in itertools.product((1, 2, 3, 4, 5, 8), range(1, 33), chunks_of(name)):
        if (name in INTERLEAVED and m % p) or (name == "dualpipe_v" and m < 2 * p):
            continue
        for rank in range(p):
            assert schedule_actions(name, rank, p, m, v) == torch_list(name, rank, p, m, v), (rank, p, m, v)
            count += 1
    assert count > 300


# Run together


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_time_of_equal_stages(name: str, stages: int, microbatches: int) -> None:
    together = lists(name, stages, microbatches)
    assert simulate(together, [1.0] * stages, [2.0] * stages).total_s == 3.0 * (microbatches + stages - 1)


Message = tuple[str, int, int]
"""Direction (F or B), the stage that receives, and the micro-batch."""


def awaited(name: str, action: Action, rank: int, p: int, v: int) -> tuple[Message, int] | None:
    """The message that an action needs and the rank that sends it; None where it comes from no other rank."""
    stage = stage_at(name, rank, action.chunk, p)
    before = stage - 1 if action.kind == "F" else stage + 1
    if action.kind == "W" or not 0 <= before < p * v or place_of(name, before, p, v)[0] == rank:
        return None
    return ("F" if action.kind == "F" else "B", stage, action.microbatch), place_of(name, before, p, v)[0]


def sent(name: str, action: Action, rank: int, p: int, v: int) -> tuple[Message, int] | None:
    """The message that follows from an action and the rank that receives it."""
    stage = stage_at(name, rank, action.chunk, p)
    after = stage + 1 if action.kind == "F" else stage - 1
    if action.kind == "W" or not 0 <= after < p * v or place_of(name, after, p, v)[0] == rank:
        return None
    return ("F" if action.kind == "F" else "B", after, action.microbatch), place_of(name, after, p, v)[0]


@pytest.mark.parametrize("name", NAMES)
def test_messages_between_two_ranks_are_received_in_the_order_in_which_they_are_sent(name: str) -> None:
    for p, m, v in sizes(name):
        ways: dict[str, dict[tuple[str, int, int], list[Message]]] = {"sent": {}, "received": {}}
        for rank, actions in enumerate(lists(name, p, m, v)):
            for action in actions:
                if found := sent(name, action, rank, p, v):
                    ways["sent"].setdefault((found[0][0], rank, found[1]), []).append(found[0])
                if found := awaited(name, action, rank, p, v):
                    ways["received"].setdefault((found[0][0], found[1], rank), []).append(found[0])
        assert ways["sent"] == ways["received"], (p, m, v)


Channel = Callable[[str, int, int], Hashable]
"""By direction, sender and receiver of a message. A rank's messages of one channel pass in the order in which it asks
for them, sends and receives alike."""


def comes_to_an_end(name: str, p: int, m: int, v: int, *, early: int, channel: Channel) -> bool:
    """Whether the lists end when a message passes only once it is sent and its receive is posted.

    Each rank posts the receives of an action and of the ``early`` next ones before the action, waits for the action's
    own, and sends afterwards without waiting.
    """
    programs: list[deque[tuple[str, Message, int]]] = []
    for rank, actions in enumerate(lists(name, p, m, v)):
        program: deque[tuple[str, Message, int]] = deque()
        for at, action in enumerate(actions):
            for later in actions[at + early : at + early + 1] if at else actions[: early + 1]:
                if found := awaited(name, later, rank, p, v):
                    program.append(("receive", *found))
            if found := awaited(name, action, rank, p, v):
                program.append(("wait", *found))
            if found := sent(name, action, rank, p, v):
                program.append(("send", *found))
        programs.append(program)
    queues: dict[tuple[Hashable, int], deque[tuple[Message, int]]] = {}
    passed: set[Message] = set()
    moved = True
    while moved:
        moved = False
        for rank, program in enumerate(programs):
            while program and (program[0][0] != "wait" or program[0][1] in passed):
                what, message, other = program.popleft()
                moved = True
                if what != "wait":
                    way = channel(message[0], *((rank, other) if what == "send" else (other, rank)))
                    queues.setdefault((way, rank), deque()).append((message, other))
        for (way, rank), queue in queues.items():
            while queue:
                message, other = queue[0]
                peer = queues.get((way, other))
                if not peer or peer[0] != (message, rank):
                    break
                passed.add(message)
                queue.popleft()
                peer.popleft()
                moved = True
    return not any(programs)


def pair_one_way(direction: str, sender: int, receiver: int) -> Hashable:
    """A communicator of two ranks for either direction and way: what NCCL makes at the first message of a group."""
    return direction, sender, receiver


def group_one_way(direction: str, sender: int, receiver: int) -> Hashable:
    """Four process groups: forward and backward, to ranks above and below. NCCL initialised with a device runs the
    messages of a group one after the other."""
    return direction, sender < receiver


def pair_both_ways(direction: str, sender: int, receiver: int) -> Hashable:
    """Two process groups, forward and backward."""
    return direction, frozenset((sender, receiver))


@pytest.mark.slow
@pytest.mark.parametrize("early", [0, 1])
@pytest.mark.parametrize("name", NAMES)
def test_no_deadlock_where_messages_wait_for_their_receives(name: str, early: int) -> None:
    for p, m, v in sizes(name, 10):
        assert comes_to_an_end(name, p, m, v, early=early, channel=pair_one_way), (p, m, v)


@pytest.mark.parametrize("name", INTERLEAVED)
def test_both_ways_between_two_ranks_need_channels_of_their_own(name: str) -> None:
    """With two ranks, or in a V, forwards go both ways between two ranks: in one channel, each side's send would wait
    behind its own receive."""
    for schedule in (name, *V_SHAPED):
        for early in (0, 1):
            assert not comes_to_an_end(schedule, 2, 4, 2, early=early, channel=pair_both_ways)


# What is held


def walked(actions: list[Action], chunks: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """After each action, by chunk: micro-batches between F and B or I, and between I and W."""
    done: Counter[tuple[str, int]] = Counter()
    moments = []
    for action in actions:
        done[action.kind, action.chunk] += 1
        moments.append(
            (
                tuple(done["F", c] - done["B", c] - done["I", c] for c in range(chunks)),
                tuple(done["I", c] - done["W", c] for c in range(chunks)),
            )
        )
    return moments


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_what_is_held_most_is_what_a_walk_finds(name: str) -> None:
    for p, m, v in sizes(name, 20):
        for actions in lists(name, p, m, v):
            moments = walked(actions, v)
            found = [moment.activations + moment.for_weights for moment in held(actions)]
            flat = [full + waiting for full, waiting in moments]
            assert set(found) <= set(flat)
            assert all(any(all(a <= b for a, b in zip(one, most, strict=True)) for most in found) for one in flat)
            assert not any(
                all(a <= b for a, b in zip(*two, strict=True)) for two in itertools.permutations(found, 2)
            ), "one moment is in another"
            assert microbatches_in_flight(actions) == max(sum(full) for full, _ in moments)


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_two_rounds_fill_a_pipeline(name: str) -> None:
    for p, v in itertools.product((1, 2, 3, 4, 7), chunks_of(name)[:3]):
        for m in {1, p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 3 * p - 1, 4 * p, 6 * p + 2}:
            for rank, actions in enumerate(lists(name, p, m, v)):
                assert set(held_by_rank(name, rank, p, m, v)) == set(held(actions)), (p, m, v, rank)


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
@pytest.mark.parametrize(("stages", "microbatches"), SIZES)
def test_the_memory_model_holds_as_many_micro_batches(name: str, stages: int, microbatches: int) -> None:
    experiment = Experiment.canonical(model=LLAMA_8B, pp=stages, pp_schedule=name, global_batch_size=microbatches)
    for stage in range(stages):
        actions = schedule_actions(experiment.pp_schedule, stage, stages, microbatches)
        assert max(moments_held(experiment, stage))[0] == microbatches_in_flight(actions)


def test_published_counts_of_what_is_held() -> None:
    """Megatron-LM's ``2 (p - r - 1) + (v - 1) p + 1`` chunks; ZB-H1 and ZB-V hold what 1F1B's first rank does, p
    micro-batches, also for W; DualPipeV one more."""
    for p, v in itertools.product((2, 4, 8), (2, 3)):
        m = 4 * p
        for rank in range(p):
            interleaved = schedule_actions("interleaved_1f1b", rank, p, m, v)
            assert microbatches_in_flight(interleaved) == 2 * (p - rank - 1) + (v - 1) * p + 1
            for name, chunks, most in (
                ("interleaved_zero_bubble", 1, p),
                ("zero_bubble_v", 2, 2 * p),
                ("dualpipe_v", 2, 2 * p + 1),
            ):
                moments = held(schedule_actions(name, rank, p, m, chunks))
                assert max(sum(one.activations + one.for_weights) for one in moments) == most, (name, p, rank)


@pytest.mark.parametrize("name", ["interleaved_1f1b", "interleaved_zero_bubble", "zero_bubble_v", "dualpipe_v"])
@pytest.mark.parametrize("p", [2, 4])
def test_backwards_of_a_chunk_start_with_what_the_rank_holds(name: str, p: int) -> None:
    """Of each chunk the first, one in the middle and the last; nothing beyond the highest moments, and these are
    reached."""
    for rank in range(p):
        most = held_by_rank(name, rank, p, 4 * p, 2)
        found = held_by_chunk(name, rank, p, 4 * p, 2)
        assert len(found) == 2
        for number, of_chunk in enumerate(found):
            backwards = [one for one in of_chunk if one.kind in ("B", "W")]
            assert {one.last for one in backwards} == {False, True}
            states_of_chunk = {one.chunks[number] for one in of_chunk}
            assert ChunkState.GATHERED in states_of_chunk and states_of_chunk & set(SUMMED)
            assert all(one.chunks[number] in (*SUMMED, ChunkState.ENDS_REDUCED) for one in backwards if one.last)
            states = [state for one in of_chunk for state in one.held]
            assert any(state.activations[number] > 0 for state in states)
            for state in states:
                numbers = (*state.activations, *state.for_weights)
                assert any(
                    all(a <= b for a, b in zip(numbers, (*one.activations, *one.for_weights), strict=True))
                    for one in most
                )
        highest = max(sum(one.activations) for one in most)
        reached = max(sum(state.activations) for of_chunk in found for one in of_chunk for state in one.held)
        assert reached == highest

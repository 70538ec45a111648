"""What a step sends in bf16, and the counter itself. Every layout is counted in float64 in `test_parity`.

In float64 all values have 8 bytes. In bf16 activations and gathered weights have 2, gradients and sums 4: one layout
for each message shows which size it has, and how many there are in other layouts float64 shows.
"""

from __future__ import annotations

import multiprocessing
import shutil
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool, fork_server
from tests.sampling import sampled
from tests.workloads.engine.layouts import FEW_RANKS, ODD, OF_MESSAGES
from tests.workloads.engine.parity import compiled_by, experiment, experts
from tests.workloads.engine.traffic_checks import DEVICES_PER_NODE, Count, Counted, built, check
from workloads.contract.measure_spec import MeasureSpec
from workloads.costs.traffic.sent import Traffic, step_traffic
from workloads.engine.collectives.groups import make_groups
from workloads.engine.observing.traffic import TrafficCounter, axes_of
from workloads.measuring.step import measure
from workloads.spec.experiment import Experiment

IN_BF16 = [
    *(case for case in FEW_RANKS + ODD[1::2] if case.world_size > 1 and case.attention != "math"),
    # With several micro-batches FSDP gathers units that it does not need any more.
    *(experiment(dp=2, zero_stage=zero, micro_batch_size=1) for zero in range(4)),
    *OF_MESSAGES[3::6],
    experiment(latent=16, dp=3, tp=2, zero_stage=1, global_batch_size=6, micro_batch_size=2),
    # Shards of unequal size; more tokens than one chunk of the loss.
    experiment(dp=3, tp=2, zero_stage=1, global_batch_size=6, micro_batch_size=2, qk_norm=True),
    experiment(tp=2, global_batch_size=2, micro_batch_size=2).replace(seq_len=2500),
]
AXES = ("dp", "tp", "cp", "pp")
CASES = [case.replace(precision="bf16") for case in IN_BF16]


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", sampled(CASES, 3, kinds=lambda case: [axis for axis in AXES if getattr(case, axis) > 1]), ids=lambda c: c.id
)
def test_every_rank_sends_what_the_closed_form_says(gloo_pool: Pool, case: Experiment) -> None:
    check(gloo_pool, case)


def test_the_cases_have_every_kind_of_message() -> None:
    assert {case.zero_stage for case in CASES if case.dp > 1} == set(range(4))
    assert {case.sequence_parallel for case in CASES if case.tp > 1} == {True, False}
    assert {case.cp_kind for case in CASES if case.cp > 1} == {"ring", "allgather", "ulysses"}
    assert {case.model.mla is None for case in CASES if case.tp > 1} == {True, False}
    assert any(case.dp_replicate > 1 for case in CASES)
    assert any(case.model.tie_embeddings and case.pp > 1 for case in CASES)
    assert any(case.recompute == "full" and case.tp > 1 for case in CASES)


def count_alone(case: Experiment, rank: int, answer: Any) -> None:
    """In a process of its own: one fake process group a process."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.testing._internal.distributed.fake_pg import FakeStore

    from workloads.engine.training.build import assemble, shape_chunks
    from workloads.rehearse import _step

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=case.world_size)
    chunks = shape_chunks(case, groups := make_groups(case, rank, torch.device("cpu")))
    with FakeTensorMode(allow_non_fake_inputs=True):
        for chunk in chunks:
            chunk.to_empty(device="cpu")
        engine = assemble(case, groups, chunks)
        _step(engine)
        with TrafficCounter(axes_of(groups), 8) as counter:
            _step(engine)
    answer.send((counter.traffic, counter.problem))


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    sampled(
        [
            {"dp": 16, "tp": 2, "zero_stage": 3},
            {"dp_replicate": 8, "dp_shard": 4, "tp": 2, "zero_stage": 2},
            {"dp": 4, "tp": 2, "pp": 3, "zero_stage": 1, "tie": True},
        ],
        1,
    ),
    ids=str,
)
def test_one_rank_alone_without_memory_counts_the_same(layout: dict[str, Any]) -> None:
    """Under a fake process group and on FakeTensors. There nothing is sent to neighbours, nor the loss summed."""
    case = experiment(global_batch_size=128, micro_batch_size=2, precision="bf16", **layout)
    rank = case.world_size - 1
    here, there = multiprocessing.Pipe()
    process = fork_server().Process(target=count_alone, args=(case, rank, there))
    process.start()
    assert here.poll(90), "the process did not answer"
    counted, problem = here.recv()
    process.join()
    assert problem is None
    expected = step_traffic(case, rank, 8)
    assert expected is not None
    assert counted == [sent for sent in expected if sent.axis not in ("pp", "world")]


WITH_COMPILER = pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")


def measure_compiled(rank: int, case: Experiment, backend: str, warmup_steps: int) -> tuple[Counted, str | None, dict]:
    """Counted by `measure`; and how often dynamo has skipped or compiled a frame after the first step."""
    from torch._dynamo.utils import counters

    frames: list[dict[str, int]] = []
    with compiled_by(backend):
        engine = built(rank, case)
        counter = TrafficCounter(axes_of(engine.groups), DEVICES_PER_NODE)
        spec = MeasureSpec(warmup_steps=warmup_steps, timed_steps=2)
        measure(engine, spec, lambda step, warm: frames.append(dict(counters["frames"])), counter)
        frames.append(dict(counters["frames"]))
        return counter.traffic, counter.problem, {"after the first step": frames[1], "at the end": frames[-1]}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    sampled(
        [
            {"dp": 2, "zero_stage": 3, "micro_batch_size": 2},
            {"tp": 2, "micro_batch_size": 4},
            {"tp": 2, "micro_batch_size": 4, "recompute": "selective"},
            {"tp": 2, "micro_batch_size": 4, "recompute": "selective", "sequence_parallel": False},
            {"tp": 2, "micro_batch_size": 4, "recompute": "full"},
            {"tp": 2, "micro_batch_size": 4, "recompute": "selective", "recompute_every": 3},
            {"cp": 2, "cp_kind": "allgather", "micro_batch_size": 4, "recompute": "selective", "recompute_every": 2},
            {
                "tp": 2,
                "micro_batch_size": 4,
                "latent": 16,
                "moe": experts(),
                "recompute": "selective",
                "recompute_every": 2,
            },
        ],
        1,
        seconds=12,
    ),
    ids=str,
)
@pytest.mark.parametrize(
    "backend",
    ["aot_eager_decomp_partition", pytest.param("inductor", marks=[WITH_COMPILER, pytest.mark.exhaustive(seconds=25)])],
)
def test_compiled_blocks_are_counted_and_stay_compiled(gloo_pool: Pool, layout: dict[str, Any], backend: str) -> None:
    """The compiler decides what backward gathers again."""
    case = experiment(compile="block", precision="bf16", **layout)
    ranks = gloo_pool.run(measure_compiled, case.world_size, case, backend, 2, timeout_s=240)
    for rank, (counted, problem, frames) in enumerate(ranks):
        assert problem is None
        assert counted == step_traffic(case, rank, DEVICES_PER_NODE)
        assert frames["at the end"] == frames["after the first step"]
        assert frames["at the end"]["ok"] > 0


def counted_steps(rank: int, case: Experiment) -> list[list[int]]:
    """The steps in which a counter is active, with 0 to 3 warm-up steps before 2 timed ones."""
    now: list[int] = []
    found: list[int] = []

    class Noting(TrafficCounter):
        def __enter__(self) -> TrafficCounter:
            found.append(now[-1])
            return super().__enter__()

    engine = built(rank, case)
    result = []
    for warmup_steps in range(4):
        spec = MeasureSpec(warmup_steps=warmup_steps, timed_steps=2)
        measure(engine, spec, lambda step, warm: now.append(step), Noting(axes_of(engine.groups)))
        result.append(list(found))
        found.clear()
    return result


@pytest.mark.slow
def test_only_a_warmup_step_is_counted(gloo_pool: Pool) -> None:
    assert gloo_pool.run(counted_steps, 1, experiment(precision="fp32")) == [[[], [0], [1], [1]]]


def forget_compiled_blocks_before_counting(rank: int, case: Experiment) -> tuple[int, int]:
    """Frames that dynamo has compiled: before the counted step, and at the end."""
    from torch._dynamo.utils import counters

    compiled: list[int] = []

    def before(step: int, is_warmup: bool) -> None:
        if step == 1:
            torch._dynamo.reset()
            compiled.append(counters["frames"]["ok"])

    with compiled_by("aot_eager"):
        engine = built(rank, case)
        spec = MeasureSpec(warmup_steps=2, timed_steps=2)
        measure(engine, spec, before, TrafficCounter(axes_of(engine.groups), DEVICES_PER_NODE))
        return compiled[0], counters["frames"]["ok"]


@pytest.mark.slow(seconds=3)
def test_what_needs_compiling_in_the_counted_step_is_compiled_in_the_next(gloo_pool: Pool) -> None:
    """Dynamo would leave it uncompiled for good, and the timed steps would be those of an eager run."""
    case = experiment(dp=2, micro_batch_size=4, compile="block", precision="fp32")
    for before, at_the_end in gloo_pool.run(forget_compiled_blocks_before_counting, case.world_size, case):
        assert at_the_end > before > 0


@pytest.mark.slow
def test_a_step_in_which_blocks_are_compiled_is_not_counted(gloo_pool: Pool) -> None:
    case = experiment(dp=2, micro_batch_size=4, compile="block", precision="fp32")
    for counted, problem, frames in gloo_pool.run(measure_compiled, case.world_size, case, "aot_eager", 1):
        assert (counted, problem) == (None, "no step was watched")
        assert frames["at the end"]["ok"] > 0


def call_in_unknown_group(rank: int) -> Count:
    other = dist.new_group([0, 1])
    with TrafficCounter({dist.group.WORLD.group_name: "world"}) as counter:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3), group=other)
    return counter.traffic, counter.problem


def call_unknown_kind(rank: int) -> Count:
    with TrafficCounter({dist.group.WORLD.group_name: "world"}) as counter:
        dist.broadcast(torch.ones(3), src=0)
    return counter.traffic, counter.problem


def every_kind(rank: int) -> Count:
    name = dist.group.WORLD.group_name
    ops, x = torch.ops._c10d_functional, torch.ones(4, dtype=torch.bfloat16)
    with TrafficCounter({name: "world"}, 1) as counter:
        for out in (
            ops.all_gather_into_tensor(x, 2, name),
            ops.reduce_scatter_tensor(x, "sum", 2, name),
            ops.all_to_all_single(x, [2, 2], [2, 2], name),
            ops.all_reduce(x, "sum", name),
        ):
            ops.wait_tensor(out)
        dist.all_gather([torch.empty_like(x), torch.empty_like(x)], x)
        dist.all_to_all_single(torch.empty_like(x), x)
        dist.all_reduce(x)
        dist.barrier()
        message = torch.ones(3)
        work = dist.isend(message, 1 - rank)
        dist.recv(torch.empty(3), 1 - rank)
        work.wait()
    return counter.traffic, counter.problem


@pytest.mark.slow
def test_what_cannot_be_booked_makes_the_count_unknown(gloo_pool: Pool) -> None:
    for traffic, problem in gloo_pool.run(call_in_unknown_group, 2):
        assert traffic is None
        assert "belongs to no axis" in problem
    for traffic, problem in gloo_pool.run(call_unknown_kind, 2):
        assert (traffic, problem) == (None, "c10d::broadcast_ is not known")


def test_bytes_are_those_of_the_whole_buffer(gloo_pool: Pool) -> None:
    def sent(op: str, calls: int, bytes: int) -> Traffic:
        return Traffic(axis="world", op=op, link="between_nodes", calls=calls, bytes=bytes)  # type: ignore[arg-type]

    for traffic, problem in gloo_pool.run(every_kind, 2):
        assert problem is None
        assert traffic == [
            sent("all_gather", 2, 16 + 16),
            sent("all_reduce", 2, 8 + 8),
            sent("all_to_all", 2, 8 + 8),
            sent("p2p", 1, 12),
            sent("reduce_scatter", 1, 8),
        ]

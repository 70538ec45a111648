"""What a step sends, counted call by call, is what the closed form says: on every rank, to the byte."""

from __future__ import annotations

import dataclasses
import multiprocessing
import shutil
from collections.abc import Callable
from functools import partialmethod
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.workloads.engine.parity import experiment, experts
from tests.workloads.engine.test_parity import CASES
from workloads.contract.protocol import MeasureSpec
from workloads.costs.traffic.sent import Traffic, step_traffic
from workloads.engine.collectives.groups import make_groups
from workloads.engine.observing.traffic import TrafficCounter, axes_of
from workloads.engine.training.build import Engine, build, choose_attention
from workloads.measuring.step import _batches, measure, run_step
from workloads.spec.experiment import Experiment

DEVICES_PER_NODE = 2
Counted = list[Traffic] | None


def built(rank: int, case: Experiment) -> Engine:
    choose_attention(case)
    return build(case, make_groups(case, rank, torch.device("cpu")))


def count(rank: int, case: Experiment) -> tuple[Counted, str | None]:
    """What this rank sends in its second step."""
    torch.set_default_dtype(torch.float64 if case.precision == "fp64" else torch.float32)
    try:
        engine = built(rank, case)
        counter = TrafficCounter(axes_of(engine.groups), DEVICES_PER_NODE)
        run_step(engine, 0, _batches(engine, 0), is_warmup=True)
        with counter:
            run_step(engine, 1, _batches(engine, 1), is_warmup=True)
        return counter.traffic, counter.problem
    finally:
        torch.set_default_dtype(torch.float32)


def check(pool: Pool, case: Experiment, body: Callable[..., tuple[Counted, str | None]] = count) -> None:
    for rank, (counted, problem) in enumerate(pool.run(body, case.world_size, case)):
        assert problem is None
        assert counted == step_traffic(case, rank, DEVICES_PER_NODE), f"rank {rank}"


def _with_both_precisions(cases: list[Experiment]) -> list[Experiment]:
    """The cases in turns as they are and in bf16, so that each kind of layout is counted with both sizes of values."""
    return [case.replace(precision="bf16") if number % 2 else case for number, case in enumerate(cases)]


def with_equal_heads(case: Experiment) -> Experiment:
    """Values as large as queries and keys: else the CPU's kernel pads the values, so that what it saves is no longer
    what the up-projection made, and nothing is made again. A GPU's kernels take them as they are."""
    mla = case.model.mla
    assert mla is not None
    equal = dataclasses.replace(mla, v_head_dim=mla.qk_nope_head_dim + mla.qk_rope_head_dim)
    return case.replace(model=dataclasses.replace(case.model, mla=equal))


MORE = [
    # With several micro-batches FSDP gathers what it does not need any more.
    *(experiment(dp=2, zero_stage=zero, micro_batch_size=1, precision="bf16") for zero in range(4)),
    experiment(dp=2, zero_stage=3, micro_batch_size=1, tie=True),
    experiment(dp=2, zero_stage=2, micro_batch_size=1, tie=True, tp=2),
    *(
        experiment(dp=2, zero_stage=zero, pp=2, pp_schedule=schedule, micro_batch_size=1)
        for zero in (1, 3)
        for schedule in ("gpipe", "1f1b")
    ),
    experiment(dp=2, zero_stage=3, pp=3, micro_batch_size=1, recompute="full"),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=3, tp=2, micro_batch_size=1, qk_norm=True),
    experiment(dp_replicate=2, dp_shard=2, zero_stage=2, pp=2, micro_batch_size=1, tie=True),
    experiment(dp=2, tp=2, pp=2, sequence_parallel=False, micro_batch_size=2, recompute="full", qk_norm=True),
    experiment(tp=2, recompute="full", micro_batch_size=2),
    experiment(tp=2, recompute="selective", micro_batch_size=2, sequence_parallel=False),
    # Of 5 layers on two stages, those of the second are not recomputed.
    *(
        experiment(tp=2, pp=2, pp_split="even", recompute="full", recompute_every=5, sequence_parallel=sp, rounds=2)
        for sp in (True, False)
    ),
    experiment(cp=2, dp=2, zero_stage=3, recompute="full", recompute_every=3, micro_batch_size=2),
    experiment(tp=2, recompute="norm+rope", micro_batch_size=2),
    experiment(tp=2, micro_batch_size=2, sequence_parallel=False),
    *(
        experiment(latent=queries, tp=2, micro_batch_size=2, sequence_parallel=sp, recompute=kind)
        for queries in (16, 0)
        for sp in (True, False)
        for kind in ("none", "selective", "full")
    ),
    *(
        with_equal_heads(experiment(latent=queries, tp=2, micro_batch_size=2, recompute=kind, recompute_every=2))
        for queries in (16, 0)
        for kind in ("mla_up", "norm+mla_up", "selective+mla_up")
    ),
    *(
        experiment(latent=16, cp=2, cp_kind=kind, tp=2, zero_stage=3, micro_batch_size=2)
        for kind in ("ring", "allgather", "ulysses")
    ),
    experiment(latent=16, dp=3, tp=2, zero_stage=1, global_batch_size=6, micro_batch_size=2, precision="bf16"),
    # Shards of unequal size; more tokens than one chunk of the loss.
    experiment(dp=3, tp=2, zero_stage=1, global_batch_size=6, micro_batch_size=2, qk_norm=True, precision="bf16"),
    experiment(tp=2, global_batch_size=2, micro_batch_size=2, precision="bf16").replace(seq_len=2500),
]


@pytest.mark.slow
@pytest.mark.parametrize("case", _with_both_precisions(CASES[::2]) + MORE, ids=lambda c: c.id)
def test_every_rank_sends_what_the_closed_form_says(gloo_pool: Pool, case: Experiment) -> None:
    check(gloo_pool, case)


def test_the_matrix_has_every_choice() -> None:
    cases = _with_both_precisions(CASES[::2]) + MORE
    assert {(c.zero_stage, c.precision) for c in cases} == {(z, p) for z in range(4) for p in ("fp64", "bf16")}
    assert {(c.tp > 1, c.recompute, c.sequence_parallel) for c in cases} >= {
        (True, recompute, sp) for recompute in ("none", "selective", "full") for sp in (True, False)
    }
    assert any(c.model.tie_embeddings and c.pp > 1 and c.zero_stage for c in cases)


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
    [
        {"dp": 16, "tp": 2, "zero_stage": 3},
        {"dp_replicate": 8, "dp_shard": 4, "tp": 2, "zero_stage": 2},
        {"dp": 4, "tp": 2, "pp": 3, "zero_stage": 1, "tie": True},
    ],
    ids=str,
)
def test_one_rank_alone_without_memory_counts_the_same(layout: dict[str, Any]) -> None:
    """Under a fake process group and on FakeTensors. There nothing is sent to neighbours, nor the loss summed."""
    case = experiment(global_batch_size=128, micro_batch_size=2, precision="bf16", **layout)
    rank = case.world_size - 1
    here, there = multiprocessing.Pipe()
    process = multiprocessing.get_context("forkserver").Process(target=count_alone, args=(case, rank, there))
    process.start()
    assert here.poll(90), "the process did not answer"
    counted, problem = here.recv()
    process.join()
    assert problem is None
    expected = step_traffic(case, rank, 8)
    assert expected is not None
    assert counted == [sent for sent in expected if sent.axis not in ("pp", "world")]


def measure_compiled(rank: int, case: Experiment, backend: str, warmup_steps: int) -> tuple[Counted, str | None, dict]:
    """Counted by `measure`; and how often dynamo has skipped or compiled a frame after the first step."""
    from torch._dynamo.utils import counters

    compile_module = torch.nn.Module.compile
    torch.nn.Module.compile = partialmethod(compile_module, backend=backend)  # type: ignore[method-assign, assignment]
    frames: list[dict[str, int]] = []
    try:
        engine = built(rank, case)
        counter = TrafficCounter(axes_of(engine.groups), DEVICES_PER_NODE)
        spec = MeasureSpec(warmup_steps=warmup_steps, timed_steps=2)
        measure(engine, spec, lambda step, warm: frames.append(dict(counters["frames"])), counter)
        frames.append(dict(counters["frames"]))
        return counter.traffic, counter.problem, {"after the first step": frames[1], "at the end": frames[-1]}
    finally:
        torch.nn.Module.compile = compile_module  # type: ignore[method-assign]
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("c++") is None, reason="Inductor needs a C++ compiler")
@pytest.mark.parametrize(
    "layout",
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
    ids=str,
)
def test_compiled_blocks_are_counted_and_stay_compiled(gloo_pool: Pool, layout: dict[str, Any]) -> None:
    """The compiler decides what backward gathers again."""
    case = experiment(compile="block", precision="bf16", **layout)
    ranks = gloo_pool.run(measure_compiled, case.world_size, case, "inductor", 2, timeout_s=240)
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

    compile_module = torch.nn.Module.compile
    torch.nn.Module.compile = partialmethod(compile_module, backend="aot_eager")  # type: ignore[method-assign, assignment]
    compiled: list[int] = []

    def before(step: int, is_warmup: bool) -> None:
        if step == 1:
            torch._dynamo.reset()
            compiled.append(counters["frames"]["ok"])

    try:
        engine = built(rank, case)
        spec = MeasureSpec(warmup_steps=2, timed_steps=2)
        measure(engine, spec, before, TrafficCounter(axes_of(engine.groups), DEVICES_PER_NODE))
        return compiled[0], counters["frames"]["ok"]
    finally:
        torch.nn.Module.compile = compile_module  # type: ignore[method-assign]
        torch._dynamo.reset()


@pytest.mark.slow
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


def call_in_unknown_group(rank: int) -> tuple[Counted, str | None]:
    other = dist.new_group([0, 1])
    with TrafficCounter({dist.group.WORLD.group_name: "world"}) as counter:
        dist.all_reduce(torch.ones(3))
        dist.all_reduce(torch.ones(3), group=other)
    return counter.traffic, counter.problem


def call_unknown_kind(rank: int) -> tuple[Counted, str | None]:
    with TrafficCounter({dist.group.WORLD.group_name: "world"}) as counter:
        dist.broadcast(torch.ones(3), src=0)
    return counter.traffic, counter.problem


def every_kind(rank: int) -> tuple[Counted, str | None]:
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

"""What a probe tries: shapes by hand, cases that the engine can run, and figures of every kind on CPU processes."""

from __future__ import annotations

import dataclasses

import pytest
import torch
import torch.distributed as dist

from tests.pool import Pool
from tests.workloads.contract.test_stages import CLUSTER, MODEL, experiment
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.probe_figures import ON_CPU, ON_GPU, Figure
from workloads.contract.protocol import Task
from workloads.probe import device_rates, layers, network, run
from workloads.probe.stopwatch import Stopwatch
from workloads.rules.layout_rules import layout_violations

CPU = torch.device("cpu")


def test_products_of_a_layer_by_hand() -> None:
    # 64 wide, 4 heads of 16 for queries, keys and values each, 128 in the feed-forward layer
    shapes = device_rates.matmul_shapes(MODEL)
    assert shapes[:4] == [("qkv", 1, 192, 64), ("out", 1, 64, 64), ("gate_up", 1, 256, 64), ("down", 1, 64, 128)]
    assert ("down", 4, 64, 32) in shapes
    assert {tp for _, tp, _, _ in shapes} == {1, 2, 4}, "4 heads cannot be split over 8"


@pytest.mark.parametrize("sizes", [ON_GPU, ON_CPU], ids=["gpu", "cpu"])
def test_cases_have_no_broken_rule(sizes: layers.Sizes) -> None:
    own = experiment(dp=2)
    cases, hosts = layers.layer_cases(own, sizes), layers.host_cases(own, sizes)
    assert len(cases) == 3 * len(sizes.micro_batches) * 3, "tp 1, 2 and 4; three kinds of recomputation"
    assert {(case.tp, case.zero_stage) for case in hosts} == {(1, 0), (1, 3), (2, 0), (2, 3)}
    for case in (*cases, *hosts):
        assert not layout_violations(case)
        assert case.precision == own.precision
    assert {case.num_microbatches for case in cases} == {1}
    assert {case.num_microbatches for case in hosts} == {sizes.host_rounds}
    assert ON_GPU.host_rounds == 8, "most of a real step's are not the first"


def test_copies_are_taken_off_the_parts_they_are_in() -> None:
    off = layers._shares((5.0, 10.0), layers=2)
    assert off == pytest.approx(
        {"layers_forward": 4.0, "head_forward": 0.5, "layers_backward": 8.0, "head_backward": 1.0}
    )


def test_repeats_are_as_many_as_the_time_asks_for() -> None:
    calls = []
    timed = Stopwatch(CPU).time(lambda: calls.append(0), 0.0)
    assert timed.repeats == 5
    assert len(calls) == 2 + 3 + 5
    assert timed.state == {"sm_clock_mhz": None, "power_w": None, "temperature_c": None}
    assert Stopwatch(CPU).time(lambda: None, 0.0, repeats=10).repeats == 10


def test_of_two_times_the_host_was_tested_the_lower_values_count() -> None:
    def figures(**values: float) -> list[Figure]:
        return [Figure(kind="host", name=name, tp=2, value=value, unit="s") for name, value in values.items()]

    kept = layers.lower_of([*figures(forward=2.0, backward=3.4), *figures(backward=2.2, forward=2.1)])
    assert [(one.name, one.value) for one in kept] == [("forward", 2.0), ("backward", 2.2)]
    # One that ran out of memory at one of the times counts as it was found at the other.
    assert len(layers.lower_of([*figures(forward=2.0), *figures(forward=2.5, backward=3.0)])) == 2


def task() -> Task:
    device = dataclasses.replace(CLUSTER.device, memory_bytes=None)
    return Task(
        attempt_id="a",
        experiment=experiment(dp=2, precision="fp32"),
        measure=MeasureSpec(),
        cluster=dataclasses.replace(CLUSTER, device=device),
        devices_per_node=2,
        probe="probe",
    )


@pytest.mark.exhaustive(seconds=45)
def test_one_device_alone_has_figures_of_every_kind() -> None:
    beats: list[int | None] = []
    shares = [run.alone(task(), rank, rank, lambda phase, step: beats.append(step)) for rank in range(2)]
    names = [{(f.kind, f.name, f.tp, f.rows, f.recompute, f.micro_batch_size, f.zero_stage) for f in s} for s in shares]
    shared = {"copy", "optimizer"}
    assert {f.kind for f in (*shares[0], *shares[1])} == {"matmul", "attention", "layer", "host"} | shared
    assert {name[0] for name in names[0] & names[1]} == shared, "tests are shared out among the ranks"
    assert all(f.value > 0 for f in shares[0] if f.kind != "layer"), "times of copies are taken off the others"
    assert {f.unit for f in shares[0]} == {"s", "FLOP/s", "B/s"}
    assert beats == sorted(beats[: len(beats) // 2]) * 2 or len(set(beats)) > 10


def both(rank: int) -> list[tuple[str, int | None, int | None]]:
    one = network.make_placed(2, 2, rank)
    assert [(placed.ranks, placed.placement) for placed in one] == [((0, 1), "inside_node")]
    apart = network.make_placed(2, 1, rank)
    assert [(placed.ranks, placed.placement) for placed in apart] == [((0, 1), "between_nodes")]
    anew = network.make_placed(2, 1, rank, across_only=True)
    assert [one.placement for one in anew] == ["between_nodes"] and anew[0].group is not apart[0].group
    assert not network.make_placed(2, 2, rank, across_only=True)
    watch = Stopwatch(CPU)
    found = [*network.collective_figures(watch, [*one, *apart], ON_CPU, lambda: None, rank)]
    found += network.check_figures(watch, [*one, *apart], ON_CPU)
    assert not [*network.interference_figures(watch, one[0], lambda: None, rank)], "a CPU has no streams"
    dist.barrier()
    return [(figure.name, figure.bytes, figure.group_size) for figure in found]


@pytest.mark.slow
def test_ranks_together(gloo_pool: Pool) -> None:
    first, second = gloo_pool.run(both, 2)
    assert len(first) == (5 + 6) * 2 + 4, "two groups, five operations and one way between nodes, two sizes, the check"
    assert first.count(("send", 2**10, 2)) == 1
    assert [name for name, _, _ in second] == ["matmul", "copy", "all_reduce_inside_node", "all_reduce_between_nodes"]

"""The profiled steps: what a profiler that fails costs, and what a rank without a GPU does."""

from __future__ import annotations

import dataclasses
import gzip
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.pool import Pool
from tests.workloads.engine.test_breakdown import two_steps
from tests.workloads.measuring.test_step import engine
from tests.workloads.test_worker import experiment, run
from workloads.contract import protocol
from workloads.contract.measure_spec import PROFILED_STEPS, MeasureSpec
from workloads.contract.protocol import Breakdown
from workloads.measuring import profiled

Found = tuple[Breakdown | None, str | None]


class FakeProfiler:
    """In the place of torch's: notes what it is asked, and "records" a trace made by hand."""

    fails_in: str | None = None

    def __init__(self, **options: Any) -> None:
        self.asked: list[str] = []
        self.at_step = options["schedule"]
        assert [self.at_step(step).name for step in range(3)] == ["WARMUP", "RECORD", "RECORD_AND_SAVE"]

    def _note(self, what: str) -> None:
        self.asked.append(what)
        if what == self.fails_in:
            raise RuntimeError(f"CUPTI does not {what}")

    def start(self) -> None:
        self._note("start")

    def step(self) -> None:
        self._note("step")

    def stop(self) -> None:
        self._note("stop")

    def export_chrome_trace(self, path: str) -> None:
        self._note("export")
        Path(path).write_text(json.dumps(two_steps().trace()))


def profile_as_on_cuda(
    rank: int, folder: Path, fails_in: str | None, layout: dict[str, Any]
) -> tuple[Found, list[int]]:
    """What comes of it, and the steps that were run: all of them, whatever fails."""
    made = engine(rank, **layout)
    steps: list[int] = []
    cpu = made.groups.device
    real_profiler, real_run = torch.profiler.profile, profiled.run_steps

    def run_steps(engine: Any, *args: Any, **options: Any) -> Any:
        groups = dataclasses.replace(engine.groups, device=cpu)
        return real_run(dataclasses.replace(engine, groups=groups), *args, **options)

    FakeProfiler.fails_in = fails_in
    torch.profiler.profile = FakeProfiler  # type: ignore[assignment, misc]
    profiled.run_steps = run_steps
    try:
        on_cuda = dataclasses.replace(made, groups=dataclasses.replace(made.groups, device=torch.device("cuda")))
        return profiled.profile(on_cuda, folder, 8, lambda step, warm: steps.append(step)), steps
    finally:
        torch.profiler.profile, profiled.run_steps = real_profiler, real_run  # type: ignore[misc]


@pytest.mark.slow
def test_the_breakdown_of_the_first_rank_of_every_stage(gloo_pool: Pool, tmp_path: Path) -> None:
    ranks = gloo_pool.run(profile_as_on_cuda, 4, tmp_path, None, {"dp": 2, "pp": 2, "global_batch_size": 4})
    for rank, ((found, trace), steps) in enumerate(ranks):
        assert steps[:PROFILED_STEPS] == [8, 9, 10]
        assert (found is not None) == (rank in (0, 2))
        assert trace == ("rank_0.trace.json.gz" if rank == 0 else None)
    assert [path.name for path in tmp_path.iterdir()] == ["rank_0.trace.json.gz"]
    with gzip.open(tmp_path / "rank_0.trace.json.gz") as file:
        assert json.load(file) == two_steps().trace()


@pytest.mark.parametrize("fails_in", ["start", "step", "stop", "export"])
def test_a_profiler_that_fails_costs_the_breakdown_alone(gloo_pool: Pool, tmp_path: Path, fails_in: str) -> None:
    for (found, trace), steps in gloo_pool.run(profile_as_on_cuda, 2, tmp_path, fails_in, {"dp": 2}):
        assert (found, trace) == (None, None)
        assert steps[:PROFILED_STEPS] == [8, 9, 10]
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_is_full_costs_the_breakdown_alone(gloo_pool: Pool, tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    for (found, trace), _ in gloo_pool.run(profile_as_on_cuda, 2, missing, None, {"dp": 2}):
        assert (found, trace) == (None, None)


def test_only_first_ranks_record() -> None:
    def records(**position: int) -> bool:
        return profiled.records(SimpleNamespace(position=position))  # type: ignore[arg-type]

    assert records(pp=3, dp_replicate=0, dp_shard=0, cp=0, tp=0)
    assert not records(pp=0, dp_replicate=0, dp_shard=0, cp=0, tp=1)


@pytest.mark.slow
def test_on_a_cpu_nothing_is_profiled_and_nothing_is_lost(tmp_path: Path) -> None:
    spec = MeasureSpec(warmup_steps=1, timed_steps=2, profile=True)
    assert run(tmp_path, experiment(dp=2), measure=spec) == [0, 0]
    for rank in range(2):
        result = protocol.read_result(tmp_path, rank)
        assert result is not None
        assert (len(result.steps), result.breakdown, result.trace) == (3, None, None)
        assert result.traffic is not None
        assert {sent.axis for sent in result.traffic} == {"dp_replicate"}
        assert {sent.link for sent in result.traffic} == {None}, "the task does not say how many devices a node has"


@pytest.mark.gpu
@pytest.mark.multi_gpu
def test_a_profiled_step_on_gpus(nccl_pool: Pool, tmp_path: Path) -> None:
    for found, trace, step_time_s, problem in nccl_pool.run(profile_on_gpu, 2, tmp_path):
        assert problem is None
        if found is None:
            continue
        assert trace == "rank_0.trace.json.gz"
        parts = ("matmul", "attention", "optimizer", "memory_bound", "comm_exposed", "bubble", "launch_gaps")
        assert sum(getattr(found, f"{part}_s") for part in parts) == pytest.approx(found.step_time_s)
        # The unit and the step are right; other tests on the same devices make either twice as long at times.
        assert 1 / 3 < found.step_time_s / step_time_s < 3
        assert found.matmul_s > 0
        assert found.optimizer_s > 0
        assert {time.axis for time in found.comm_by_axis} == {"dp_shard"}, "NCCL's kernels name their group"


def profile_on_gpu(rank: int, folder: Path) -> tuple[Breakdown | None, str | None, float, str | None]:
    from tests.workloads.measuring.test_step import MODEL
    from workloads.engine.collectives.groups import make_groups
    from workloads.engine.observing.traffic import TrafficCounter, axes_of
    from workloads.engine.training.build import build, choose_attention
    from workloads.measuring.step import measure
    from workloads.spec.experiment import Experiment

    wide = dataclasses.replace(MODEL, hidden_size=1024, num_heads=8, head_dim=128, ffn_hidden_size=4096, num_layers=8)
    batch = {"seq_len": 1024, "micro_batch_size": 2, "global_batch_size": 8}
    case = Experiment.canonical(model=wide, dp=2, zero_stage=3, cuda_graph="none", **batch)  # profiled steps are eager
    choose_attention(case)
    made = build(case, make_groups(case, rank, torch.device("cuda", rank)))
    counter = TrafficCounter(axes_of(made.groups), 8)
    measured = measure(made, MeasureSpec(timed_steps=5), counter=counter)
    found, trace = profiled.profile(made, folder, measured.steps[-1].step + 1, lambda step, warm: None)
    return found, trace, min(step.step_time_s for step in measured.steps), counter.problem

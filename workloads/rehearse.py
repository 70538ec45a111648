"""Runs one rank of an N-rank experiment alone, on one device or without any.

The rank builds and runs the real engine under torch's fake process group: collectives return at once, but buffers have
their real sizes and kernels are real, so peak memory and compute time are measured. Data of other ranks is replaced by
ordinary numbers, so that matmuls draw the power of a real run. Without a GPU the same program runs on FakeTensors:
nothing is computed, every storage is counted, and no time is measured.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore

from workloads.contract.protocol import MemoryAtPeak, Phase, RankResult, Task
from workloads.contract.stages import shortened
from workloads.engine.collectives.groups import Groups, make_groups
from workloads.engine.observing.memory import MemoryProbe
from workloads.engine.observing.stand_ins import StandIns
from workloads.engine.training.build import Engine, assemble, build, choose_attention, shape_chunks
from workloads.engine.training.data import Batch, parts_of_batch
from workloads.measuring.device import DeviceSampler, identity, prepare_device
from workloads.measuring.step import measure
from workloads.spec.experiment import Experiment

EnterPhase = Callable[[Phase, int | None], None]


def rehearse(
    task: Task,
    rank: int,
    local_rank: int,
    enter: EnterPhase,
    started_at: dict[str, float],
    clock: Callable[[], float],
) -> RankResult:
    """Run ``rank`` of ``task.experiment`` alone. Its step times are those of the shortened experiment (`shortened`).

    ``started_at``: start time of each phase, by ``clock``; ``enter`` fills it in.
    """
    experiment = shortened(task.experiment)
    enter("rendezvous", None)
    fake = task.method == "rehearsed_fake"
    device = torch.device("cpu") if fake else prepare_device(task, local_rank)
    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=experiment.world_size)
    groups = make_groups(experiment, rank, device)
    enter("build", None)
    choose_attention(experiment)
    position = {**groups.position, "dp": groups.data_rank}
    if fake:
        at_peak = trace_memory(experiment, groups, enter)
        return RankResult(
            rank=rank,
            coordinates=position,
            steps=[],
            phase_started_at={**started_at, "teardown": clock()},
            memory_at_peak=at_peak,
            versions={"torch": torch.__version__},
        )
    engine = build(experiment, groups)
    sampler = DeviceSampler(device)

    def announce(step: int, is_warmup: bool) -> None:
        enter("warmup" if is_warmup else "step", step)
        if not is_warmup:
            sampler.start()

    stand_ins = StandIns(engine)
    measurements = measure(engine, task.measure, announce, stand_ins)
    state = sampler.stop()
    copies = stand_ins.seconds() or (None, None)
    return RankResult(
        rank=rank,
        coordinates=position,
        steps=sampler.with_clocks(measurements.steps, measurements.timed_spans),
        phase_started_at={**started_at, "teardown": clock()},
        memory_at_peak=measurements.memory_at_peak,
        forward_s=measurements.forward_s,
        backward_s=measurements.backward_s,
        stand_ins_forward_s=copies[0],
        stand_ins_backward_s=copies[1],
        timed_wall_s=measurements.timed_wall_s,
        host_lead_s=measurements.host_lead_s,
        routing=measurements.routing,
        device_state=state,
        **identity(device),
    )


def trace_memory(experiment: Experiment, groups: Groups, enter: EnterPhase) -> MemoryAtPeak:
    """Peak memory of one rank by category, traced on FakeTensors in the second step, when the optimizer state exists.

    Meshes and FSDP are set up outside the fake mode, because building them reads tensor values. The trace is higher
    than a device's peak in one case: the peak is in the embedding's backward, and the embedding is tied to the output
    projection. There autograd adds the two gradients of the weight in place on a device, but into a third tensor on
    FakeTensors.
    """
    chunks = shape_chunks(experiment.replace(compile="none"), groups)
    with FakeTensorMode(allow_non_fake_inputs=True):
        for chunk in chunks:
            chunk.to_empty(device="cpu")
        engine = assemble(experiment, groups, chunks)
        enter("warmup", 0)
        _step(engine)
        enter("step", 1)
        probe = MemoryProbe(engine)
        with probe.watch():
            _step(engine)
    assert probe.at_peak is not None
    return probe.at_peak


def _step(engine: Engine) -> None:
    engine.pipeline.run(_empty_batches(engine.experiment))
    engine.optimizer.finish_gradients()
    engine.optimizer.add_tied_copies()
    engine.optimizer.step(engine.optimizer.local_square_norm().sqrt())


def _empty_batches(experiment: Experiment) -> list[Batch]:
    tokens = experiment.micro_batch_size * experiment.seq_len // experiment.cp
    parts = parts_of_batch(experiment)
    make = lambda: torch.empty(tokens, dtype=torch.long)  # noqa: E731
    return [tuple(make() for _ in range(parts)) for _ in range(experiment.num_microbatches)]

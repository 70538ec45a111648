"""The part of a probe that runs on one rank, and the check of a node at the start of a pilot."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from workloads.contract.probe_figures import Figure, sizes_of
from workloads.contract.protocol import Phase, RankResult, Task
from workloads.engine.training.build import choose_attention
from workloads.measuring import host_pace
from workloads.measuring.device import identity, prepare_device
from workloads.probe import device_rates, layers, network
from workloads.probe.stopwatch import Stopwatch

EnterPhase = Callable[[Phase, int | None], None]


class _Beats:
    """Sends a heartbeat before each test, with the number of the test instead of a step."""

    def __init__(self, enter: EnterPhase, phase: Phase, first: int = 0) -> None:
        self._enter, self._phase, self._count = enter, phase, first

    def __call__(self) -> None:
        self._enter(self._phase, self._count)
        self._count += 1


def alone(task: Task, rank: int, local_rank: int, enter: EnterPhase) -> list[Figure]:
    """Figures of this rank's device alone. The tests are divided among the ranks, which run them at the same time.

    Call this before the ranks rendezvous, because the layers run under fake process groups.
    """
    device = prepare_device(task, local_rank)
    sizes, model, beat = sizes_of(task.device), task.experiment.model, _Beats(enter, "build")
    watch = Stopwatch(device)
    share = slice(rank, None, task.experiment.world_size)
    choose_attention(task.experiment)
    hosts = layers.host_cases(task.experiment, sizes)[share]
    launches = [host_pace.launch_s(device)]

    def with_launch_time(figures: Iterable[Figure]) -> list[Figure]:
        """Runs the tests that yield ``figures``, then measures how fast the host launches at that moment."""
        measured = list(figures)
        launches.append(host_pace.launch_s(device))
        return measured

    at_first = with_launch_time(layers.host_figures(watch, hosts, sizes, beat))
    of_device = [
        *with_launch_time(device_rates.copy_figures(watch, sizes, beat)),
        *with_launch_time(device_rates.matmul_figures(watch, model, sizes, share, beat)),
        *with_launch_time(device_rates.attention_figures(watch, model, sizes, share, beat)),
        *with_launch_time(device_rates.optimizer_figures(watch, sizes, beat)),
        *with_launch_time(device_rates.link_figures(watch, sizes, beat)),
        *with_launch_time(layers.layer_figures(watch, layers.layer_cases(task.experiment, sizes)[share], sizes, beat)),
    ]
    of_host = layers.lower_of([*at_first, *with_launch_time(layers.host_figures(watch, hosts, sizes, beat))])
    return [*of_device, *of_host, *layers.launch_figures(launches)]


def together(task: Task, rank: int, local_rank: int, enter: EnterPhase) -> list[Figure]:
    """Figures of all ranks together, in the default process group, which must exist."""
    if task.experiment.world_size == 1:
        return []
    device = torch.device(task.device, local_rank) if task.device == "cuda" else torch.device("cpu")
    sizes, beat = sizes_of(task.device), _Beats(enter, "step", first=1_000_000)
    watch = Stopwatch(device)
    placed = network.make_placed(task.experiment.world_size, task.devices_per_node or 1, rank)
    figures = [*network.collective_figures(watch, placed, sizes, beat, rank)]
    of_node, between = ([one for one in placed if one.placement == place] for place in ("inside_node", "between_nodes"))
    for one in (*of_node[-1:], *between):
        figures += network.interference_figures(watch, one, beat, rank)
    for _ in range(1, sizes.moments if between else 1):
        anew = network.make_placed(task.experiment.world_size, task.devices_per_node or 1, rank, across_only=True)
        figures += network.collective_figures(watch, anew, sizes, beat, rank)
    return figures


def check(task: Task, rank: int, local_rank: int, enter: EnterPhase, started_at: dict[str, float]) -> RankResult:
    """Checks rates of this rank's device and of its node's links; takes seconds."""
    enter("rendezvous", None)
    device = prepare_device(task, local_rank)
    world_size = task.experiment.world_size
    if world_size > 1:
        store = TCPStore(
            task.rendezvous_host,
            task.rendezvous_port,
            world_size,
            is_master=rank == 0,
            timeout=timedelta(seconds=task.collective_timeout_s),
            wait_for_workers=False,
        )
        backend = "nccl" if task.device == "cuda" else "gloo"
        dist.init_process_group(
            backend, store=store, rank=rank, world_size=world_size, timeout=timedelta(seconds=task.collective_timeout_s)
        )
    enter("build", None)
    placed = network.make_placed(world_size, task.devices_per_node or 1, rank) if world_size > 1 else []
    figures = list(network.check_figures(Stopwatch(device), placed, sizes_of(task.device)))
    return RankResult(
        rank=rank, coordinates={}, steps=[], phase_started_at=dict(started_at), probe=figures, **identity(device)
    )

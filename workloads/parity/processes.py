"""Trains a layout on processes of this machine, one for each rank."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from workloads.measuring.processes import on_ranks
from workloads.spec.experiment import Experiment

if TYPE_CHECKING:
    from workloads.parity.training import RankTrace


def train(experiment: Experiment, steps: int, device: str, *, timeout_s: float = 600.0) -> list[RankTrace]:
    """Train the layout and return the trace of each rank. ``timeout_s``: longest time until all ranks have ended.

    Raises `workloads.measuring.processes.RankFailed` with the first rank's error; the other ranks are ended.
    """
    return on_ranks(
        partial(_train, experiment=experiment, steps=steps, device=device),
        experiment.world_size,
        device,
        preload=["workloads.parity.training"],
        timeout_s=timeout_s,
    )


def _train(rank: int, experiment: Experiment, steps: int, device: str) -> RankTrace:
    from workloads.parity.training import train_rank

    return train_rank(rank, experiment, steps, device, with_activations=True)

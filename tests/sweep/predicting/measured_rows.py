"""Experiments of one cluster and rows as if they had been measured there, for the tests of forecasts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sweep.predicting.codebases import read_clusters
from sweep.predicting.forecast import Forecast
from tests.sweep.helpers import store_attempt
from tests.workloads.costs.shapes import LLAMA_1B, LLAMA_8B
from workloads.spec.experiment import Experiment

H200 = read_clusters()["h200"]


def of(**fields: Any) -> Experiment:
    """A layout with eager steps, which may wait for their host."""
    usual = {"model": LLAMA_8B, "seq_len": 4096, "global_batch_size": 64, "cuda_graph": "none"}
    return Experiment.canonical(**{**usual, **fields})


def slow_rows(cluster: str, folder: Path, factor: float = 1.6) -> None:
    """Six layouts of a small model that took so much longer than is predicted."""
    experiments = [of(model=LLAMA_1B, dp=dp, zero_stage=zero) for dp in (2, 4, 8) for zero in (0, 2)]
    for experiment, time in zip(experiments, Forecast.of(H200).times(experiments), strict=True):
        assert time is not None
        store_attempt(folder / "before", experiment, cluster=cluster, step_time_s=factor * time.step_time_s)

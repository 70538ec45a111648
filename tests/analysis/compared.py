"""What tests of comparisons share: runs, points and sweeps to set against each other."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pandas as pd

from analysis.compare import matching, moved
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of
from workloads.spec.experiment import Experiment

ROOT = Path(__file__).resolve().parents[2]
RECORDED = ROOT / "results" / "recorded"
STUDY = ROOT.parent / "shared" / "study" / "bench_final2_mfu2.csv"
MIB = 2**20
POINTS = [point for point in synthetic.experiments(synthetic.MODELS[:1], (4,), (1, 2)) if point.zero_stage in (0, 1)]


def run(experiment: Experiment, rate: float, index: int = 0, *, spread: float = 0.01, **columns: Any) -> dict[str, Any]:
    """A finished run of ``rate`` tokens/s/GPU; its timed steps lie up to half of ``spread`` from the median."""
    step = experiment.tokens_per_step / rate / experiment.world_size
    told = {
        "outcome": "ok",
        "tokens_per_s_per_gpu": rate,
        "step_time_s": step,
        "step_time_min_s": step * (1 - spread / 2),
        "step_time_max_s": step * (1 + spread / 2),
        "peak_allocated_bytes": 1000 * MIB,
        "peak_reserved_bytes": 1200 * MIB,
        "losses": [12.0, 11.5, 11.0],
        "grad_norms": [2.0, 1.9, 1.8],
    }
    return synthetic.attempt(experiment, index, **(told | columns))


def copy_drawn_sweeps(folder: Path, count: int = 8) -> Path:
    """Copies ``count`` of the recorded sweeps, the same ones in every run, into ``folder``; all are tested in
    exhaustive runs."""
    sweeps = sorted(path.parent for path in RECORDED.glob("*/sweep.json"))
    for sweep in random.Random(0).sample(sweeps, count):
        shutil.copytree(sweep, folder / sweep.name)
    return folder


def points_of(*rows: dict[str, Any], **kwargs: Any) -> pd.DataFrame:
    return matching.points(frame_of(list(rows)), **kwargs)


def judged(a: pd.DataFrame, b: pd.DataFrame, noise: float | None = None, **kwargs: Any) -> pd.DataFrame:
    return moved.judged(matching.match(a, b).pairs, moved.noise_of(a, b, noise), **kwargs)


def sweep(folder: Path, *rows: dict[str, Any]) -> Path:
    return synthetic.make_sweep(folder, [row | {"attempt_id": f"{i:04d}"} for i, row in enumerate(rows)])

"""Rows of finished runs made by hand, their ledger, and the lines with which a run of them ends."""

from __future__ import annotations

from functools import cache
from typing import Any

from rich.console import Console

from launchers.state.sweep_dir import SweepDir
from launchers.status.run_summary import RunSummary
from sweep.running import run_end
from tests.sweep.helpers import plan_of, store_attempt
from workloads.spec.experiment import Experiment
from workloads.spec.record import config_columns


@cache
def planned() -> list[Experiment]:
    """Layouts of Llama-3.1-8B on 8 GPUs that may run."""
    found = [point.experiment for point in plan_of(["+grid=llama8b_8gpu", "cluster=h100_efa"]).to_run]
    return [experiment for experiment in found if experiment.world_size == 8 and experiment.seq_len == 4096]


def layouts(count: int) -> list[Experiment]:
    return [planned()[0].replace(recompute=recompute) for recompute in ("none", "full", "selective")][:count]


def store(sweep: SweepDir, experiment: Experiment, rate: float, **columns: Any) -> None:
    marker = sweep.marker.read_text()
    fields: dict[str, Any] = {
        "tokens_per_s_per_gpu": rate,
        "step_time_min_s": 0.999,
        "step_time_max_s": 1.001,
        "timed_steps": 5,
        "peak_allocated_bytes": 60 * 2**30,
        "backend": "cuda",
        "mfu_palm": 0.5,
    }
    store_attempt(sweep.path, experiment, **{**fields, **columns})
    sweep.marker.write_text(marker)


def ledger_row(number: int, experiment: Experiment, verdict: str, predicted: float) -> dict[str, Any]:
    return {
        "sweep": "s",
        "grid": "g",
        "point": number,
        "verdict": verdict,
        "predicted_tokens_per_s_per_gpu": predicted,
        "expected_gpu_hours": 0.25 * (number + 1),
        **config_columns(experiment),
    }


def ended(sweep: SweepDir, width: int, **changes: Any) -> str:
    fields: dict[str, Any] = {"outcomes": {"ok": 2}, "attempts": 2, "left": 0, "too_wide": 0, "interrupted": False}
    console = Console(record=True, width=width, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    run_end.print_end(sweep, RunSummary(**{**fields, **changes}), "python -m sweep run +grid=g", console)
    return console.export_text()

"""Small sweeps for the tests of this folder."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from results.tables.schema import MEASUREMENT_VERSION, SCHEMA_VERSION
from results.tables.store import write_attempt
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import compose_sweep
from sweep.grids.expand import expand_all
from sweep.planning.plan import Plan, make_plan, refuse_if_nothing_can_run
from sweep.planning.point_verdict import DeviceLimit
from sweep.planning.reuse import FinishedAttempt
from sweep.predicting.known import Known
from workloads.contract.protocol import Method
from workloads.rules.captured_steps import is_captured
from workloads.spec.experiment import Experiment
from workloads.spec.record import config_columns

APERTUS = {
    "model_type": "apertus",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 21504,
    "vocab_size": 131072,
    "hidden_act": "xielu",
    "rope_theta": 500000,
}
"""A config.json like that of swiss-ai/Apertus-8B-2509: a model that is planned and that the engine does not run."""


def plan_of(
    overrides: Sequence[str],
    method: Method = "measured",
    finished: dict[str, FinishedAttempt] | None = None,
    device_limit: DeviceLimit | None = None,
    known: Known | None = None,
    folders: ConfFolders | None = None,
) -> Plan:
    config = compose_sweep(overrides, folders or ConfFolders())
    points = expand_all(config.grids, config.models.__getitem__)
    return make_plan(config, points, method, finished, device_limit, known=known)


def store_attempt(sweep_dir: Path, experiment: Experiment, **columns: Any) -> str:
    """An attempt as a pilot would store it; its id."""
    sweep_dir.mkdir(parents=True, exist_ok=True)
    (sweep_dir / "sweep.json").write_text("{}")
    attempt_id = f"{experiment.id}.{time.time_ns()}"
    row = {
        "attempt_id": attempt_id,
        "schema_version": SCHEMA_VERSION,
        "measurement_version": MEASUREMENT_VERSION,
        "sweep": sweep_dir.name,
        "method": "measured",
        "outcome": "ok",
        "started_at": datetime.now(tz=UTC),
        "cuda_graph_run": "step" if is_captured(experiment) else "none",
        **config_columns(experiment),
        **columns,
    }
    write_attempt(sweep_dir, row, [])
    return attempt_id


def check_points_to_run(plan: Plan) -> None:
    """Of a shipped grid: it lists each run once, and a good part of its points can run."""
    refuse_if_nothing_can_run(plan)
    assert plan.duplicates == 0
    assert plan.counts["run"] >= 0.4 * len(plan.points)

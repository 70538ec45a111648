"""The ``playbook`` grid against the raw table of the study that it stands for."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pandas as pd
import pytest

from sweep.composing.config import compose_sweep
from sweep.grids.expand import expand_all
from sweep.planning.plan import Plan, make_plan
from sweep.planning.point_verdict import PlannedPoint
from tests.sweep.helpers import check_points_to_run

pytestmark = pytest.mark.slow

TABLE = Path(__file__).resolve().parents[4] / "shared" / "study" / "bench_final2_mfu2.csv"
MODELS = {
    "1.34G": "llama1.34b",
    "3.57G": "llama3.57b",
    "8.86G": "llama8.86b",
    "80G": "llama80b",
    "469G": "llama469b",
}
Key = tuple[str, int, int, int, int, int, int, int]


@pytest.fixture(scope="module")
def plan() -> Plan:
    config = compose_sweep(["+grid=playbook"])
    return make_plan(config, expand_all(config.grids, config.models.__getitem__), "measured")


@pytest.fixture(scope="module")
def points(plan: Plan) -> dict[Key, PlannedPoint]:
    def key(point: PlannedPoint) -> Key:
        e = point.experiment
        micro = e.micro_batch_size, e.num_microbatches
        return e.model.name, e.world_size // 8, e.dp, e.tp, e.pp, *micro, e.zero_stage

    found = {key(point): point for point in plan.points}
    assert len(found) == len(plan.points)
    return found


@pytest.fixture(scope="module")
def rows() -> list[tuple[Key, str]]:
    """Layout and status of the table's rows with the study's batch of 256 sequences.

    The batch is recomputed (the table's own column mixes sequences and tokens). The model is the label at the start of
    a row's name: a few rows under the label 80G have other key-value heads or another vocabulary, and their layouts
    are points all the same. With one data-parallel rank ZeRO means nothing and is 0.
    """
    if not TABLE.exists():
        pytest.skip(f"the study's raw table is not at {TABLE}")
    table = pd.read_csv(TABLE)
    table = table[table["dp"] * table["mbs"] * table["batch_accum"] == 256]
    model = table["name"].str.split("_").str[0].map(MODELS)
    zero = table["zero_stage"].where(table["dp"] > 1, 0)
    columns = [model, table["nodes"], table["dp"], table["tp"], table["pp"], table["mbs"], table["batch_accum"], zero]
    keys = zip(*(c if c is model else c.astype(int) for c in columns), strict=True)
    return [((str(m), *map(int, rest)), status) for (m, *rest), status in zip(keys, table["status"], strict=True)]  # type: ignore[misc]


def test_every_layout_of_the_raw_table_is_a_point(points: dict[Key, PlannedPoint], rows: list[tuple[Key, str]]) -> None:
    assert len(rows) == 4078
    assert [key for key, _ in rows if key not in points] == []
    assert len({key for key, _ in rows}) == 4004  # 74 rows repeat a layout


def test_planning_would_have_lost_no_run_that_fits(
    points: dict[Key, PlannedPoint], rows: list[tuple[Key, str]]
) -> None:
    verdicts = Counter((status, points[key].verdict, points[key].rule) for key, status in rows)
    assert verdicts["Success", "predicted_oom", None] == 0
    # The study's engine counts embedding and head as blocks of the pipeline: 32 stages of a model of 28 layers.
    assert verdicts["Success", "invalid", "pp_layers"] == 1
    assert verdicts["Success", "run", None] == 1752
    out_of_memory = sum(count for (status, _, _), count in verdicts.items() if status == "OOM")
    assert verdicts["OOM", "predicted_oom", None] > 0.75 * out_of_memory


def test_the_grid_has_points_to_run(plan: Plan) -> None:
    assert compose_sweep(["+grid=playbook"]).grids[0].description
    check_points_to_run(plan)


def test_the_grid_keeps_to_the_studys_rules(plan: Plan) -> None:
    for point in plan.points:
        e = point.experiment
        assert e.dp * e.micro_batch_size * e.num_microbatches == e.global_batch_size == 256
        assert e.world_size in {8, 16, 32, 64, 128, 256, 512}
        assert (e.seq_len, e.precision, e.recompute) == (4096, "bf16", "none")
        assert e.zero_stage in (0, 1)
        assert e.tp <= 32 or e.model.name == "llama469b"
        assert e.pp_schedule == ("1f1b" if e.pp > 1 else "none")

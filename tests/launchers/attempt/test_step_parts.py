"""Columns of a step's traffic and of the parts of its time: only values that are known for every stage."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from launchers.attempt.attempt import Attempt
from launchers.attempt.step_parts import breakdown_columns, traffic_columns
from launchers.state.sweep_dir import Point
from results.tables.rows import table_from_rows
from results.tables.schema import ATTEMPTS
from tests.launchers.scripted import cluster
from tests.results.helpers import attempt as stored
from tests.workloads.costs.shapes import TINY
from workloads.contract import protocol
from workloads.contract.measure_spec import MeasureSpec
from workloads.contract.protocol import AxisTime, Breakdown, Method, RankResult, Task
from workloads.costs.traffic.sent import Traffic, step_traffic
from workloads.spec.experiment import Experiment

EXPERIMENT = Experiment.canonical(model=TINY, seq_len=16, global_batch_size=8, dp=2, pp=2)
SENT = [Traffic(axis="dp_replicate", op="all_reduce", link="inside_node", calls=3, bytes=96)]
NOTHING: list[AxisTime] = []


def attempt(tmp_path: Path, method: Method = "measured") -> Attempt:
    task = Task(attempt_id="a1", experiment=EXPERIMENT, measure=MeasureSpec(), cluster=cluster(), method=method)
    point = Point(index=0, experiment=EXPERIMENT, method=method, grid="g", deadline_s=60.0)
    return Attempt(
        attempt_id="a1",
        number=1,
        point=point,
        folder=tmp_path,
        task=task,
        started_at=0.0,
        device_ids=None,
        pilot_id="p",
    )


def result(rank: int, **fields: Any) -> RankResult:
    return RankResult(rank=rank, coordinates={}, steps=[], phase_started_at={}, **fields)


def breakdown(matmul_s: float, by_axis: list[AxisTime]) -> Breakdown:
    return Breakdown(
        step_time_s=matmul_s + 1,
        matmul_s=matmul_s,
        attention_s=0.5,
        optimizer_s=0.0,
        memory_bound_s=0.0,
        comm_exposed_s=0.25,
        bubble_s=0.25,
        launch_gaps_s=0.0,
        comm_hidden_s=0.0,
        comm_by_axis=by_axis,
    )


def test_a_measured_row_has_the_traffic_of_every_stages_first_rank(tmp_path: Path) -> None:
    results = {rank: result(rank, traffic=SENT if rank in (0, 2) else None) for rank in range(4)}
    entry = dataclasses.asdict(SENT[0])
    columns = traffic_columns(attempt(tmp_path), results)
    assert columns == {"traffic": [{"stage": s, **entry} for s in (0, 1)], "traffic_source": "counted"}
    row = table_from_rows([stored("a", **columns)], ATTEMPTS).to_pylist()[0]
    assert row["traffic"] == columns["traffic"]


def test_a_stage_that_was_not_counted_leaves_the_columns_empty(tmp_path: Path) -> None:
    assert traffic_columns(attempt(tmp_path), {0: result(0, traffic=SENT), 2: result(2)}) == {}
    assert traffic_columns(attempt(tmp_path), {0: result(0, traffic=SENT)}) == {}
    assert traffic_columns(attempt(tmp_path), {}) == {}


def test_a_rehearsed_row_has_the_closed_form_of_the_whole_batch(tmp_path: Path) -> None:
    """A rehearsal's ranks run fewer micro-batches without other ranks, so their own counts would describe another
    step."""
    columns = traffic_columns(attempt(tmp_path, "rehearsed"), {0: result(0), 2: result(2)})
    expected = [step_traffic(EXPERIMENT, rank, cluster().devices_per_node) for rank in (0, 2)]
    assert columns["traffic_source"] == "closed_form"
    assert columns["traffic"] == [
        {"stage": stage, **dataclasses.asdict(sent)} for stage in (0, 1) for sent in expected[stage]
    ]
    assert traffic_columns(attempt(tmp_path, "rehearsed"), {}) == {}


def test_breakdown_is_the_mean_over_the_stages(tmp_path: Path) -> None:
    first = breakdown(
        2.0,
        [AxisTime(axis="tp", exposed_s=0.25, hidden_s=1.0), AxisTime(axis="pp", exposed_s=None, hidden_s=0.5)],
    )
    last = breakdown(4.0, [AxisTime(axis="pp", exposed_s=None, hidden_s=1.5)])
    results = {
        0: result(0, breakdown=first, trace="rank_0.trace.json.gz"),
        1: result(1),
        2: result(2, breakdown=last),
        3: result(3),
    }
    columns = breakdown_columns(attempt(tmp_path), results)
    assert (columns["breakdown_matmul_s"], columns["breakdown_step_time_s"]) == (3.0, 4.0)
    assert columns["breakdown_comm_by_axis"] == [
        {"axis": "tp", "exposed_s": 0.125, "hidden_s": 0.5},
        {"axis": "pp", "exposed_s": None, "hidden_s": 1.0},
    ]
    assert columns["trace_file"] == "attempts/a1/rank_0.trace.json.gz"
    assert {name for name in ATTEMPTS.names if name.startswith("breakdown_")} < set(columns)
    parts = set(columns) - {"trace_file", "breakdown_comm_by_axis", "breakdown_step_time_s", "breakdown_comm_hidden_s"}
    assert sum(columns[part] for part in parts) == pytest.approx(columns["breakdown_step_time_s"])
    stored_row = table_from_rows([stored("a", **columns)], ATTEMPTS).to_pylist()[0]
    assert stored_row["breakdown_comm_by_axis"] == columns["breakdown_comm_by_axis"]


def test_without_the_breakdown_of_one_stage_there_is_none(tmp_path: Path) -> None:
    results = {0: result(0, breakdown=breakdown(2.0, NOTHING)), 2: result(2)}
    assert breakdown_columns(attempt(tmp_path), results) == {}
    assert breakdown_columns(attempt(tmp_path), {}) == {}


def test_results_survive_their_file(tmp_path: Path) -> None:
    by_axis = [AxisTime(axis=None, exposed_s=0.25, hidden_s=0.0)]
    written = result(0, traffic=SENT, breakdown=breakdown(2.0, by_axis), trace="rank_0.trace.json.gz")
    protocol.write_json(protocol.result_path(tmp_path, 0), written)
    assert protocol.read_result(tmp_path, 0) == written
    older = {k: v for k, v in dataclasses.asdict(result(1)).items() if k not in ("traffic", "breakdown", "trace")}
    protocol.write_json(protocol.result_path(tmp_path, 1), older)
    assert protocol.read_result(tmp_path, 1) == result(1)

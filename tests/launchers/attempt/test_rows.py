"""Rows of attempts whose clocks disagree: a duration is right, or it is null, and never negative."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from launchers.attempt import phases, rows
from launchers.attempt.attempt import Attempt, reopen_attempt, start_attempt
from launchers.attempt.outcome import Outcome
from launchers.pilot import dead_pilots
from launchers.state.queue import Claim
from launchers.state.sweep_dir import SweepDir
from tests.launchers.scripted import cluster, points, settings
from workloads.contract.protocol import RankResult, StepRecord

DURATIONS = ("duration_s", "spawn_s", "rendezvous_s", "build_s", "warmup_s", "timed_s", "teardown_s")


@pytest.fixture
def attempt(tmp_path: Path) -> Attempt:
    sweep = SweepDir.create(tmp_path / "s", {})
    claim = Claim(sweep, points("ok")[0].stem, "p", points("ok")[0])
    return start_attempt(claim, "p.a1.0", 1, settings(), host="localhost", port=1, device_ids=None, nodes=("n",))


def result(rank: int, began: float, *, skew_s: float = 0.0) -> RankResult:
    phases = ("spawn", "rendezvous", "build", "warmup", "step", "teardown")
    return RankResult(
        rank=rank,
        coordinates={},
        steps=[StepRecord(step=0, is_warmup=False, step_time_s=1.0)],
        phase_started_at={phase: began + skew_s + 0.5 * number for number, phase in enumerate(phases)},
    )


def row_of(attempt: Attempt, ended_at: float, results: dict[int, RankResult]) -> dict[str, Any]:
    context = rows.RunContext(sweep="s", launcher="local", cluster=cluster(), provenance={}, pilot_id="p")
    return rows.attempt_row(
        attempt,
        context,
        Outcome(outcome="ok"),
        results,
        ended_at=ended_at,
        will_retry=False,
        gap_s=None,
        comparison=None,
        rehearsed=None,
    )


def test_the_end_of_an_attempt_does_not_follow_a_clock_that_is_set_back(
    attempt: Attempt, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 3600.0)
    row = row_of(attempt, attempt.clock(), {})
    assert 0 <= row["duration_s"] < 10


def test_durations_across_clocks_are_null_where_they_would_be_negative(attempt: Attempt) -> None:
    row = row_of(attempt, attempt.started_at - 5.0, {})
    assert row["duration_s"] is None
    behind = {rank: result(rank, attempt.started_at, skew_s=-60.0) for rank in (0, 1)}
    row = row_of(attempt, attempt.started_at + 4.0, behind)
    assert row["spawn_s"] is None
    assert (row["rendezvous_s"], row["timed_s"]) == (pytest.approx(0.5), pytest.approx(0.5))
    ahead = {rank: result(rank, attempt.started_at, skew_s=60.0) for rank in (0, 1)}
    row = row_of(attempt, attempt.started_at + 4.0, ahead)
    assert row["teardown_s"] is None
    assert all(row[name] is None or row[name] >= 0 for name in DURATIONS)
    assert phases.seconds_between(2.0, 1.0) is None and phases.seconds_between(1.0, 2.5) == 1.5


def test_times_of_two_machines_are_not_subtracted(attempt: Attempt) -> None:
    """Rank 1 runs on another node, whose clock is a minute ahead."""
    here = dataclasses.replace(result(0, attempt.started_at + 1.0), host=attempt.host)
    there = dataclasses.replace(result(1, attempt.started_at + 1.0, skew_s=60.0), host="node2")
    row = row_of(attempt, attempt.started_at + 9.0, {0: here, 1: there})
    assert row["spawn_s"] == pytest.approx(1.0) and row["teardown_s"] == pytest.approx(5.5)
    assert row_of(attempt, attempt.started_at + 9.0, {1: there})["spawn_s"] is None
    reopened = reopen_attempt(SweepDir(attempt.folder.parents[1]), attempt.point, attempt.attempt_id)
    assert reopened is not None and reopened.host == attempt.host == socket.gethostname()


def test_a_row_keeps_its_points_predictions(attempt: Attempt) -> None:
    interval = {"predicted_step_time_low_s": 0.5, "predicted_step_time_high_s": 4.0}
    predicted = {"predicted_peak_bytes": 7, "predicted_step_time_s": 1.0, **interval}
    planned = dataclasses.replace(attempt, point=dataclasses.replace(attempt.point, **predicted))
    for point, expected in ((planned, predicted), (attempt, dict.fromkeys(predicted))):
        row = row_of(point, attempt.started_at + 4.0, {})
        assert {name: row[name] for name in predicted} == expected


def test_a_step_has_a_peak_only_when_every_rank_reported_one(attempt: Attempt) -> None:
    world_size = attempt.point.experiment.world_size
    results = {rank: result(rank, attempt.started_at) for rank in range(world_size)}
    for rank, rank_result in results.items():
        results[rank] = dataclasses.replace(
            rank_result, steps=[dataclasses.replace(rank_result.steps[0], peak_allocated_bytes=7)]
        )
    assert row_of(attempt, attempt.started_at + 4.0, results)["peak_allocated_by_step_bytes"] == [7]
    results.pop(world_size - 1)
    row = row_of(attempt, attempt.started_at + 4.0, results)
    assert row["peak_allocated_by_step_bytes"] is None
    assert row["peak_allocated_bytes"] == (7 if results else None), "of the ranks that are left"


@pytest.mark.parametrize(("launches", "expected"), [((2e-5, 4e-5), 4e-5), ((2e-5, None), 2e-5), ((None, None), None)])
def test_the_slowest_host_counts(attempt: Attempt, launches: tuple[float | None, ...], expected: float | None) -> None:
    results = {
        rank: dataclasses.replace(result(rank, attempt.started_at), host_launch_s=launch)
        for rank, launch in enumerate(launches)
    }
    assert row_of(attempt, attempt.started_at + 4.0, results)["host_launch_s"] == expected


@pytest.mark.parametrize(("leads", "expected"), [((0.2, 0.0), 0.0), ((0.2, None), 0.2), ((None, None), None)])
def test_the_host_that_is_least_ahead_counts(
    attempt: Attempt, leads: tuple[float | None, ...], expected: float | None
) -> None:
    results = {
        rank: dataclasses.replace(result(rank, attempt.started_at), host_lead_s=lead) for rank, lead in enumerate(leads)
    }
    assert row_of(attempt, attempt.started_at + 4.0, results)["host_lead_s"] == expected


@pytest.mark.parametrize(
    ("held", "expected"),
    [((8, 4, 5, 6), 12), ((None,) * 4, None), ((None, 3, 2, None), 3)],
    ids=str,
)
def test_the_fullest_host_counts_with_all_its_ranks(held: tuple[int | None, ...], expected: int | None) -> None:
    results = [
        dataclasses.replace(result(rank, 0.0), host=f"node{rank // 2}", host_memory_bytes=one)
        for rank, one in enumerate(held)
    ]
    assert rows._fullest_host(results) == expected


def test_a_missing_peak_has_a_reason(attempt: Attempt) -> None:
    row = row_of(attempt, attempt.started_at + 4.0, {0: result(0, attempt.started_at)})
    assert row["peak_flops"] is None and row["mfu_palm"] is None
    assert row["peak_flops_source"] == "none: the file of cluster test has no peak_flops for bf16; it has none"


def test_a_dead_pilots_attempt_is_timed_by_its_files_alone(attempt: Attempt) -> None:
    """The file server's clock is an hour behind the pilot's clock."""
    for name, at in (("task.json", 0.0), ("attempt.json", 0.0), ("rank_0.log", 12.0)):
        (attempt.folder / name).touch()
        os.utime(attempt.folder / name, (attempt.started_at - 3600 + at,) * 2)
    assert dead_pilots._last_written_at(attempt) - attempt.started_at == pytest.approx(12.0, abs=1e-3)


def test_no_file_of_an_attempt_holds_a_secret_of_the_cluster(tmp_path: Path) -> None:

    sweep = SweepDir.create(tmp_path / "s", {})
    claim = Claim(sweep, points("ok")[0].stem, "p", points("ok")[0])
    secret = dataclasses.replace(cluster(), environment={"HF_TOKEN": "hunter2", "NCCL_DEBUG": "INFO"})
    launch = settings(cluster=secret)
    made = start_attempt(claim, "p.a1.0", 1, launch, host="localhost", port=1, device_ids=None, nodes=())
    assert all("hunter2" not in path.read_text() for path in made.folder.iterdir())
    assert json.loads((made.folder / "task.json").read_text())["cluster"]["environment"]["NCCL_DEBUG"] == "INFO"

"""What a pilot's check of its nodes says of a run, by itself and in a round of a search."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest

from results.tables.store import read_attempts, write_attempt
from sweep.predicting.codebases import read_clusters
from sweep.predicting.forecast import Forecast
from sweep.searching.checked import BETWEEN, CHECKS, COPY, INSIDE, MATMUL, Checks, scaled
from sweep.searching.rounds import read_round
from tests.sweep.searching.test_run import Cluster, off, searched

H200 = read_clusters()["h200"]
USUAL = {MATMUL: 7e14, COPY: 4e12, INSIDE: 4e11, BETWEEN: None}


def row(**changed: float | None) -> dict[str, Any]:
    return {"world_size": 8, **USUAL, **changed}


def test_the_share_of_every_rate_is_that_of_the_cluster() -> None:
    found = scaled(H200, {MATMUL: 0.5, COPY: 0.25, INSIDE: 0.8, BETWEEN: 0.1})
    assert H200.matmul_efficiency is not None and H200.device.memory_bandwidth is not None
    assert found.matmul_efficiency == pytest.approx(H200.matmul_efficiency / 2)
    assert found.device.memory_bandwidth == pytest.approx(H200.device.memory_bandwidth / 4)
    assert found.intra_node.bandwidth == pytest.approx(H200.intra_node.bandwidth * 0.8)
    if H200.inter_node is not None:
        assert found.inter_node is not None
        assert found.inter_node.bandwidth == pytest.approx(H200.inter_node.bandwidth * 0.1)
    unknown = dataclasses.replace(H200, matmul_efficiency=None, inter_node=None)
    assert scaled(unknown, {MATMUL: 0.5, BETWEEN: 0.5}) == unknown


@pytest.mark.slow(seconds=2)
def test_a_slow_pilot_is_told_from_a_slow_layout(tmp_path: Path) -> None:
    search = searched(tmp_path)
    one = search.planned.points[0].experiment
    rows = [row(), row(), row(), row(**{MATMUL: 3.5e14}), row(**{MATMUL: 6.9e14}), row(**dict.fromkeys(CHECKS))]
    checks = Checks(H200, rows)
    usual, slow, equal, unchecked = checks.probed(rows[0], one), *(checks.probed(r, one) for r in rows[3:])
    assert usual == equal == unchecked == 0.0
    # Half the rate of products is at most twice the time, and products are most of a step.
    assert math.log(1.3) < slow <= math.log(2) + 1e-9
    (before,) = Forecast.of(H200).times([one])
    (after,) = Forecast.of(scaled(H200, {MATMUL: 0.5})).times([one])
    assert before is not None and after is not None
    assert slow == pytest.approx(math.log(after.step_time_s / before.step_time_s))

    # Eight runs that miss the prediction by the same, one of them on a pilot of half the rate.
    cluster = Cluster(search, off, most=8)
    from sweep.searching.search_run import run_search

    run_search(search, cluster, lambda line: None)
    told = read_attempts(tmp_path / "s").to_pylist()
    assert len(told) == 8
    plain = read_round(search_dir(search), search.planned, search.prepared.plan.config.search, "measured")
    victim = min(told, key=lambda found: str(found["started_at"]))
    for found in told:
        checked = row(**({MATMUL: 3.5e14} if found is victim else {}))
        write_attempt(tmp_path / "s", {**found, **checked}, [])
    now = read_round(search_dir(search), search.planned, search.prepared.plan.config.search, "measured")
    place = next(at for at, ids in enumerate(search.planned.ids) if ids == victim["experiment_id"])
    experiment = search.planned.points[place].experiment
    expected = Checks(H200, [row(), row(), row(**{MATMUL: 3.5e14})]).probed(row(**{MATMUL: 3.5e14}), experiment)
    moved = plain.session.seen.residual - now.session.seen.residual
    assert expected > 0.2 and moved[place] == pytest.approx(expected)
    others = [at for at in range(len(search.planned.points)) if at != place and math.isfinite(moved[at])]
    assert len(others) == 7 and all(moved[at] == 0 for at in others)


def search_dir(search: Any) -> Any:
    from launchers.state.sweep_dir import SweepDir

    return SweepDir(search.prepared.plan.config.sweep_dir)

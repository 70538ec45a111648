"""How many pilots of how many nodes a sweep's points need."""

from __future__ import annotations

import dataclasses
from typing import Any

from launchers.slurm.demand import demand_of
from launchers.slurm.options import SlurmOptions
from tests.launchers.scripted import points, settings


def test_how_many_pilots() -> None:
    def pilots(count: int, predicted_s: float | None = None, **options: Any) -> dict[int, int]:
        made = points(*["ok"] * count)
        if predicted_s is not None:
            made = [dataclasses.replace(one, predicted_step_time_s=predicted_s, deadline_s=1e9) for one in made]
        demand = demand_of(made, settings(num_devices=2), SlurmOptions(**{"time_min": 10, **options}))
        return dict(demand.pilots)

    # A pilot of 10 min less 150 s has 450 s. Without a prediction a point costs its deadline, 30 s.
    assert pilots(15) == {1: 1}
    assert pilots(16) == {1: 2}
    # Three steps of 10 s and a start of 30 s: 60 s each.
    assert pilots(15, 10.0) == {1: 2}
    assert pilots(15, 10.0, target_h=0.05) == {1: 5}
    assert pilots(3, 10.0, target_h=0.001) == {1: 3}
    assert pilots(15, 10.0, target_h=0.05, max_pilots=2) == {1: 2}
    assert pilots(15, 10.0, target_h=0.05, max_nodes=3) == {1: 3}
    # 30 s + 1.5 * 3 * 100 s do not fit in 450 s.
    demand = demand_of([], settings(), SlurmOptions())
    assert (demand.pilots, demand.too_wide, demand.too_long) == ({}, 0, 0)
    assert pilots(2, 100.0) == {}


def test_many_points_get_few_pilots_and_a_sentence_unless_the_user_sets_a_number() -> None:
    launch = settings(num_devices=2)
    of_one, of_four = points(*["ok"] * 1_500), points(*["ok"] * 600, dp=8, global_batch_size=8)
    demand = demand_of([*of_one, *of_four], launch, SlurmOptions(time_min=10))
    assert demand.pilots == {4: 16, 1: 64}  # 64 nodes of each shape
    # 1,500 points of 30 s need 100 pilots of 450 s.
    assert demand.capped[1].startswith("1,500 points of 1 node: 64 pilots at a time, not 100 (by default ")
    assert "at most 12 min (1,500 points have no predicted time" in demand.capped[1]
    assert demand.capped[1].endswith("launcher.max_nodes=N or launcher.max_pilots=N sets another limit")
    known = [dataclasses.replace(one, predicted_step_time_s=0.0) for one in of_one]
    assert "they run for about 12 min," in demand_of(known, launch, SlurmOptions(time_min=10)).capped[1]
    for given in ({"max_nodes": 500}, {"max_pilots": 500}, {"target_h": 9.0}):
        lifted = demand_of(of_one, launch, SlurmOptions(**{"time_min": 10, **given}))
        assert (lifted.pilots, lifted.capped) == ({1: 100}, {})
    wide = demand_of(points("ok", dp=256, global_batch_size=256), launch, SlurmOptions(time_min=10))
    assert (wide.pilots, wide.too_wide, wide.capped) == ({128: 1}, 0, {})  # wider than the limit


def test_points_that_no_pilot_can_run() -> None:
    wide = points("ok", dp=8, global_batch_size=8)
    demand = demand_of([*wide, *points("ok")], settings(num_devices=2), SlurmOptions(max_nodes=2))
    assert (demand.pilots, demand.too_wide, demand.too_long) == ({1: 1}, 1, 0)
    demand = demand_of(points("ok", deadline_s=200.0), settings(num_devices=2), SlurmOptions(time_min=5))
    assert (demand.pilots, demand.too_long, demand.longest_s) == ({}, 1, 200.0)

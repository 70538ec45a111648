"""Columns about the spread of steps, ranks and devices, from constructed results."""

from __future__ import annotations

import json
from typing import Any

import pytest

from launchers.attempt import spread
from workloads.contract.protocol import RankResult, StepRecord


def result(
    rank: int, times: list[float], busy: float | None = None, clock: float | None = None, **fields: Any
) -> RankResult:
    steps = [StepRecord(step=0, is_warmup=True, step_time_s=9.0, forward_backward_s=9.0)]
    for step, seconds in enumerate(times, 1):
        mhz = None if clock is None else clock + step
        steps.append(
            StepRecord(step=step, is_warmup=False, step_time_s=seconds, forward_backward_s=busy, sm_clock_mhz=mhz)
        )
    return RankResult(rank=rank, coordinates={}, steps=steps, phase_started_at={}, **fields)


def test_spread_of_steps_and_ranks() -> None:
    results = {
        0: result(0, [1.0, 2.0, 1.5], busy=0.8, clock=1000, timed_wall_s=5.0),
        1: result(1, [1.1, 1.9, 1.4], busy=0.9, clock=2000, timed_wall_s=5.2),
    }
    columns = spread.spread_columns(results)
    assert spread.step_times(results) == {1: 1.1, 2: 2.0, 3: 1.5}
    assert columns.pop("step_time_mean_s") == pytest.approx((1.1 + 2.0 + 1.5) / 3)
    assert columns.pop("step_time_std_s") == pytest.approx(0.450925, abs=1e-6)
    assert columns == {
        "timed_wall_s": 5.2,
        "sm_clock_median_step_mhz": 1503,  # step 3 has the median time
        "slowest_rank": 1,
        "slowest_forward_backward_s": 0.9,
    }
    assert spread.timed_steps(results) == 3


def test_unknown_values_are_null() -> None:
    columns = spread.spread_columns({0: result(0, [1.0])})
    assert columns["step_time_std_s"] is None, "of one step"
    assert columns["timed_wall_s"] is columns["sm_clock_median_step_mhz"] is None
    assert "slowest_rank" not in columns
    assert spread.spread_columns({}) == spread.spread_columns({0: result(0, [])}) == {}
    assert spread.timed_steps({}) is spread.timed_steps({0: result(0, [])}) is None


def test_the_first_of_equally_slow_ranks() -> None:
    assert spread.spread_columns({rank: result(rank, [1.0], busy=0.5) for rank in (2, 1, 3)})["slowest_rank"] == 1


def test_energy_of_a_token() -> None:
    # 691 W at 11,397 tokens a second: 60.6 mJ (dp 4 of Llama-3.1-8B on H200s).
    row = {"method": "measured", "power_w": 691.0, "tokens_per_s_per_gpu": 11_397.0}
    assert spread.energy_per_token_mj(row) == pytest.approx(60.63, abs=0.01)
    for unknown in ({"power_w": None}, {"tokens_per_s_per_gpu": None}, {"method": "rehearsed"}):
        assert spread.energy_per_token_mj({**row, **unknown}) is None


def test_nccl_variables_of_all_ranks() -> None:
    def of(*environments: dict[str, str] | None) -> Any:
        text = spread.nccl_environment(
            {rank: result(rank, [], nccl_environment=values) for rank, values in enumerate(environments)}
        )
        return None if text is None else json.loads(text)

    assert of(None, None) is None, "a CPU run has none in force"
    assert of({}, {}) == {}, "NCCL ran with its defaults"
    assert of({"NCCL_B": "1", "NCCL_A": "x"}, {"NCCL_A": "x", "NCCL_B": "1"}) == {"NCCL_A": "x", "NCCL_B": "1"}
    assert of({"NCCL_A": "x"}, {}) == {"NCCL_A": ["x", None]}
    assert of({"NCCL_A": "y"}, {"NCCL_A": "x"}) == {"NCCL_A": ["x", "y"]}


def test_transports_of_all_ranks_are_joined() -> None:
    names = [["NET/Socket"], None, ["P2P/CUMEM", "NET/Socket"]]
    results = {rank: result(rank, [], nccl_transports=value) for rank, value in enumerate(names)}
    assert spread.nccl_transports(results) == ["NET/Socket", "P2P/CUMEM"]
    assert spread.nccl_transports({1: results[1]}) is None

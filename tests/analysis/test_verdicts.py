"""Each verdict on a movement between two results, on rows planted for it, and which of them a gate counts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.compare import command, moved, verdicts
from analysis.compare import matching as matching_points
from tests.analysis import synthetic
from tests.analysis.compared import POINTS, points_of, run, sweep
from tests.sampling import sampled

pytestmark = pytest.mark.drawn(one_in=2)

QUIET = {"spread": 0.02, "sm_clock_mhz": 1900.0, "device_name": "NVIDIA H200", "driver_version": "570.1"}


def verdict(one: dict[str, Any], two: dict[str, Any], noise: float | None = None) -> tuple[Any, str]:
    a, b = points_of(one), points_of(two)
    judged_by = moved.noise_of(a, b, noise)
    pairs = moved.judged(matching_points.match(a, b).pairs, judged_by)
    [row] = verdicts.with_verdicts(pairs, judged_by).to_dict("records")
    return row["verdict"], row["verdict_reason"]


def planted(rate: float, index: int = 0, **columns: Any) -> dict[str, Any]:
    return run(POINTS[0], rate, index, **(QUIET | columns))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "expected", "reason"),
    [
        ({}, {"rate": 90.0}, verdicts.REGRESSION, "throughput −10.0 %, beyond noise of ± 2 %"),
        ({}, {"rate": 111.0}, verdicts.IMPROVEMENT, "throughput +11.0 %, beyond noise of ± 2 %"),
        ({}, {"rate": 99.0}, verdicts.NOISE, "throughput −1.0 %, within noise of ± 2 %"),
        ({}, {"rate": 90.0, "git_commit": "abcd" * 10}, verdicts.REGRESSION, "commit 3f0c3f0c → abcdabcd"),
        (
            {"torch_version": "2.11.0"},
            {"rate": 90.0, "torch_version": "2.13.0"},
            verdicts.REGRESSION,
            "PyTorch 2.11.0 → 2.13.0",
        ),
        # Another way of measuring: whatever moved or did not.
        ({}, {"rate": 90.0, "measurement_version": 1}, verdicts.METHOD_CHANGED, "measurement version 2 → 1"),
        ({}, {"rate": 100.0, "method": "rehearsed"}, verdicts.METHOD_CHANGED, "method measured → rehearsed"),
        ({}, {"rate": 90.0, "time_source": "estimated"}, verdicts.METHOD_CHANGED, "source of the step time"),
        # Another machine explains what moved; where nothing moved there is nothing to explain.
        ({}, {"rate": 90.0, "device_name": "NVIDIA H100"}, verdicts.HARDWARE_CHANGED, "device NVIDIA H200 → NVIDIA"),
        ({}, {"rate": 99.0, "device_name": "NVIDIA H100"}, verdicts.NOISE, "within noise"),
        ({}, {"rate": 90.0, "driver_version": "580.2"}, verdicts.HARDWARE_CHANGED, "driver 570.1 → 580.2"),
        ({}, {"rate": 90.0, "cluster": "other"}, verdicts.HARDWARE_CHANGED, "cluster h200 → other"),
        ({"nodes": ["n1"]}, {"rate": 90.0, "nodes": ["n1", "n2"]}, verdicts.HARDWARE_CHANGED, "nodes 1 → 2"),
        (
            {"power_limit_w": 700.0},
            {"rate": 90.0, "power_limit_w": 600.0},
            verdicts.HARDWARE_CHANGED,
            "power limit 700 → 600 W",
        ),
        ({"power_limit_w": 700.0}, {"rate": 90.0, "power_limit_w": 695.0}, verdicts.REGRESSION, "beyond noise"),
        # Clocks account for all of it, for more than all of it, for a part, or went the other way.
        ({}, {"rate": 90.0, "sm_clock_mhz": 1710.0}, verdicts.HARDWARE_CHANGED, "SM clock 1,900 → 1,710 MHz"),
        ({}, {"rate": 90.0, "sm_clock_mhz": 1500.0}, verdicts.HARDWARE_CHANGED, "accounts for it"),
        ({}, {"rate": 80.0, "sm_clock_mhz": 1800.0}, verdicts.REGRESSION, "throughput −20.0 %"),
        ({}, {"rate": 90.0, "sm_clock_mhz": 2000.0}, verdicts.REGRESSION, "throughput −10.0 %"),
        ({}, {"rate": 111.0, "sm_clock_mhz": 2110.0}, verdicts.HARDWARE_CHANGED, "accounts for it"),
        # What a side does not record is no difference.
        ({"driver_version": None}, {"rate": 90.0}, verdicts.REGRESSION, "beyond noise"),
        # Spread not known: the change may be chance, unless the machine explains it.
        ({"timed_steps": 1}, {"rate": 80.0, "timed_steps": 1}, verdicts.UNKNOWN, "of unknown spread"),
        ({"timed_steps": 1}, {"rate": 103.0, "timed_steps": 1}, verdicts.UNKNOWN, "of unknown spread"),
        (
            {"timed_steps": 1},
            {"rate": 80.0, "timed_steps": 1, "device_name": "NVIDIA H100"},
            verdicts.HARDWARE_CHANGED,
            "device",
        ),
        # Faster with other losses is no improvement; slower with them is a regression all the same.
        ({}, {"rate": 111.0, "losses": [12.0, 11.5, 10.0]}, verdicts.UNKNOWN, "losses differ"),
        ({}, {"rate": 90.0, "losses": [12.0, 11.5, 10.0]}, verdicts.REGRESSION, "losses differ, too"),
    ],
)
def test_verdict_on_planted_rows(before: dict[str, Any], after: dict[str, Any], expected: str, reason: str) -> None:
    after = dict(after)
    found, said = verdict(planted(100.0, **before), planted(after.pop("rate"), **after))
    assert found == expected
    assert reason in said


@pytest.mark.slow
@pytest.mark.parametrize("rate", sampled([330.0, 130.0, 30.0], 1))
def test_noise_above_half_judges_no_change(rate: float, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Not even one that is beyond it, unless the user gives the noise."""
    one, two = (planted(each, spread=2.1 / 2.05) for each in (100.0, rate))  # slowest over fastest step is 3.1
    found, said = verdict(one, two)
    assert found == verdicts.UNKNOWN
    assert said.endswith("not judged: noise of ± 210 %, more than 50 %, would hide nearly any change")
    assert "no change of throughput is judged" in moved.noise_of(points_of(one), points_of(two)).why
    assert verdict(planted(100.0, spread=0.02), planted(330.0), 1.0)[0] == verdicts.IMPROVEMENT
    folders = [str(sweep(tmp_path / name, row)) for name, row in (("a", one), ("b", two))]
    gate = ("--fail-if-slower", "5", "--format", "svg", "--out", str(tmp_path / "out"))
    assert command.main([*folders, *gate]) == 2
    assert "equal runs differ by 210 %" in capsys.readouterr().err


@pytest.mark.slow
def test_a_restless_point_is_noise_beyond_the_others_noise() -> None:
    a = points_of(*(run(point, 100.0, i, spread=0.01) for i, point in enumerate(POINTS[:5])))
    b = points_of(*(run(point, 120.0 if i == 0 else 100.0, i, spread=0.6 if i == 0 else 0.01)
                    for i, point in enumerate(POINTS[:5])))  # fmt: skip
    judged_by = moved.noise_of(a, b)
    pairs = verdicts.with_verdicts(moved.judged(matching_points.match(a, b).pairs, judged_by), judged_by)
    assert set(pairs["verdict"]) == {verdicts.NOISE}
    assert pairs["verdict_reason"][0].startswith("throughput +20.0 %, but its interval (")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("before", "after", "expected", "reason"),
    [
        ("ok", "oom", verdicts.REGRESSION, "no longer finishes: out of memory"),
        ("ok", "diverged", verdicts.REGRESSION, "no longer finishes: diverged"),
        ("hang", "ok", verdicts.IMPROVEMENT, "finishes now (before: hang)"),
        ("ok", "cancelled", verdicts.UNKNOWN, "did not finish in B (cancelled), which the layout did not cause"),
        ("node_failure", "ok", verdicts.UNKNOWN, "did not finish in A (node failure)"),
        ("oom", "oom", None, "finished on neither side (out of memory, out of memory)"),
        ("oom", "hang", None, "finished on neither side (out of memory, hang)"),
    ],
)
def test_verdict_on_outcomes(before: str, after: str, expected: str | None, reason: str) -> None:
    sides = [planted(100.0) if outcome == "ok" else synthetic.attempt(POINTS[0], outcome=outcome)
             for outcome in (before, after)]  # fmt: skip
    found, said = verdict(*sides)
    assert found == expected
    assert reason in said
    if before == "ok" and after == "oom":
        assert verdict(sides[0], sides[1] | {"cluster": "small"})[0] == verdicts.HARDWARE_CHANGED


def test_network_regimes_are_hardware() -> None:
    """Only readers of other programs' tables know a regime: the column is not one of every row."""
    sides = [points_of(planted(rate)).assign(network_regime=regime) for rate, regime in ((100, "fast"), (70, "slow"))]
    judged_by = moved.noise_of(*sides)
    pairs = moved.judged(matching_points.match(*sides).pairs, judged_by)
    [row] = verdicts.with_verdicts(pairs, judged_by).to_dict("records")
    assert (row["verdict"], "network regime fast → slow" in row["verdict_reason"]) == (verdicts.HARDWARE_CHANGED, True)


def test_repeats_tell_all_their_facts() -> None:
    """Three runs on two drivers, whose median clock counts."""
    several = points_of(
        *(planted(100.0, i, driver_version=driver, sm_clock_mhz=clock)
          for i, (driver, clock) in enumerate((("1", 1500.0), ("2", 1900.0), ("2", 1910.0))))
    )  # fmt: skip
    assert several["driver_version"].tolist() == ["1, 2"]
    assert several["sm_clock_mhz"].tolist() == [1900.0]
    assert several["device_name"].tolist() == ["NVIDIA H200"]


@pytest.mark.slow
def test_noise_that_the_user_knows_decides_single_steps() -> None:
    once = planted(100.0, timed_steps=1), planted(90.0, timed_steps=1)
    assert verdict(*once)[0] == verdicts.UNKNOWN
    assert verdict(*once, noise=0.03)[0] == verdicts.REGRESSION
    assert verdict(*once, noise=0.2)[0] == verdicts.NOISE


@pytest.mark.slow
def test_every_verdict_is_counted_on_the_terminal_on_the_page_and_in_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_each = (90.0, {}), (111.0, {}), (100.0, {}), (90.0, {"device_name": "NVIDIA H100"})
    a = sweep(tmp_path / "a", *(run(point, 100.0, **QUIET) for point in POINTS[:4]))
    b = sweep(
        tmp_path / "b",
        *(run(point, rate, **(QUIET | more)) for point, (rate, more) in zip(POINTS, two_each, strict=False)),
    )
    out = tmp_path / "out"
    assert command.main([str(a), str(b), "--out", str(out), "--fail-if-slower", "5"]) == 1
    said = capsys.readouterr().out
    told = "Verdicts on 4 matched points: 1 regression, 1 improvement, 1 hardware changed and 1 noise."
    assert told in said
    assert "not counted as failed: 1 point slower or failing in B (1 hardware changed)" in said
    assert "failed: 1 of 4 points slower by more than 5 % or failing in B" in said
    page = (out / "compare.html").read_text()
    assert told in page
    assert '<li class="hardware-changed"><b>1</b> hardware changed</li>' in page
    table = pd.read_csv(out / "tables" / "compare.csv").set_index("layout")
    assert table["verdict"].tolist() == ["regression", "improvement", "noise", "hardware changed"]
    assert table["verdict_reason"].notna().all()
    assert table["device_name_b"].tolist()[-1] == "NVIDIA H100"
    only_hardware = sweep(tmp_path / "c", *(run(point, 80.0, **(QUIET | {"cluster": "other"})) for point in POINTS[:4]))
    assert command.main([str(a), str(only_hardware), "--out", str(out), "--fail-if-slower", "5"]) == 0
    other_method = sweep(tmp_path / "d", *(run(point, 80.0, measurement_version=1, **QUIET) for point in POINTS[:4]))
    assert command.main([str(a), str(other_method), "--out", str(out), "--fail-if-slower", "5"]) == 2
    assert "every matched point has the verdict 'method changed'" in capsys.readouterr().err

"""Energy in plans and in ``advise``: by the measured power, or at most by a device's limit; and the objectives."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from sweep.__main__ import main
from sweep.advising.answer import Advice, answer
from sweep.advising.facts import advice_facts, goal_of, layouts_of
from sweep.advising.question import read_question
from sweep.advising.report import print_answer
from sweep.predicting.codebases import read_clusters
from sweep.predicting.known import Known, read_known
from sweep.predicting.power import Amount, MeasuredPower, Power
from tests.sweep.helpers import store_attempt
from tests.sweep.predicting.measured_rows import H200, of
from workloads.spec.errors import InvalidSweep

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=2)]

SIZES = ("model=llama1b", "cluster=h200", "gpus=[8,16,32]", "global_batch_size=64", "tp=[1,2]", "pp=1", "cp=1")
MEASURED = Known(power=MeasuredPower(600.0, 500.0, 700.0, 3))


def asked(*words: str, known: Known | None = None, optimise: str | None = None, top: int = 3) -> Advice:
    return answer(read_question(words), top, known or Known(), optimise)


def printed(found: Advice) -> str:
    file = io.StringIO()
    print_answer(found, Console(file=file, width=200))
    return file.getvalue()


def test_energy_is_watts_over_tokens_a_second() -> None:
    power = Power(device="d", measured=MeasuredPower(600.0, 500.0, 700.0, 3), limit_w=700.0)
    assert power.joules_per_token(12_000.0) == Amount(600 / 12_000, 700 / 12_000)
    assert power.mwh(2_000.0) == Amount(1.2, 1.4)
    assert [power.joules_per_token(None), Power(device="d").mwh(1.0)] == [Amount(None, None)] * 2
    assert [Amount(0.05, 0.06).cell(".3g"), Amount(None, 0.06).cell(".3g"), Amount(None, None).cell("")] == [
        *("0.05", "≤ 0.06", "")
    ]


def test_the_power_of_rows_of_the_device_is_their_mean(tmp_path: Path) -> None:
    name = H200.device.name
    rows = [("h200", name, 500.0), ("another", name, 700.0), ("another", "NVIDIA GH200 480GB", 100.0)]
    rows += [("h200", name, None), ("h200", "NVIDIA H200 NVL", 90.0)]
    for number, (cluster, device, watts) in enumerate(rows):
        columns = {"cluster": cluster, "device_name": device, "power_w": watts, "step_time_s": 1.0}
        store_attempt(tmp_path / f"s{number}", of(dp=8), **columns)
    store_attempt(tmp_path / "failed", of(dp=8), cluster="h200", device_name=name, power_w=9.0, outcome="oom")
    known = read_known(H200, tmp_path)
    assert known.power == MeasuredPower(600.0, 500.0, 700.0, 2)
    assert read_known(read_clusters()["h100_efa"], tmp_path).power is None


def test_a_limit_is_an_upper_bound_and_never_a_measurement() -> None:
    limit, measured = asked(*SIZES), asked(*SIZES, known=MEASURED)
    for found in (limit, measured):
        for ranked, numbers in layouts_of(found):
            rate = ranked.tokens_per_s_per_device
            assert numbers["predicted_energy_per_token_at_most_j"] == pytest.approx(700 / rate)
            by_rows = None if found is limit else pytest.approx(600 / rate)
            assert numbers["predicted_energy_per_token_j"] == by_rows
    first = layouts_of(limit)[0][1]["predicted_energy_per_token_at_most_j"]
    assert f" ≤ {first:.3g} " in printed(limit) and "≤" not in printed(measured)
    assert "at most, by the power limit of NVIDIA H200, 700 W; no row has its measured power" in printed(limit)
    assert "600 W a device, the mean of 3 measured rows of NVIDIA H200 (500 to 700 W)" in printed(measured)
    facts = advice_facts(limit)
    assert [facts[name] for name in ("power_w", "power_rows", "power_limit_w")] == [None, 0, 700]


def test_unknown_power_is_null_and_cannot_be_optimised(capsys: pytest.CaptureFixture[str]) -> None:
    unknown = (*SIZES, "cluster.device.power_w=null")
    found = asked(*unknown)
    assert {numbers["predicted_energy_per_token_at_most_j"] for _, numbers in layouts_of(found)} == {None}
    assert "J/token" not in printed(found) and "energy" not in printed(found)
    assert main(["advise", *unknown, "results_dir=nowhere", "--optimise", "energy"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "optimise=energy: the power of NVIDIA H200 is not known" in line and "cluster.device.power_w=700" in line
    with pytest.raises(InvalidSweep, match="optimise='joy'; it may be time, energy or cost"):
        asked(*SIZES, optimise="joy")


def test_an_objective_ranks_the_layouts_of_all_sizes() -> None:
    every = [one for size in asked(*SIZES, top=4).sizes for one in size.ranked.best]
    time, energy, cost = (asked(*SIZES, optimise=name, top=4) for name in ("time", "energy", "cost"))
    assert [one.time.cautious_s for one in time.ranked] == sorted(one.time.cautious_s for one in every)[:4]
    least = sorted(every, key=lambda one: one.time.cautious_s * one.experiment.world_size)[:4]
    assert [numbers["predicted_energy_per_token_at_most_j"] for _, numbers in layouts_of(energy)] == [
        700 / one.tokens_per_s_per_device for one in least
    ]
    assert [numbers["place"] for _, numbers in layouts_of(energy)] == [1, 2, 3, 4]
    assert [one.experiment for one in cost.ranked] == [one.experiment for one in energy.ranked]
    assert {one.experiment.world_size for one in time.ranked} != {one.experiment.world_size for one in cost.ranked}
    assert "least energy a token first, on 8, 16, 32 GPUs" in printed(energy)
    assert "energy and cost rank alike" in printed(energy) and "energy and cost" not in printed(time)
    assert set(energy.best) == set(energy.ranked)


def test_a_goal_has_its_energy_and_the_choice_that_was_asked_for_first() -> None:
    words = (*SIZES, "tokens=1e11", "days=20", "price=2")
    found = {name: asked(*words, optimise=name, known=MEASURED) for name in ("time", "energy", "cost", None)}
    for advice in found.values():
        for _, numbers in goal_of(advice):
            assert numbers["energy_mwh"] == pytest.approx(600e-6 * numbers["gpu_hours"])
            assert numbers["energy_at_most_mwh"] == pytest.approx(700e-6 * numbers["gpu_hours"])
    firsts = {
        name: next(
            line.split("  ")[0]
            for line in printed(one).splitlines()
            if line.startswith(("s", "l", "f")) and "  " in line
        )
        for name, one in found.items()
    }
    assert firsts == {"time": "soonest", "energy": "least energy", "cost": "least money", None: "fewest"}
    goal = found["time"].goal
    assert goal is not None and goal.soonest is not None
    quickest = min(one.time.step_time_s for size in asked(*SIZES, top=1).sizes for one in size.ranked.best)
    assert goal.soonest.ranked_layout.time.step_time_s == quickest
    assert all(one.goal is not None and one.goal.soonest is None for name, one in found.items() if name != "time")


def test_amd_gpus_have_an_answer_and_no_search(capsys: pytest.CaptureFixture[str]) -> None:
    found = asked("model=llama1b", "cluster=mi300x", "gpus=8", "global_batch_size=64", "pp=1", "cp=1", "tp=1")
    said = printed(found)
    assert "cluster mi300x (AMD Instinct MI300X) is planned only: the engine runs on CUDA" in said
    assert "sweep search" not in said and found.sizes[0].ranked.best
    facts = advice_facts(found)
    assert (facts["search_command"], facts["power_limit_w"]) == (None, 750) and "runs on CUDA" in facts["planned_only"]


@pytest.mark.parametrize(
    "words",
    [
        *(["run", "+grid=tiny", "model=llama1b"], ["probe"], ["search", "+grid=tiny", "model=llama1b"]),
        *(["doctor"], ["run", "+grid=tiny", "model=llama1b", "launcher=rehearse"]),
    ],
)
def test_nothing_runs_on_amd_gpus(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*words, "cluster=mi300x"]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert "cluster mi300x (AMD Instinct MI300X) is planned only: the engine runs on CUDA; plan, advise" in line

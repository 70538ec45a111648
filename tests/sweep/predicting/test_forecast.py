"""What a plan predicts of step times: with what it was measured before, and saying so."""

from __future__ import annotations

import dataclasses
import math
from datetime import UTC, datetime
from pathlib import Path

import pytest

from results.tables import probes
from results.tables.store import read_ledger
from sweep.__main__ import main
from sweep.planning.ledger import ledger_rows
from sweep.predicting.codebases import read_clusters, read_profiles
from sweep.predicting.forecast import Forecast
from sweep.predicting.known import Known, ran_layouts, read_known
from sweep.running.run import point_of
from tests.sweep.helpers import plan_of, store_attempt
from tests.sweep.predicting.measured_rows import H200, of, slow_rows
from tests.workloads.costs.shapes import LLAMA_1B, MIXTRAL
from workloads.predict import layouts as structures
from workloads.predict import near_full
from workloads.predict.layouts import plain
from workloads.predict.probed import LAUNCH_S, USUAL_LAUNCH
from workloads.spec.experiment import Experiment, layout_id, to_json

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=3)]


def layouts() -> list[Experiment]:
    plain = [of(dp=dp, tp=8 // dp, zero_stage=zero) for dp in (2, 4, 8) for zero in (0, 1, 3)]
    return [*plain, of(dp=8, ep=8, model=MIXTRAL, zero_stage=2), of(dp=4, pp=2, pp_schedule="zero_bubble_v")]


def test_an_interval_holds_the_prediction_and_a_factor_widens_it() -> None:
    times = Forecast.of(H200).times(layouts())
    for one in times:
        assert one is not None
        assert 0 < one.low_s < one.step_time_s < one.high_s
        assert 0 < one.compute_s + one.optimizer_s < one.step_time_s * (1 + 1e-9)
    odd = layouts()[-2:]
    for one, near in zip(
        Forecast.of(H200).times(odd), Forecast.of(H200).times([plain(one) for one in odd]), strict=True
    ):
        assert one is not None and near is not None
        assert one.high_s / one.step_time_s > near.high_s / near.step_time_s


def test_with_nothing_measured_host_bound_and_wide_layouts_are_doubtful() -> None:
    """Short eager layers wait for a host that nothing has timed, and no row ran beyond a node; captured steps, whose
    rows are from inside a node, wait for nothing."""
    short = of(model=LLAMA_1B, seq_len=512, global_batch_size=8)
    eager, captured, long = short, short.replace(cuda_graph="step"), of()
    widths = [math.log(time.high_s / time.low_s) for time in Forecast.of(H200).times([eager, captured, long]) if time]
    assert widths[0] > 1.3 * widths[1] and widths[0] > 2 * widths[2]
    wide = [of(dp=dp, global_batch_size=4 * dp, cuda_graph="step") for dp in (8, 16)]
    inside, beyond = (math.log(time.high_s / time.low_s) for time in Forecast.of(H200).times(wide) if time)
    assert beyond > 1.2 * inside


def test_a_step_is_longer_where_memory_is_nearly_full() -> None:
    forecast, memory = Forecast.of(H200), H200.device.memory_bytes
    workspace = H200.device.workspace_bytes
    (time,) = forecast.times([of(dp=8)])
    assert time is not None and memory is not None
    assert forecast.near_full(time, int(0.7 * memory) - workspace) == time == forecast.near_full(time, None)
    full, fuller = (
        forecast.near_full(time, int(share * memory) - workspace)
        for share in (near_full.FROM + 0.05, near_full.FROM + 0.1)
    )
    assert full.step_time_s - time.step_time_s == pytest.approx(0.05 * near_full.SECONDS, abs=1e-6)
    assert fuller.step_time_s - time.step_time_s == pytest.approx(0.1 * near_full.SECONDS, abs=1e-6)
    assert full.low_s == time.low_s and time.high_s < full.high_s < fuller.high_s
    assert full.compute_s == time.compute_s, "the allocator stops between kernels"
    without = dataclasses.replace(forecast, cluster=dataclasses.replace(H200, backend="cpu"))
    assert without.near_full(time, memory) == time


def test_a_plan_knows_that_memory_is_nearly_full() -> None:
    """The same layout of two devices that differ in nothing but their memory."""
    steps = []
    for memory in (86e9, 200e9):
        plan = plan_of(
            [
                *("+grid=one_point", "cluster=h100_ib400", f"cluster.device.memory_bytes={memory:.0f}"),
                *(
                    "grid.axes.model=[llama8b_8_layers]",
                    "grid.axes.micro_batch_size=8",
                    "grid.axes.global_batch_size=8",
                ),
            ]
        )
        (point,) = plan.points
        assert point.time is not None and point.peak_bytes is not None
        steps.append((point.time.step_time_s, point.peak_bytes))
    (near, peak), (roomy, same_peak) = steps
    assert peak == same_peak and peak > 0.8 * 86e9
    assert near - roomy == pytest.approx(near_full.freeing_s(peak, int(86e9)), rel=1e-6)


def test_predictions_do_not_depend_on_what_stands_beside_them() -> None:
    forecast, experiments = Forecast.of(H200), layouts()
    forth, back = forecast.times(experiments), forecast.times(experiments[::-1])[::-1]
    for place, one in enumerate(experiments):
        alone = forecast.times([one])[0]
        assert alone is not None
        for found in (forth[place], back[place]):
            assert found is not None and found.step_time_s == pytest.approx(alone.step_time_s, rel=1e-12)
    assert forecast.times([]) == []


def test_a_mixture_of_known_and_unknown_keeps_its_places() -> None:
    unknown, known = Forecast.of(H200).times([of(dp=8, precision="fp64"), of(dp=8)])
    assert unknown is None and known is not None


def test_rows_measured_on_the_cluster_move_predictions(tmp_path: Path) -> None:
    slow_rows("h200", tmp_path)
    slow_rows("another", tmp_path / "more", 0.5)
    known = read_known(H200, tmp_path)
    assert len(known.steps) == 6
    forecast = Forecast.of(H200, known)
    assert forecast.used == "predicted with 6 measured experiments on h200"
    (before,), (after,) = Forecast.of(H200).times([of(dp=8)]), forecast.times([of(dp=8)])
    assert before is not None and after is not None
    assert 1.1 < after.step_time_s / before.step_time_s < 1.7


def test_rows_of_odd_layouts_teach_plain_ones_less(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What they were divided by for their structure may be off."""
    for odd, factor in (({}, 1.0), ({"model": MIXTRAL, "pp": 2, "pp_schedule": "zero_bubble_v"}, 1.3)):
        experiments = [of(dp=dp, zero_stage=zero, **odd) for dp in (2, 4, 8) for zero in (0, 1, 2)]
        for experiment, time in zip(experiments, Forecast.of(H200).times(experiments), strict=True):
            assert time is not None
            row = {"host_launch_s": LAUNCH_S, "step_time_s": factor * time.step_time_s}
            store_attempt(tmp_path / "s", experiment, cluster="h200", **row)

    def moved() -> float:
        plain = [of(dp=8, zero_stage=3)]
        (before,), (after,) = Forecast.of(H200).times(plain), Forecast.of(H200, read_known(H200, tmp_path)).times(plain)
        assert before is not None and after is not None
        return math.log(after.step_time_s / before.step_time_s)

    found = moved()
    for name in ("STRUCTURE_SPREAD", "LEAST_STRUCTURE_SPREAD"):
        monkeypatch.setattr(structures, name, 1e-9)
    assert -0.01 < found < 0.5 * moved()


def test_no_prediction_has_seen_its_own_measurement(tmp_path: Path) -> None:
    slow_rows("h200", tmp_path)
    known = read_known(H200, tmp_path)
    forecast = Forecast.of(H200, known, known.steps)
    assert forecast.used == ""
    assert forecast.times([of(dp=8)]) == Forecast.of(H200).times([of(dp=8)])


def test_rows_that_cannot_be_used_are_passed_over(tmp_path: Path) -> None:
    experiment = of(dp=8)
    for columns in (
        {"outcome": "oom"},
        {"method": "rehearsed"},
        {"measurement_version": 1},
        {"config_json": "{}"},
        {"config_json": "["},
        {"step_time_s": None},
        {"allocator_retries": 8},
    ):
        store_attempt(tmp_path / "s", experiment, **{"cluster": "h200", "step_time_s": 1.0, **columns})
    (tmp_path / "s" / "attempts.parquet").write_bytes(b"PAR1")
    assert read_known(H200, tmp_path) == Known()
    assert read_known(H200, tmp_path / "nowhere") == Known()
    assert read_known(read_clusters()["cpu"], tmp_path) == Known()


def test_rows_of_a_named_cluster_count_at_its_own_rates(tmp_path: Path) -> None:
    h100 = read_clusters()["h100_ib400"]
    slow_rows("h200", tmp_path)
    alone, with_others = read_known(h100, tmp_path), read_known(h100, tmp_path, [H200, h100])
    assert alone == Known()
    assert Forecast.of(h100, with_others).used == "predicted with 6 measured experiments on h200"
    layout = of(model=LLAMA_1B, dp=8)  # one of those of the other cluster
    (before,), (after,) = (
        Forecast.of(h100, known, [layout_id(layout)]).times([layout]) for known in (alone, with_others)
    )
    assert before is not None and after is not None
    assert 1.2 < after.step_time_s / before.step_time_s < 1.7


def test_a_cluster_without_a_probe_is_as_its_rows_are(tmp_path: Path) -> None:
    """Its host is that of the middle row, unless a probe tells of one; without either that of most clusters."""
    short = {"model": LLAMA_1B, "seq_len": 256}
    experiments = [of(dp=dp, zero_stage=zero, **short) for dp in (2, 4, 8) for zero in (0, 2)]
    slow = Forecast(H200, Forecast.of(H200).predictor, {"launch": 2.0})
    for experiment, time in zip(experiments, slow.times(experiments), strict=True):
        assert time is not None
        columns = {"cluster": "h200", "step_time_s": time.step_time_s, "host_launch_s": 2 * LAUNCH_S}
        store_attempt(tmp_path / "before", experiment, **columns)
    layout = of(dp=4, zero_stage=1, **short)
    (expected,), (usual,) = slow.times([layout]), dataclasses.replace(slow, rates={"launch": 1.0}).times([layout])
    assert expected is not None and usual is not None and expected.step_time_s > 2 * usual.step_time_s
    known = read_known(H200, tmp_path)
    (as_its_rows,) = Forecast.of(H200, known).times([layout])
    (as_its_probe,) = Forecast.of(H200, dataclasses.replace(known, probe={"launch": 1.0})).times([layout])
    assert as_its_rows is not None and as_its_probe is not None
    assert as_its_rows.step_time_s == pytest.approx(expected.step_time_s, rel=0.05)
    assert as_its_probe.step_time_s == pytest.approx(usual.step_time_s, rel=0.05)
    of_nothing = Forecast.of(H200, known, [layout_id(one) for one in experiments])
    assert not of_nothing.used, "what may not count says nothing of the host either"
    assert of_nothing.rates == {"launch": USUAL_LAUNCH} == Forecast.of(H200).rates


def test_rows_of_another_cluster_count_at_the_pace_of_their_own_hosts(tmp_path: Path) -> None:
    """What a slow host made slow says little of a cluster whose host is not, and nothing where rows do not tell it."""
    h100, short = read_clusters()["h100_ib400"], {"model": LLAMA_1B, "seq_len": 256}
    experiments = [of(dp=dp, zero_stage=zero, **short) for dp in (2, 4, 8) for zero in (0, 2)]
    slow = Forecast(H200, Forecast.of(H200).predictor, {"launch": 2.0})
    layout, ratios = of(dp=4, zero_stage=1, **short), []
    (usual,) = Forecast.of(h100).times([layout])
    assert usual is not None
    for folder, launch in (("silent", None), ("told", 2 * LAUNCH_S), ("wrong", LAUNCH_S)):
        for experiment, time in zip(experiments, slow.times(experiments), strict=True):
            assert time is not None
            columns = {"cluster": "h200", "step_time_s": time.step_time_s, "host_launch_s": launch}
            store_attempt(tmp_path / folder / "before", experiment, **columns)
        (time,) = Forecast.of(h100, read_known(h100, tmp_path / folder, [H200])).times([layout])
        assert time is not None
        ratios.append(time.step_time_s / usual.step_time_s)
    assert ratios[0] == 1.0 and ratios[1] == pytest.approx(1.0, rel=0.05) and ratios[2] > 1.5


def test_rows_know_how_slow_their_host_was(tmp_path: Path) -> None:
    experiments = [of(model=LLAMA_1B, dp=dp, zero_stage=zero) for dp in (2, 4, 8) for zero in (0, 2)]
    launches = (0.5, 0.5, 1.5, None, 0.5, 0.6)
    for experiment, launch in zip(experiments, launches, strict=True):
        seconds = None if launch is None else launch * LAUNCH_S
        store_attempt(tmp_path / "s", experiment, cluster="h200", step_time_s=1.0, host_launch_s=seconds)
    steps = read_known(H200, tmp_path).steps
    assert [steps[layout_id(one)].launch for one in experiments] == [
        None if launch is None else pytest.approx(launch) for launch in launches
    ]
    assert read_profiles()["ultrasweep"].host_launch_s == LAUNCH_S, "tables and plans have one usual host"


def test_what_is_no_launch_counts_as_unknown() -> None:
    experiment = of(model=LLAMA_1B, dp=2)
    for told in (None, 0.0, -1.0, math.nan, math.inf):
        row = {"started_at": 0, "config_json": to_json(experiment), "step_time_s": 1.0, "host_launch_s": told}
        found = ran_layouts([{**row, "allocator_retries": None}])
        assert found[layout_id(experiment)].launch is None


def test_a_row_teaches_about_a_layout_that_runs_as_it_did() -> None:
    """Rows without the column are older, and eager; the last two ran with too few warm-up steps, and on a CPU."""
    common = {"started_at": 0, "step_time_s": 1.0, "host_launch_s": None, "allocator_retries": None}
    for graph, ran, backend, taken in (
        ("none", {}, "cuda", 1),
        ("none", {"cuda_graph_run": "none"}, "cuda", 1),
        ("step", {"cuda_graph_run": "step"}, "cuda", 1),
        ("auto", {"cuda_graph_run": "step"}, "cuda", 1),
        ("auto", {"cuda_graph_run": "none"}, "cuda", 0),
        ("auto", {"cuda_graph_run": "none"}, "cpu", 1),
    ):
        experiment = of(model=LLAMA_1B, pp=2, pp_schedule="1f1b", cuda_graph=graph)
        row = {**common, **ran, "config_json": to_json(experiment)}
        assert len(ran_layouts([row], backend)) == taken, (graph, ran, backend)


def test_a_row_on_a_slow_host_does_not_make_the_cluster_slow(tmp_path: Path) -> None:
    short = {"model": LLAMA_1B, "seq_len": 256}
    experiments = [of(dp=dp, zero_stage=zero, **short) for dp in (2, 4, 8) for zero in (0, 2)]
    slow = Forecast(H200, Forecast.of(H200).predictor, {"launch": 2.0})
    as_profile = dataclasses.replace(slow, rates={"launch": 1.0})
    predicted = [*as_profile.times(experiments[:4]), *slow.times(experiments[4:])]
    layout, ratios = of(dp=4, zero_stage=1, **short), []
    (usual,) = as_profile.times([layout])
    assert usual is not None
    for folder, launches in (("alike", (LAUNCH_S, LAUNCH_S)), ("known", (LAUNCH_S, 2 * LAUNCH_S))):
        for place, (experiment, time) in enumerate(zip(experiments, predicted, strict=True)):
            assert time is not None
            launch = launches[place >= 4]
            columns = {"cluster": "h200", "step_time_s": time.step_time_s, "host_launch_s": launch}
            store_attempt(tmp_path / folder / "s", experiment, **columns)
        (time,) = Forecast.of(H200, read_known(H200, tmp_path / folder)).times([layout])
        assert time is not None
        ratios.append(abs(time.step_time_s / usual.step_time_s - 1))
    assert ratios[1] < ratios[0] / 2


def write_probe(folder: Path, cluster: str = "h200") -> None:
    when = datetime(2026, 11, 20, 12, tzinfo=UTC)
    fixed = {"probe_id": "p", "probe_version": probes.PROBE_VERSION, "measured_at": when, "cluster": cluster}
    shape = {"backend": "cuda", "kind": "host", "tp": 1, "zero_stage": 0, "recompute": "none", "unit": "s"}
    rows = [{**fixed, **shape, "name": f"layer_{way}", "value": 3e-3} for way in ("forward", "backward")]
    probes.write_probe(folder, cluster, "p", rows)


def test_a_probe_and_rows_are_used_without_being_asked_and_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_probe(tmp_path)
    slow_rows("h200", tmp_path)
    out = tmp_path / "plan.parquet"
    command = ["plan", "grid=llama1b_8gpu", "cluster=h200", f"results_dir={tmp_path}"]
    assert main([*command, "launcher=slurm", "--out", str(out)]) == 0
    line = "predicted with the probe of 2026-11-20 and 6 measured experiments on h200"
    assert line in " ".join(capsys.readouterr().out.split())
    for row in read_ledger(out).to_pylist():
        if row["predicted_step_time_s"] is None:
            assert row["predicted_step_time_low_s"] is None and row["predicted_with"] is None
            continue
        assert row["predicted_step_time_low_s"] < row["predicted_step_time_s"] < row["predicted_step_time_high_s"]
        assert row["predicted_with"] == line


def test_a_queued_point_has_the_prediction_of_its_plan_with_its_interval() -> None:
    plan = plan_of(["grid=llama1b_8gpu", "cluster=h200"])
    rows = ledger_rows(plan)
    for index, (planned, row) in enumerate(zip(plan.points, rows, strict=True)):
        if planned.price is None:
            continue
        point = point_of(index, planned, "measured")
        names = ("predicted_step_time_low_s", "predicted_step_time_s", "predicted_step_time_high_s")
        low, middle, high = (getattr(point, name) for name in names)
        assert [low, middle, high] == [row[name] for name in names]
        assert low < middle < high
    unknown = point_of(0, dataclasses.replace(plan.points[0], time=None), "measured")
    assert (unknown.predicted_step_time_low_s, unknown.predicted_step_time_high_s) == (None, None)


def test_a_probe_of_slow_hosts_makes_short_layers_longer(tmp_path: Path) -> None:
    write_probe(tmp_path)
    short = of(model=LLAMA_1B, dp=8, seq_len=512)
    (before,), (after,) = (
        forecast.times([short]) for forecast in (Forecast.of(H200), Forecast.of(H200, read_known(H200, tmp_path)))
    )
    assert before is not None and after is not None
    assert after.step_time_s > 1.5 * before.step_time_s


def test_a_plan_without_anything_measured_says_nothing() -> None:
    plan = plan_of(["grid=llama_node", "cluster=h200"])
    assert plan.predicted_with == ""
    assert {point.time is not None for point in plan.to_run} == {True}

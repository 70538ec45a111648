"""The page of accuracy: what its tables are made of, and that it has the sections that the command fills."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from docs.tools import (
    accuracy_limits,
    accuracy_of_hosts,
    accuracy_of_plans,
    accuracy_of_rehearsals,
    accuracy_summary,
)
from docs.tools.accuracy_scores import scores, spearman, verdicts
from docs.tools.other_hosts import ON_OTHER_HOSTS
from docs.tools.write_accuracy import CUTS, PAGES, page_of, put_section
from results.errors import UltrasweepError
from results.statistics import grade
from results.statistics.grade import grade_of
from results.tables.load import load
from sweep.predicting.known import Known
from sweep.predicting.measured_tables import RECORDED, recorded_table
from workloads.contract.protocol import HOST_WAIT
from workloads.predict.table import COLUMNS, MEASURED

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=2)]


def test_shipped_rows_are_a_table_to_predict_and_to_calibrate_with() -> None:
    rows = recorded_table()
    assert set(rows.columns) <= {*COLUMNS, *MEASURED}
    assert (rows["dp"] * rows["tp"] * rows["pp"] * rows["cp"] == rows["gpus"]).all()
    assert (rows["dp"] * rows["mbs"] * rows["grad_accum"] == rows["gbs_seqs"]).all()
    assert rows.loc[rows["status"] == "ok", "step_time_s"].notna().all()
    assert rows.loc[rows["status"] == "oom", "step_time_s"].isna().all()


def one_cell(measured: list[float], predicted: list[float]) -> pd.DataFrame:
    """Step times of rows that are ranked among each other."""
    cell = {"layers": 1, "hidden": 1, "seq": 1, "gpus": 8, "gbs_seqs": 8}
    return pd.DataFrame({"step_time_s": measured, "of_step_time_s": predicted}).assign(**cell)


def test_scores_by_hand() -> None:
    found = one_cell([1.0, 2.0, 3.0, 4.0, 5.0, 6.0], [1.1, 1.8, 3.0, 4.0, 5.0, 6.0]).assign(
        of_step_time_low_s=[0.5, 1.0, 1.5, 2.0, 2.5, 0.5],
        of_step_time_high_s=[4.5, 9.0, 13.5, 18.0, 22.5, 2.0],
        reserved_gib=10.0,
        of_predicted_peak_reserved_bytes=11 * 2**30,
    )
    said = scores(found)
    assert (said["rows"], said["MAPE"], said["bias"], said["Spearman"]) == ("6", "3.3 %", "+0.0 %", "1.000")
    assert (said["inside 90 %"], said["reserved memory"], said["top-5 regret"]) == ("83.3 %", "10.0 %", "0.0 %")
    assert said["half-width"] == "200.0 %", "the high end is nine times the low one, three times the middle"
    assert spearman(found) == pytest.approx(1.0) and np.isnan(spearman(found[:2]))


def test_the_page_and_grades_have_one_regret() -> None:
    """Six layouts, the fastest predicted last: after five tries a tenth of its step time is lost, 9.1 % of its rate."""
    measured, predicted = [1.0, 1.1, 1.2, 1.3, 1.4, 1.5], [9.0, 1.1, 1.2, 1.3, 1.4, 1.5]
    rows = one_cell(measured, predicted).assign(
        of_step_time_low_s=0.0, of_step_time_high_s=9.0, reserved_gib=np.nan, of_predicted_peak_reserved_bytes=np.nan
    )
    pairs = pd.DataFrame({"predicted": predicted, "measured": measured, "low": 0.0, "high": 9.0})
    grade = grade_of(pairs.assign(quantity="step_time", tokens_per_step=1.0, cell="one"))
    assert grade["top5_regret"] == pytest.approx(1 / 11)
    assert scores(rows)["top-5 regret"] == "9.1 %"


def test_random_hosts_touch_only_the_rows_that_wait() -> None:
    """Five rows are 1 to 5 % off; of these two wait for the host."""
    found = one_cell([1.0, 2.0, 3.0, 4.0, 5.0], [1.01, 2.04, 3.09, 4.16, 5.25])
    waits = pd.Series([False, False, False, True, True])
    exact, p90, ranks = accuracy_limits.with_random_hosts(found, waits, 0.0)
    assert (exact, p90, ranks) == pytest.approx((0.0, 0.026, 1.0))
    waiting, worse, mixed = accuracy_limits.with_random_hosts(found, waits, 0.3)
    assert waiting == pytest.approx(0.3 * (2 / np.pi) ** 0.5, rel=0.15)
    assert worse > 0.1 and mixed < 0.99


def test_machines_are_further_apart_where_the_host_sets_the_pace() -> None:
    apart = accuracy_limits.machines_apart(accuracy_limits.rows_of_machines(RECORDED, ON_OTHER_HOSTS))
    assert len(apart) == len(apart[["gpu", "layout"]].drop_duplicates()), "a layout is of one kind on all machines"
    assert (apart["ratio"] >= 1).all() and len(apart) > 40
    for _, of_gpu in apart.groupby("gpu"):
        assert of_gpu[of_gpu["waits"]]["ratio"].median() > of_gpu[~of_gpu["waits"]]["ratio"].median() + 0.1


def test_the_least_error_is_that_of_one_run_around_the_mean_of_its_layout() -> None:
    """A layout of three runs on two machines: only runs of different machines are compared. Another engine's version,
    and a layout that says more than columns, are compared with nothing."""
    one = recorded_table().query("gpu == 'NVIDIA H200' and status == 'ok'").head(1)
    runs = pd.concat([one] * 6, ignore_index=True).assign(
        step_time_s=[1.0, 1.2, 1.1, 5.0, 7.0, 9.0],
        layout=["a"] * 4 + ["b"] * 2,
        machine=["here", "there", "there", "there", "here", "there"],
        plain=[True] * 4 + [False] * 2,
        waits=True,
        host_launch_s=np.nan,
    )
    runs.loc[3, "code_version"] = "another"
    found = accuracy_limits.least_errors(runs)
    expected = np.log([1.2, 1.1]) / np.sqrt(2)
    assert set(found["layout"]) == {"a"} and found["waits"].all() and (found["weight"] == 0.5).all()
    assert found["off"].tolist() == pytest.approx(expected)
    assert found["with_launches"].tolist() == pytest.approx(expected)


def test_weighted_quantiles_by_hand() -> None:
    values, weights = [3.0, 1.0, 2.0], [0.1, 0.6, 0.3]
    found = [accuracy_limits.weighted_quantile(values, weights, share) for share in (0.5, 0.6, 0.61, 0.9, 0.95)]
    assert found == [1.0, 1.0, 2.0, 2.0, 3.0]


def studied(**changes: object) -> dict[str, object]:
    """A row of the study's table: two stages, eight micro-batches of two sequences, that ran in 40 GiB."""
    usual: dict[str, object] = {"layers": 16, "hidden": 2048, "kv_heads": 32, "vocab": 131072, "tp": 2, "pp": 2}
    usual |= {"dp": 4, "mbs": 2, "grad_accum": 8, "sharding": "zero1", "status": "ok", "reserved_gib": 40.0}
    return usual | {"code_version": "after", "says_oom": False, "of_fits": 1.0} | changes


def test_verdicts_on_layouts_that_need_no_more_than_one_that_ran_cannot_both_be_right() -> None:
    """Two larger layouts ran; of three that ran out one needs no more than either, one no more than the second alone,
    and one has another version. Two wrong verdicts cover all pairs, three without versions."""
    rows = pd.DataFrame(
        [
            studied(),
            studied(mbs=4, sharding="zero0", grad_accum=4),
            studied(status="oom", mbs=1, grad_accum=16),
            studied(status="oom", mbs=4, dp=2),
            studied(status="oom", mbs=1, grad_accum=32, code_version="before"),
            studied(status="oom", mbs=8),
            studied(code_version="before", tp=4),
        ]
    )
    assert accuracy_limits.least_wrong(rows) == 2
    assert accuracy_limits.least_wrong(rows, ()) == 2, "two that ran cover them"
    assert accuracy_limits.least_wrong(rows.drop(1)) == 1
    assert accuracy_limits.least_wrong(rows[rows["status"] == "ok"]) == 0


def test_memory_that_shrinks_with_the_micro_batch_is_found() -> None:
    rows = pd.DataFrame(
        [
            studied(mbs=4, grad_accum=4, reserved_gib=30.0),
            studied(),
            studied(mbs=8, grad_accum=2, reserved_gib=50.0),
            studied(mbs=16, grad_accum=1, reserved_gib=20.0),
        ]
    )
    assert accuracy_limits.shrunken(rows).tolist() == [True, False, False, False], "the last has fewer in flight"
    text = accuracy_limits.verdicts_section(rows.assign(says_oom=[False, True, False, False], of_fits=[0.0, 0.0, 1, 1]))
    assert "Of the 1 rows" in text and "1 are refused" in text
    assert "| reserved less than with a smaller micro-batch | 1 | 1 | 0 |" in text


def test_launches_explain_some_of_the_least_error_of_hosts() -> None:
    least = accuracy_limits.least_errors(accuracy_limits.rows_of_machines(RECORDED, ON_OTHER_HOSTS))
    waits, rest = least[least["waits"]], least[~least["waits"]]
    off, with_launches = (np.average(waits[name], weights=waits["weight"]) for name in ("off", "with_launches"))
    assert with_launches < 0.8 * off and np.average(rest["off"], weights=rest["weight"]) < 0.3 * off


def test_rehearsals_are_put_together_as_they_are_now() -> None:
    """Rows that the factors were set from show only that nothing went wrong since; those run since are a test."""
    found = accuracy_of_rehearsals.pairs()
    assert len(found) > 50 and found["waited"].isna().sum() == 2, "the allocator stopped in two"
    ahead = found[found["waited"].map(lambda waited: waited is False)]
    later = ahead["real"].isin(accuracy_of_rehearsals.LATER)
    near, since = ahead[~later], ahead[later & ahead["layers_meet"]]
    error = near["now_s"] / near["real_s"] - 1
    assert len(near) > 25 and error.abs().median() < 0.03 and error[near["layers_meet"]].abs().mean() < 0.03
    assert abs(error[near["layers_meet"]].mean()) < 0.01, "without the factor 4 to 5 %"
    error = since["now_s"] / since["real_s"] - 1
    assert len(since) >= 35 and error.abs().mean() < 0.065 and abs(error.mean()) < 0.04


def test_clocks_tell_which_devices_waited() -> None:
    """Of the eager rows that say it themselves more than four in five are sorted alike, and few that waited are
    missed."""
    rows = pd.concat([load(folder).table.to_pandas() for folder in (RECORDED, ON_OTHER_HOSTS)])
    stopped = (rows["allocator_retries"] > 0) | (rows["cuda_graph_run"] == "step")
    rows = rows[(rows["outcome"] == "ok") & rows["host_lead_s"].notna() & rows["sm_clock_mhz"].notna() & ~stopped]
    waited = rows["host_lead_s"] < HOST_WAIT * rows["step_time_s"]
    told = rows["sm_clock_mhz"] > accuracy_of_rehearsals.FULL_CLOCK_MHZ
    assert len(rows) > 450 and waited.sum() > 150
    assert (told == waited).mean() > 0.82 and (waited & ~told).sum() < 0.02 * waited.sum()


def test_runs_of_one_cluster_are_told_apart() -> None:
    attempts = accuracy_of_plans.recorded_attempts()
    points = accuracy_of_plans.points_of(attempts)
    own = points[points["cluster"] == "h100_ib400"]
    kinds = accuracy_of_plans.kinds_of(own, attempts, "h100_ib400")
    assert kinds["stopped"].sum() == (own["allocator_retries"] > 0).sum() > 10
    tokens = own["micro_batch_size"] * own["seq_len"]
    assert tokens[kinds["waits"]].median() < tokens[~kinds["waits"]].median(), "short micro-batches wait for the host"
    odd = own["experiment"].map(accuracy_of_plans.has_experts_or_latents)
    assert set(own["model"][odd]) == {"qwen3_30b_a3b_8_layers", "deepseek_v2_lite_10_layers"}


def test_a_cut_refuses_runs_and_lets_failures_through() -> None:
    found = pd.DataFrame(
        {"of_predicted_peak_reserved_bytes": np.array([50, 70, 66, 95]) * 2**30, "status": ["ok", "ok", "oom", "oom"]}
    )
    curve = {cut: (refused, through, right) for cut, refused, through, right in verdicts(found, CUTS)}
    assert curve[60.0] == (1, 0, 0.75)
    assert curve[68.0] == (1, 1, 0.5)
    assert curve[72.0] == (0, 1, 0.75)


def test_a_layout_that_ran_with_a_graph_does_not_count_without_one() -> None:
    attempts = load(RECORDED).table.to_pandas()
    both = attempts[attempts["experiment_id"].str.contains("adafactor-22dea4eb|muon-f0a02bc6")]
    both = both[both["method"] == "measured"]
    assert len(both) == 4, "Adafactor ran eagerly and twice with a graph, Muon eagerly alone"
    points = accuracy_of_plans.points_of(both).set_index("experiment_id")
    (adafactor,) = points[points.index.str.contains("adafactor")].itertuples()
    (muon,) = points[points.index.str.contains("muon")].itertuples()
    assert adafactor.step_time_s < 0.5 and adafactor.experiment.cuda_graph == "auto"
    assert muon.experiment.cuda_graph == "none"


def test_rows_of_experts_without_kernels_are_left_out() -> None:
    rows = load(RECORDED).table.to_pandas()
    rows = rows[(rows["engine"] == "ultrasweep") & (rows["outcome"] == "ok")]
    rows = rows[rows["experiment_id"].str.startswith(("gptoss", "llama4scout"))]
    kept = accuracy_of_plans.recorded_attempts()["started_at"]
    before = rows["started_at"] < accuracy_of_plans.EXPERTS_HAVE_KERNELS
    of_gpt_oss = rows["experiment_id"].str.startswith("gptoss")
    assert (before & of_gpt_oss).any() and (before & ~of_gpt_oss).any()
    assert not rows.loc[before & of_gpt_oss, "started_at"].isin(kept).any()
    assert rows.loc[~(before & of_gpt_oss), "started_at"].isin(kept).all()


def test_rows_of_updates_that_have_changed_are_left_out() -> None:
    """Those of experts' matrices one after another, and of moments that the host's processors updated; the same
    optimizers of other layouts stay."""
    rows = load(RECORDED).table.to_pandas()
    rows = rows[(rows["engine"] == "ultrasweep") & (rows["outcome"] == "ok") & (rows["method"] == "measured")]
    left = rows[~rows["started_at"].isin(accuracy_of_plans.recorded_attempts()["started_at"])]
    of_kind = {
        "adafactor": (left["optimizer"] == "adafactor").sum(),
        "muon": (left["optimizer"] == "muon").sum(),
        "host": (left["optimizer_offload"] > 0).sum(),
    }
    assert of_kind == {"adafactor": 5, "muon": 2, "host": 4}
    later = left[left["optimizer_offload"] > 0]["started_at"].max()
    assert later < accuracy_of_plans.MOMENTS_STREAM < accuracy_of_plans.ADAFACTOR_TOGETHER


@pytest.mark.exhaustive(seconds=15)
@pytest.mark.slow
def test_what_plans_predict_of_the_shipped_rows_is_no_worse_than_the_page_says() -> None:
    points = accuracy_of_plans.points_of(accuracy_of_plans.recorded_attempts())
    whole = {}
    for cluster, own in points.groupby("cluster"):
        found = grade.grades(grade.pairs_of_predictions(accuracy_of_plans.planned(own), own))
        whole[cluster] = found[found["axis"].isna()].iloc[0]
        assert whole[cluster]["n"] == len(own)
    h200, h100 = whole["h200"], whole["h100_ib400"]
    assert h200["n"] >= 1074 and h200["mape"] < 0.074 and abs(h200["bias"]) < 0.029 and h200["spearman"] > 0.89
    assert h100["n"] >= 152 and h100["mape"] < 0.15 and h100["spearman"] > 0.85
    assert min(h200["coverage"], h100["coverage"]) > 0.93


def test_sections_of_the_pages_can_be_filled() -> None:
    names = ("summary", "public", "advice", "plans", "engines", "recorded", "hosts", "rehearsals", "study", "a100")
    assert {page_of(name) for name in names} == set(PAGES)
    for name in names:
        assert "\nnew\n" in put_section(page_of(name).read_text(), name, "new")
    with pytest.raises(UltrasweepError, match="no section nothing: a line <!-- nothing: begin -->"):
        put_section(PAGES[0].read_text(), "nothing", "new")


def test_the_summary_has_what_the_other_tables_say() -> None:
    pages = "\n".join(page.read_text() for page in PAGES)
    for one in accuracy_summary.LINES:
        cells = accuracy_summary.cells_of(accuracy_summary.section_of(pages, one.section), one.first)
        error = cells.get("MAPE") or cells["step time"]
        (line,) = [line for line in page_of("summary").read_text().splitlines() if line.startswith(f"| {one.name} |")]
        assert line.split(" | ")[2] == error, f"{one.name}: run python -m docs.tools.write_accuracy --only summary"
    with pytest.raises(ValueError, match="no row"):
        accuracy_summary.cells_of("| one | two |\n|---|---|\n| 1 | 2 |", "3")


def test_paces_are_those_of_a_probe() -> None:
    """Times of a host's rows at some paces beside those of plans with probes of these paces."""
    points = accuracy_of_plans.points_of(accuracy_of_plans.recorded_attempts())
    for cluster, rows in points.groupby("cluster"):
        drawn = rows.sample(12, random_state=5)
        paces = (0.5, 1.0, 1.7, 3.0)
        known = [{str(cluster): Known(probe={"pace": pace})} for pace in paces]
        by_plans = [accuracy_of_plans.planned(drawn, one)["step_time_s"].to_numpy(dtype=float) for one in known]
        np.testing.assert_allclose(accuracy_of_hosts.at_paces(drawn, paces), by_plans, rtol=1e-12)


def test_launches_tell_how_slow_hosts_are() -> None:
    """Of hosts that the law was set from: that it holds shows only that nothing went wrong since."""
    every = accuracy_of_hosts.hosts()
    found = every[~every["later"]]
    assert len(found) >= 13 and len(every) > len(found)
    off = np.log(found["pace"] / found["nearest"])
    assert off.abs().max() < 0.22 and np.log(found["nearest"]).std() > 0.18
    slow_or_fast = found[np.log(found["nearest"]).abs() > 0.2]
    assert (slow_or_fast["error_launches"] < slow_or_fast["error_usual"]).all()
    assert "The line through these points" in accuracy_of_hosts.section(every)

"""The page of accuracy: what its tables are made of, and that it has the sections that the command fills."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from results import grade
from sweep import accuracy_of_plans
from sweep.measured_tables import recorded_table
from sweep.write_accuracy import CUTS, PAGE, in_cells_of, put_section, scores, verdicts
from workloads.predict.table import COLUMNS, MEASURED


def test_shipped_rows_are_a_table_to_predict_and_to_calibrate_with() -> None:
    rows = recorded_table()
    assert set(rows.columns) <= {*COLUMNS, *MEASURED}
    assert (rows["dp"] * rows["tp"] * rows["pp"] * rows["cp"] == rows["gpus"]).all()
    assert (rows["dp"] * rows["mbs"] * rows["grad_accum"] == rows["gbs_seqs"]).all()
    assert rows.loc[rows["status"] == "ok", "step_time_s"].notna().all()
    assert rows.loc[rows["status"] == "oom", "step_time_s"].isna().all()


def test_scores_by_hand() -> None:
    found = pd.DataFrame(
        {
            "layers": 1,
            "hidden": 1,
            "seq": 1,
            "gpus": 8,
            "gbs_seqs": 8,
            "step_time_s": [1.0, 2.0, 3.0, 4.0, 5.0, 6.0],
            "of_step_time_s": [1.1, 1.8, 3.0, 4.0, 5.0, 6.0],
            "of_step_time_low_s": 0.0,
            "of_step_time_high_s": [9.0, 9.0, 9.0, 9.0, 9.0, 1.0],
            "reserved_gib": 10.0,
            "of_predicted_peak_reserved_bytes": 11 * 2**30,
        }
    )
    said = scores(found)
    assert (said["rows"], said["MAPE"], said["bias"], said["Spearman"]) == ("6", "3.3 %", "+0.0 %", "1.000")
    assert (said["inside 90 %"], said["reserved memory"], said["top-5 regret"]) == ("83.3 %", "10.0 %", "0.0 %")


def test_rows_of_small_cells_are_left_out() -> None:
    rows = pd.DataFrame({"layers": 16, "hidden": 2048, "seq": 4096, "gpus": [8] * 3 + [16] * 2, "step_time_s": 1.0})
    assert in_cells_of(rows, 3)["gpus"].tolist() == [8, 8, 8]
    assert len(in_cells_of(rows, 2)) == 5


def test_a_cut_refuses_runs_and_lets_failures_through() -> None:
    found = pd.DataFrame(
        {"of_predicted_peak_reserved_bytes": np.array([50, 70, 66, 95]) * 2**30, "status": ["ok", "ok", "oom", "oom"]}
    )
    curve = {cut: (refused, through, right) for cut, refused, through, right in verdicts(found, CUTS)}
    assert curve[60.0] == (1, 0, 0.75)
    assert curve[68.0] == (1, 1, 0.5)
    assert curve[72.0] == (0, 1, 0.75)


@pytest.mark.slow
def test_what_plans_predict_of_the_shipped_rows_is_no_worse_than_the_page_says() -> None:
    points = accuracy_of_plans.points_of(accuracy_of_plans.recorded_attempts())
    whole = {}
    for cluster, own in points.groupby("cluster"):
        found = grade.grades(grade.pairs_of_predictions(accuracy_of_plans.planned(own), own))
        whole[cluster] = found[found["axis"].isna()].iloc[0]
        assert whole[cluster]["n"] == len(own)
    h200, h100 = whole["h200"], whole["h100_ib400"]
    assert h200["n"] > 400 and h200["mape"] < 0.055 and abs(h200["bias"]) < 0.01 and h200["spearman"] > 0.88
    assert h100["n"] > 70 and h100["mape"] < 0.15 and h100["spearman"] > 0.85
    assert min(h200["coverage"], h100["coverage"]) > 0.93


def test_sections_of_the_page_can_be_filled() -> None:
    text = PAGE.read_text()
    for name in ("plans", "recorded", "study", "a100"):
        assert "\nnew\n" in put_section(text, name, "new")
    with pytest.raises(AssertionError, match="no section"):
        put_section(text, "nothing", "new")

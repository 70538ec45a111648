"""The tables of docs/accuracy.md on what plans predict: before, as the shipped rows have it, and now."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pandas as pd

from results import grade
from results.load import load
from sweep.codebases import read_clusters
from sweep.forecast import Forecast, Known, Ran, StepTime
from sweep.measured_tables import RECORDED
from workloads.experiment import ENGINE, Experiment, from_dict, layout_id

COLUMNS = ("rows", "MAPE", "p90", "bias", "Spearman", "top-1 regret", "inside 90 %")
_SHOWN_AXES = ("model", "tp", "pp", "cp", "zero_stage", "recompute", "pp_schedule", "precision")


def recorded_points() -> pd.DataFrame:
    """The shipped measured points of this project's engine that ran, as ``grade`` takes them, with their ``experiment``
    beside."""
    points = grade.measured_points(load(RECORDED).table.to_pandas())
    points = points[(points["outcome"] == "ok") & (points["engine"] == ENGINE)].reset_index(drop=True)
    experiments = pd.Series([from_dict(json.loads(text)) for text in points["config_json"]], dtype="object")
    return points.assign(experiment=experiments)


def planned(points: pd.DataFrame, known: Known | None = None) -> pd.DataFrame:
    """What a plan predicts of these points, as a file of predictions has it."""
    parts = []
    for name, own in points.groupby("cluster", sort=True):
        experiments: Sequence[Experiment] = own["experiment"].tolist()
        times = Forecast.of(read_clusters()[str(name)], known, map(layout_id, experiments)).times(experiments)
        parts.append(pd.DataFrame([_row(*one) for one in zip(own["experiment_id"], times, strict=True)]))
    return pd.concat(parts, ignore_index=True)


def _row(experiment_id: str, time: StepTime | None) -> dict[str, str | float | None]:
    names = {"step_time_s": "step_time_s", "step_time_low_s": "low_s", "step_time_high_s": "high_s"}
    return {"experiment_id": experiment_id, **{name: getattr(time, field, None) for name, field in names.items()}}


def without_its_model(points: pd.DataFrame) -> pd.DataFrame:
    """The same, of each model from the measured points of all others."""
    parts = []
    for model, own in points.groupby("model", sort=True):
        others = points[points["model"] != model]
        pairs = zip(others["experiment"], others["step_time_s"], strict=True)
        known = Known({layout_id(experiment): Ran(experiment, float(time)) for experiment, time in pairs})
        parts.append(planned(own, known))
    return pd.concat(parts, ignore_index=True)


def section() -> str:
    """Two tables: all points by where the prediction comes from, and the last one by axis."""
    points = recorded_points()
    recorded = grade.pairs_of_rows(points)
    recorded = recorded[(recorded["depth"] == "closed_form") & (recorded["quantity"] == "step_time")]
    left = _pairs(without_its_model(points), points)
    lines = []
    for name, pairs in (
        ("as recorded, when each was run", recorded),
        ("now, nothing measured before", _pairs(planned(points), points)),
        ("now, measured rows of the other models", left),
    ):
        found = grade.grades(pairs)
        lines.append((name, found[found["axis"].isna()].iloc[0]))
    by_axis = grade.grades(left)
    shown = by_axis[by_axis["axis"].isin(_SHOWN_AXES)]
    axes = [(f"{row['axis']} {row['value']}", row) for _, row in shown.iterrows()]
    return (
        f"{_table('predicted by a plan', lines, COLUMNS)}\n\nWith measured rows of the other models, by axis:\n\n"
        f"{_table('points with', axes, ('rows', 'MAPE', 'p90', 'bias', 'inside 90 %'))}"
    )


def _pairs(predictions: pd.DataFrame, points: pd.DataFrame) -> pd.DataFrame:
    return grade.pairs_of_predictions(predictions, points)


def _table(first: str, lines: Sequence[tuple[str, pd.Series]], columns: Sequence[str]) -> str:
    head = f"| {first} | {' | '.join(columns)} |\n|---|{'---:|' * len(columns)}"
    return "\n".join([head, *(f"| {name} | {' | '.join(_cell(row, one) for one in columns)} |" for name, row in lines)])


def _cell(row: pd.Series, column: str) -> str:
    names = {"rows": "n", "MAPE": "mape", "top-1 regret": "top1_regret", "inside 90 %": "coverage"}
    value = row[names.get(column, column.lower())]
    if value is None or pd.isna(value):
        return "–"
    if column in ("rows", "Spearman"):
        return f"{value:,}" if column == "rows" else f"{value:.3f}"
    return f"{value:+.1%}".replace("%", " %") if column == "bias" else f"{value:.1%}".replace("%", " %")

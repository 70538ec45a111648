"""Why runs with experts that other teams published stay off after a calibration on ten rows of their source.

``python -m docs.tools.accuracy_limits_of_public public_rows.csv [SOURCE]`` prints three tables: what a predictor would
still miss that knew every model, device, precision and way of routing from all rows in sight; how far rows are apart
from their predictions that share all but one of these; and errors of rows by what of them is among the ten. The table
of rows does not ship; ``SOURCE`` is how the column ``source`` starts, by default `SOURCE`.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from docs.tools.accuracy_of_public import DRAWS, as_published, from_ten, told
from docs.tools.accuracy_scores import percent
from sweep.predicting.predict_table import numeric, predict_frame, read_table

SOURCE = "Megatron-Bridge"
KNOWN: Mapping[str, str] = {"model": "model", "gpu": "device", "precision": "precision", "routing": "routing"}
"""Columns of which an oracle knows a factor for each value, in words."""


def oracle(rows: pd.DataFrame, columns: Sequence[str]) -> tuple[float, float, int, int]:
    """What is left of log(predicted / measured) of ``rows`` (columns ``left`` and ``columns``) with the factors of each
    value of the columns that fit these rows best.

    Returns the mean of its size in these rows, the same of rows by the factors of the others, as far as the others have
    all of a row's values, the number of these rows, and that of factors.
    """
    values = [pd.get_dummies(rows[name], drop_first=True) for name in columns]
    design = np.column_stack([np.ones(len(rows)), *(one.to_numpy(dtype=float) for one in values)])
    left = rows["left"].to_numpy(dtype=float)
    in_sight = left - design @ np.linalg.lstsq(design, left, rcond=None)[0]
    held_out = []
    for row in range(len(rows)):
        others = np.arange(len(rows)) != row
        seen = all(rows[name].iloc[row] in set(rows[name][others]) for name in columns)
        if seen:
            fitted = np.linalg.lstsq(design[others], left[others], rcond=None)[0]
            held_out.append(abs(left[row] - design[row] @ fitted))
    of_others = float(np.mean(held_out)) if held_out else float("nan")
    return float(np.abs(in_sight).mean()), of_others, len(held_out), int(np.linalg.matrix_rank(design))


def pairs(rows: pd.DataFrame) -> pd.DataFrame:
    """Pairs of rows that differ in one of `KNOWN` alone: ``column``, ``values``, and ``apart``, the difference of their
    log(predicted / measured), which no factor of what they share explains."""
    found = []
    for one, other in combinations(rows.to_dict("records"), 2):
        differ = [name for name in KNOWN if one[name] != other[name]]
        if len(differ) == 1:
            (name,) = differ
            found.append((KNOWN[name], f"{one[name]}, {other[name]}", one["model"], abs(one["left"] - other["left"])))
        elif not differ:
            found.append(("size of the job", "", one["model"], abs(one["left"] - other["left"])))
    return pd.DataFrame(found, columns=["column", "values", "model", "apart"])


def known_of(asked: Any, given: pd.DataFrame) -> str:
    """What of a row is among the rows that a calibration has. ``asked``: the row's values by column."""
    same = given[given["model"] == asked["model"]]
    if same.empty:
        return "no row of its model"
    alike = (same[["gpu", "precision", "routing"]] == [asked[name] for name in ("gpu", "precision", "routing")]).all(
        axis=1
    )
    return "its model on its device, in its precision and routing" if alike.any() else "its model otherwise"


def section(path: Path, source: str = SOURCE) -> str:
    """The three tables of the rows of a source."""
    rows = as_published(read_table(path).reset_index(drop=True))
    rows = rows[rows["source"].str.startswith(source)].reset_index(drop=True)
    before = predict_frame(told(rows), None).predictions["step_time_s"].astype(float)
    rows["left"] = np.log(before / numeric(rows["step_time_s"]))
    experts = rows[numeric(rows["num_experts"]) > 0].reset_index(drop=True)
    first = f"a factor for each, of {len(experts)} rows with experts"
    lines = [
        f"| {first} | factors | left in sight | left of a row, by the others | of rows |",
        "|---|---:|---:|---:|---:|",
    ]
    for columns in ([], ["gpu"], ["model"], ["model", "gpu"], [*KNOWN]):
        in_sight, held_out, of_rows, count = oracle(experts, columns)
        name = ", ".join(KNOWN[one] for one in columns) or "all together"
        lines.append(f"| {name} | {count} | {percent(in_sight)} | {percent(held_out)} | {of_rows} |")
    lines += ["", "| pairs that differ in this alone | pairs | mean difference | largest |", "|---|---:|---:|---:|"]
    for column, those in pairs(experts).groupby("column"):
        lines.append(
            f"| {column} | {len(those)} | {percent(those['apart'].mean())} | {percent(those['apart'].max())} |"
        )
    lines += ["", f"| from ten rows, {DRAWS} draws | predictions | mean error | bias |", "|---|---:|---:|---:|"]
    drawn = from_ten(rows.drop(columns="left"))
    drawn = drawn[numeric(drawn["num_experts"]) > 0]
    error = drawn["of_step_time_s"].astype(float) / numeric(drawn["step_time_s"]) - 1
    knows = [known_of(drawn.loc[at], rows.loc[drawn.loc[at, "given"]]) for at in drawn.index]
    for kinds in (pd.Series(knows, index=drawn.index), "routing " + drawn["routing"]):
        for kind, errors in error.groupby(kinds):
            lines.append(f"| {kind} | {len(errors)} | {percent(errors.abs().mean())} | {100 * errors.mean():+.1f} % |")
    return "\n".join(lines)


if __name__ == "__main__":
    print(section(Path(sys.argv[1]), *sys.argv[2:3]))

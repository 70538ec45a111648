"""``grade``: compares every prediction below a folder with every measurement, as tables and as a file."""

from __future__ import annotations

import json
from collections.abc import Hashable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from rich.console import Console

from results.errors import InvalidResults, UltrasweepError
from results.shared_filesystem.whole_files import output_file, write_output
from results.statistics import grade
from results.tables.limits import read_csv, read_parquet
from results.tables.load import load
from results.tables.store import runs_of
from results.text.terminal import plain_table
from sweep.predicting.measured_tables import is_attempts
from sweep.predicting.predict_table import numeric

SUFFIXES = (".parquet", ".json")
_NAMES_OF_ROWS = {"status": "outcome", "gpus": "world_size", "seq": "seq_len", "mbs": "micro_batch_size"}
"""Columns of ``predict`` and their names in the tables of attempts."""
_NAMES = {
    "closed_form": "closed form",
    "step_time": "step time",
    "peak_memory": "peak memory",
    "reserved_memory": "reserved memory",
}


def read(path: Path, predictions: Path | None, against: Path | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Reads all pairs of a prediction and a measurement (see `results.statistics.grade`), and the measured points.

    The pairs come from the results folder ``path`` and from the file ``predictions``. ``against``: the table that was
    predicted, with its measurements; None: match with rows below ``path`` by experiment id. Raises `InvalidResults` if
    there is nothing to compare.
    """
    if against is not None and predictions is None:
        raise UltrasweepError("--against TABLE (the table that was predicted) needs --predictions FILE")
    points = pd.DataFrame()
    pair_tables = []
    if against is None or path.exists():
        rows = runs_of(load(path).table, path)
        points = grade.measured_points(grade.with_rehearsals(rows.to_pandas()))
        pair_tables.append(grade.pairs_of_rows(points))
    if predictions is not None:
        measured, in_its_order = points, False
        if against is not None:
            table = _table(against)
            measured, in_its_order = _measured_table(against, table), not is_attempts(table)
        predicted_rows = _table(predictions)
        if not any(name in predicted_rows for _, name, _ in grade.CALIBRATED):
            names = ", ".join(name for _, name, _ in grade.CALIBRATED)
            raise InvalidResults(f"{predictions} has none of the columns {names}: it holds no prediction")
        pair_tables.append(grade.pairs_of_predictions(predicted_rows, measured, in_its_order=in_its_order))
    full = [one for one in pair_tables if len(one)]
    if not full and points.empty:
        raise InvalidResults(f"{path} has no finished run: there is nothing to compare predictions with")
    return (pd.concat(full, ignore_index=True) if full else pair_tables[0]), points


def _table(path: Path) -> pd.DataFrame:
    try:
        return read_csv(path) if path.suffix == ".csv" else read_parquet(path).to_pandas()
    except InvalidResults:
        raise
    except (OSError, ValueError) as error:
        raise InvalidResults(f"{path} cannot be read: {error}") from None


def _measured_table(path: Path, rows: pd.DataFrame) -> pd.DataFrame:
    """A table for ``predict`` with its columns renamed as in attempts. Unknown columns stay as they are."""
    if rows.empty:
        raise InvalidResults(f"{path} has no row: nothing was measured")
    if is_attempts(rows):
        return grade.measured_points(rows)
    for column in ("status", "step_time_s"):
        if column not in rows:
            raise InvalidResults(f"{path} has no column {column}, so it holds no measurements")
    # The table may also have a column with the attempts' name, of the same or another meaning: use the one that
    # ``predict`` reads.
    rows = rows.drop(
        columns=[name for predict_name, name in _NAMES_OF_ROWS.items() if predict_name in rows and name in rows]
    )
    rows = rows.rename(columns=_NAMES_OF_ROWS)
    rows["outcome"] = rows["outcome"].astype(str).str.strip().str.lower().replace("success", "ok")
    for name in ("step_time_s", "reserved_gib", "gbs_seqs", "seq_len"):
        if name in rows:
            rows[name] = numeric(rows[name])
    if "reserved_gib" in rows:
        rows["peak_reserved_bytes"] = rows["reserved_gib"] * 2**30
    if {"gbs_seqs", "seq_len"} <= set(rows):
        rows["tokens_per_step"] = rows["gbs_seqs"] * rows["seq_len"]
    if "model" not in rows and {"layers", "hidden"} <= set(rows):
        rows["model"] = rows["layers"].astype(str) + "x" + rows["hidden"].astype(str)
    if "cluster" not in rows and "gpu" in rows:
        rows["cluster"] = rows["gpu"]
    return rows


def print_grades(table: pd.DataFrame, curve: pd.DataFrame, console: Console, by: Sequence[str] = ()) -> None:
    """Print the overall grades, grades by axis, and the refusal curve.

    ``by``: axes to show; empty: all axes, for step times only.
    """
    if table.empty:
        console.print("no prediction has a measurement to compare with")
    else:
        whole = table[table["axis"].isna()]
        _print_rows(whole, console, "Predictions against measurements", by_axis=False)
        for row in whole[whole["intervals"].fillna(0).gt(0)].to_dict("records"):
            console.print(_intervals(row), highlight=False)
        shown = table["axis"].isin(by) if by else table["axis"].notna() & table["quantity"].eq("step_time")
        for (depth, quantity), axis_rows in table[shown].groupby(["depth", "quantity"], sort=False):
            title = f"{_name(depth)}, {_name(quantity)}, by axis"
            _print_rows(axis_rows, console, title, by_axis=True)
    if len(curve) and curve["oom"].iloc[0]:
        _print_curve(curve, console)


def _print_rows(rows: pd.DataFrame, console: Console, title: str, *, by_axis: bool) -> None:
    shown = plain_table(title=title)
    for name in ("axis", "value") if by_axis else ("depth", "quantity"):
        shown.add_column(name)
    timed = rows["cells"].fillna(0).gt(0).any()
    covered = rows["coverage"].notna().any()
    names = ["n", "MAPE", "median", "p90", "bias"]
    names += ["cells", "Spearman", "top-1 regret", "top-5 regret"] if timed else []
    for name in [*names, *(["coverage"] if covered else [])]:
        shown.add_column(name, justify="right")
    for row in rows.to_dict("records"):
        first = [row["axis"], row["value"]] if by_axis else [_name(row["depth"]), _name(row["quantity"])]
        errors = [_share(row["mape"]), _signed(row["median"]), _share(row["p90"]), _signed(row["bias"])]
        cells = [f"{row['n']:,}", *errors]
        if timed:
            order = "–" if pd.isna(row["spearman"]) else f"{row['spearman']:.3f}"
            count = "–" if pd.isna(row["cells"]) else f"{row['cells']:.0f}"
            cells += [count, order, _share(row["top1_regret"]), _share(row["top5_regret"])]
        if covered:
            cells.append(_share(row["coverage"]))
        shown.add_row(*map(str, first), *cells)
    console.print(shown)


def _intervals(row: Mapping[Hashable, Any]) -> str:
    """Number of measurements inside their interval. Rows of schema 9 and older recorded no interval."""
    count, total = int(row["intervals"]), int(row["n"])
    inside = round(count * row["coverage"])
    without = f"; {total - count:,} more have no interval" if count < total else ""
    return f"Inside their predicted interval, {_name(row['depth'])}: {inside:,} of {count:,} step times{without}"


def _print_curve(curve: pd.DataFrame, console: Console) -> None:
    fitting, oom = (int(curve[name].iloc[0]) for name in ("fitting", "oom"))
    shown = plain_table(
        title=f"Out of memory: {oom:,} runs failed, {fitting:,} fitted; refused if the predicted share is above the cut"
    )
    for name in ("cut", "right", "fitting refused", "OOM kept"):
        shown.add_column(name, justify="right")
    for row in curve.to_dict("records"):
        wrong = (f"{row[name]:,}" for name in ("fitting_refused", "oom_kept"))
        shown.add_row(f"{row['cut']:.2f}", _share(row["right"]), *wrong)
    console.print(shown)


def _name(name: Any) -> str:
    return _NAMES.get(str(name), str(name))


def _share(value: Any) -> str:
    return "–" if value is None or pd.isna(value) else f"{100 * value:.1f} %"


def _signed(value: Any) -> str:
    return "–" if value is None or pd.isna(value) else f"{100 * value:+.1f} %"


def check_out(path: Path) -> None:
    """Raises `UltrasweepError` if `write` cannot write this file."""
    if path.suffix not in SUFFIXES:
        raise UltrasweepError(f"--out {path}: grades are a Parquet or a JSON file; end its name in .parquet or .json")
    if not path.parent.is_dir():
        raise UltrasweepError(f"--out {path}: there is no folder {path.parent}")


def write(path: Path, table: pd.DataFrame, curve: pd.DataFrame, pairs: pd.DataFrame) -> None:
    """Write every pair as Parquet, or the grades, the refusal curve and every pair as JSON with null for unknown
    values."""
    try:
        if path.suffix == ".parquet":
            text = {str(name): pairs[name].astype("string") for name in pairs if pairs[name].dtype == object}
            with output_file(path) as file:
                pairs.assign(**text).to_parquet(file, index=False)
            return
        records = {
            name: json.loads(one.to_json(orient="records"))
            for name, one in (("grades", table), ("oom_curve", curve), ("pairs", pairs))
        }
        write_output(path, json.dumps(records, indent=1) + "\n")
    except OSError as error:
        raise UltrasweepError(f"--out {path}: {error.strerror or error}") from None

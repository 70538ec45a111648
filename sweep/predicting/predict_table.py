"""``predict``: step time, memory and whether it fits, for every row of a table of training configurations.

Any CSV or Parquet file with some of the columns of `workloads.predict.table` will do. Rows to calibrate with also need
measured columns. Tables of attempts (``attempts.parquet``) are accepted as they are: the code base of a row is then its
engine.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from results.errors import InvalidResults, UltrasweepError
from results.shared_filesystem.whole_files import output_file
from results.tables.limits import read_csv, read_parquet
from sweep.composing.conffiles import ConfFolders
from sweep.predicting.codebases import GENERAL, read_clusters, read_profiles
from sweep.predicting.measured_tables import (
    columns_of_attempts,
    has_latents,
    has_more_than_columns,
    is_attempts,
    measured_attempts,
)
from sweep.predicting.predict_own_memory import own_memory, reserved_over_form
from sweep.predicting.unsaid import cover
from workloads.predict.cells.words import text_of
from workloads.predict.experts.ratios import routed_rows
from workloads.predict.predictor import GIB, Measured, Predictor
from workloads.predict.profiles import Profile, find_profile
from workloads.predict.table import COLUMNS, MEASURED, Table, read_points
from workloads.spec.experiment import ENGINE

OUT = (
    "predicted_peak_allocated_bytes", "predicted_peak_reserved_bytes", "fits", "step_time_s", "step_time_low_s",
    "step_time_high_s", "reason",
)  # fmt: skip
"""Columns written, in this order; one row per row of the table, in the same order. A column ``experiment_id`` of the
table is appended, so that ``grade`` can match the rows."""
_STATUS = {"ok": 0.0, "success": 0.0, "oom": 1.0}
_NO_STATUS = ("other", "", "nan", "none", "<na>")
"""Known words of a status, in addition to `_STATUS`, that say neither that a run fitted nor that it ran out of
memory."""


_PLAIN = (
    "taken as a plain step: packed documents, other optimizers and number formats, and states or activations on the "
    "host have no column; a plan predicts them"
)
"""Reason of a row of attempts that says more than columns do."""


@dataclass(frozen=True, slots=True)
class TablePrediction:
    predictions: pd.DataFrame
    """Columns `OUT`."""
    mistakes: tuple[str, ...]
    """One line for each row that cannot be predicted, or cannot be used to calibrate."""
    fitted_on: int
    """Number of calibration rows whose step time was used in the fit."""


def read_table(path: Path) -> pd.DataFrame:
    """Reads a CSV or Parquet file as a table.

    Raises `UltrasweepError` if it is neither or has none of the columns that `predict` reads.
    """
    if not path.is_file():
        raise UltrasweepError(f"{path}: no such file")
    try:
        frame = read_parquet(path).to_pandas() if path.suffix == ".parquet" else _read_csv(path)
    except InvalidResults:
        raise
    except (OSError, ValueError, UnicodeDecodeError) as error:  # pandas' and pyarrow's errors are ValueErrors
        raise UltrasweepError(f"{path} cannot be read as a table: {' '.join(str(error).split())[:200]}") from None
    return checked_table(frame, path)


def checked_table(frame: pd.DataFrame, name: Path | str) -> pd.DataFrame:
    """The frame with its columns' names stripped of spaces. ``name``: what a message calls it.

    Raises `UltrasweepError` if it has none of the columns that `predict` reads, or one of them twice.
    """
    frame = frame.set_axis([str(column).strip() for column in frame.columns], axis=1)
    columns = list(frame.columns)
    twice = sorted({column for column in columns if columns.count(column) > 1 and column in COLUMNS})
    if twice:
        raise UltrasweepError(f"{name}: column {twice[0]} appears twice")
    if not set(columns) & set(COLUMNS):
        raise UltrasweepError(f"{name} has none of the columns {', '.join(COLUMNS)}")
    return frame


def _read_csv(path: Path) -> pd.DataFrame:
    return read_csv(path, dtype=str, keep_default_na=False, skipinitialspace=True)


def predict_frame(
    frame: pd.DataFrame, calibration: pd.DataFrame | None, folders: ConfFolders | None = None
) -> TablePrediction:
    """Predictions for every row of ``frame``, fitted only on the rows of ``calibration``. ``folders``: where the user's
    clusters are.

    Raises `UltrasweepError` for a calibration without a measured column, or without a usable row.
    """
    clusters, profiles = read_clusters(folders), read_profiles()
    general = profiles[GENERAL]
    read, attempts = frame, frame if is_attempts(frame) else None
    rows = None if calibration is None else _measured_rows(calibration)
    frame, calibration = _in_columns(frame), None if rows is None else _in_columns(rows)
    wide = calibration is not None and "ep" in calibration and bool((numeric(calibration["ep"]) > 1).any())
    table = read_points(frame, clusters, profiles, general, routed=wide)
    routed = routed_rows(table, profiles, None if attempts is None else attempts["config_json"].tolist())
    mistakes = [f"row {row + 1}: {reason}" for row, reason in enumerate(table.reasons) if reason]
    measured, cached = None, 1.0
    if calibration is not None and rows is not None:
        given = read_points(calibration, clusters, profiles, general)
        mistakes += [f"calibration row {row + 1}: {reason}" for row, reason in enumerate(given.reasons) if reason]
        mistakes += _unread_measurements(calibration)
        of_rows, as_measured = routed_rows(given, profiles), measured_of(calibration, given)
        measured = of_rows.without_experts(as_measured, Predictor.learn(None, profiles))
        cached = reserved_over_form(own_memory(rows, given), as_measured.reserved_bytes)
        mistakes += [f"calibration row {given.rows[place] + 1}: {why}" for place, why in of_rows.refused.items()]
    predictor = Predictor.learn(measured, profiles)
    prediction = routed.predict(predictor)
    covered = cover(prediction, frame, table, predictor, clusters, general)
    for place, memory in own_memory(frame if attempts is None else attempts, table).items():
        prediction.allocated_bytes[place] = memory.peak_bytes
        prediction.reserved_bytes[place] = max(cached * memory.reserved_bytes, memory.peak_bytes)
        if memory.fits is not None:
            prediction.fits[place] = memory.fits
    columns: dict[str, Any] = {
        OUT[0]: _spread(table, np.rint(prediction.allocated_bytes), len(frame)).astype("Int64"),
        OUT[1]: _spread(table, np.rint(prediction.reserved_bytes), len(frame)).astype("Int64"),
        OUT[2]: _spread(table, prediction.fits, len(frame)).astype("boolean"),
        OUT[3]: _spread(table, prediction.step_time_s, len(frame)),
        OUT[4]: _spread(table, prediction.low_s, len(frame)),
        OUT[5]: _spread(table, prediction.high_s, len(frame)),
        OUT[6]: pd.Series(_reasons(table, prediction.step_time_s, covered), dtype="string"),
    }
    fitted = 0 if measured is None else int(np.isfinite(measured.step_time_s).sum())
    predictions = pd.DataFrame(columns)
    if "experiment_id" in read:
        predictions["experiment_id"] = read["experiment_id"].to_numpy()
    unknown = {int(table.rows[place]): reason for place, reason in routed.refused.items()}
    if attempts is not None:
        predictions.loc[has_more_than_columns(attempts).to_numpy(), OUT[-1]] = _PLAIN
        unknown |= _unknown(attempts, predictor, profiles)
    for row, reason in unknown.items():
        predictions.loc[row, list(OUT[:-1])] = pd.NA  # experiment_id stays
        predictions.loc[row, OUT[-1]] = reason
        mistakes.append(f"row {row + 1}: {reason}")
    return TablePrediction(predictions, tuple(mistakes), fitted)


def _in_columns(frame: pd.DataFrame) -> pd.DataFrame:
    """Returns the table in the columns of ``predict``; tables of attempts are converted."""
    return columns_of_attempts(frame) if is_attempts(frame) else frame


def _measured_rows(calibration: pd.DataFrame) -> pd.DataFrame:
    return measured_attempts(calibration) if is_attempts(calibration) else calibration


def _unknown(attempts: pd.DataFrame, predictor: Predictor, profiles: Mapping[str, Profile]) -> dict[int, str]:
    """Reasons why complete rows of attempts are not predicted, by row index.

    No column describes latent attention, and another engine is predicted only after a fit to rows of that engine.
    """
    fitted = {name for name in profiles if name in predictor.time}
    reasons = {}
    latents = has_latents(attempts).tolist()
    for row, engine in enumerate(attempts["engine"].fillna(ENGINE)):
        if latents[row]:
            reasons[row] = "models with latent attention cannot be predicted from a table"
        elif engine != ENGINE and find_profile(engine, profiles.values(), profiles[GENERAL]).name not in fitted:
            reasons[row] = f"engine {engine} is unknown: --calibrate with rows that it ran"
    return reasons


def numeric(column: pd.Series[Any]) -> pd.Series[Any]:
    """The column as floats; NaN for values that are no number."""
    return column.map(_number).astype(float)


def _number(value: Any) -> float:
    try:
        return float(str(value).strip().replace(",", ""))
    except ValueError:
        return math.nan


def measured_of(frame: pd.DataFrame, table: Table) -> Measured:
    if not set(frame.columns) & set(MEASURED):
        raise UltrasweepError(f"the calibration has none of the columns {', '.join(MEASURED)}")
    rows = table.rows
    status = frame["status"].astype(str).str.strip().str.lower() if "status" in frame else None
    ran = np.ones(len(rows), bool) if status is None else (status.map(_STATUS).to_numpy()[rows] == 0)

    def numbers(name: str) -> np.ndarray[Any, np.dtype[np.float64]]:
        if name not in frame:
            return np.full(len(rows), np.nan)
        values = numeric(frame[name]).to_numpy(dtype=float)[rows]
        return np.where(ran & (values > 0) & np.isfinite(values), values, np.nan)

    step, reserved = numbers("step_time_s"), numbers("reserved_gib") * GIB
    failed = np.full(len(rows), np.nan) if status is None else status.map(_STATUS).to_numpy(dtype=float)[rows]
    if not (np.isfinite(step).any() or np.isfinite(reserved).any() or np.isfinite(failed).any()):
        raise UltrasweepError(
            "no row of the calibration can be used: none has a status, a step time or reserved memory"
        )
    return Measured(table.points, step, reserved, failed)


def _unread_measurements(frame: pd.DataFrame) -> list[str]:
    """One line for each measurement of a calibration that is not understood, and therefore not used."""
    lines = []
    if "status" in frame:
        words = frame["status"].astype(str).str.strip()
        for row, word in enumerate(words.tolist()):
            if word.lower() not in (*_STATUS, *_NO_STATUS):
                lines.append(
                    f"calibration row {row + 1}: status {word!r} is not known, so it is not used; known: ok, oom, other"
                )
    for name in MEASURED[1:]:
        if name in frame:
            unread = numeric(frame[name]).isna().to_numpy()
            for row, cell in enumerate(frame[name].tolist()):
                if unread[row] and text_of(cell):
                    lines.append(
                        f"calibration row {row + 1}: {name} = {str(cell)!r} is not a number, so it is not used"
                    )
    return lines


def _spread(table: Table, values: Any, count: int) -> pd.Series[Any]:
    """Puts values of the predicted rows into a column of the whole table; other rows are null."""
    column = pd.Series([None] * count, dtype="object")
    column.iloc[table.rows] = [one if np.isfinite(float(one)) else None for one in values]
    return column.astype("Float64") if values.dtype != bool else column.astype("boolean")


def _reasons(table: Table, time: Any, covered: Mapping[int, str]) -> list[str | None]:
    reasons: list[str | None] = [reason or None for reason in table.reasons]
    for place, row in enumerate(table.rows):
        if not np.isfinite(time[place]):
            reasons[row] = "the ranks span several nodes, and the link between nodes is unknown"
        elif table.notes[row]:
            reasons[row] = "; ".join([f"assumed: {table.notes[row]}", *([covered[place]] if place in covered else [])])
    return reasons


def unread_columns(frame: pd.DataFrame) -> list[str]:
    """Names of columns that are not read, such as misspelt ones; empty for attempts, which have many other columns."""
    known = {*COLUMNS, *MEASURED, "experiment_id"}
    return [] if is_attempts(frame) else [name for name in frame.columns if name not in known]


def check_out(path: Path, read: Sequence[Path] = ()) -> None:
    """Raises `UltrasweepError` if the name has another ending, the folder does not exist, or the file is an input
    (``read``)."""
    if path.suffix not in (".parquet", ".csv"):
        raise UltrasweepError(f"--out {path}: its name must end in .parquet or .csv")
    if not path.absolute().parent.is_dir():
        raise UltrasweepError(f"--out {path}: {path.absolute().parent} is not a folder")
    if path.exists() and any(one.exists() and path.samefile(one) for one in read):
        raise UltrasweepError(f"--out {path} is an input table and would be overwritten; give another name")


def write_predictions(predictions: pd.DataFrame, path: Path) -> None:
    """Write Parquet or CSV, by the ending of ``path``. Raises `UltrasweepError` if the file cannot be written."""
    try:
        with output_file(path) as file:
            if path.suffix == ".csv":
                predictions.to_csv(file, index=False)
            else:
                predictions.to_parquet(file, index=False)
    except OSError as error:
        raise UltrasweepError(f"{path} cannot be written: {error.strerror or error}") from None

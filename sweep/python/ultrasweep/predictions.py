"""``ultrasweep.predict``: step time and memory of the rows of any frame."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import pandas as pd

from sweep.predicting.predict_table import checked_table, predict_frame, read_table, unread_columns
from ultrasweep.given import Conf, folders, path


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Predictions:
    """The answer of `predict`."""

    rows: pd.DataFrame = field(repr=False)
    """One row for each row of the frame, with its index: ``predicted_peak_allocated_bytes``,
    ``predicted_peak_reserved_bytes``, ``fits``, ``step_time_s`` with the bounds of its 90 % interval
    (``step_time_low_s``, ``step_time_high_s``), and ``reason``: what was assumed, or why the row is not predicted."""
    mistakes: tuple[str, ...]
    """One line for each row that cannot be predicted, or cannot be used to calibrate."""
    fitted_on: int
    """Number of calibration rows whose step time was used."""
    ignored_columns: tuple[str, ...]
    """Columns of the frame that are not read."""


def predict(
    frame: pd.DataFrame | str | Path, *, calibrate: pd.DataFrame | str | Path | None = None, conf: Conf = ()
) -> Predictions:
    """Predicts step time, memory and whether it fits, for every row of a frame of training configurations.

    ``frame``: a frame, or the path of a CSV or Parquet file, with the columns of docs/predict.md, or rows of
    `load(...).attempts`. ``calibrate``: rows with the same columns and ``status``, ``step_time_s``, ``reserved_gib``;
    the prediction is fitted on these alone. ``conf``: folders with your own cluster/ files. Raises `UltrasweepError`
    with one line if the frame has none of the columns, or no row of ``calibrate`` can be used.
    """
    asked = _table("frame", frame)
    calibration = None if calibrate is None else _table("calibrate", calibrate)
    found = predict_frame(asked.reset_index(drop=True), calibration, folders(conf) if conf else None)
    return Predictions(
        rows=found.predictions.set_axis(asked.index),
        mistakes=found.mistakes,
        fitted_on=found.fitted_on,
        ignored_columns=tuple(unread_columns(asked)),
    )


def _table(name: str, given: pd.DataFrame | str | Path) -> pd.DataFrame:
    return checked_table(given, name) if isinstance(given, pd.DataFrame) else read_table(path(name, given))

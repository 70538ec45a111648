"""A table of recorded runs as a space to replay searches in: candidates, predictions and results.

Any table with the columns of ``predict`` and ``status``, ``step_time_s`` will do (docs/predict.md). The raw table of
the study that this project reproduces is accepted as published; only its runs of one network regime are candidates.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from results.errors import UltrasweepError
from sweep.composing.conffiles import ConfFolders
from sweep.predicting.codebases import GENERAL, read_clusters, read_profiles
from sweep.predicting.measured_tables import is_attempts, study_table, table_of_attempts
from sweep.predicting.predict_table import measured_of, numeric, read_table
from sweep.searching.features import families, layout_features
from sweep.searching.space import Floats, SearchSpace, Texts
from workloads.predict.learned_time import UNFITTED_WIDTH
from workloads.predict.points import Points
from workloads.predict.predictor import Measured, Predictor
from workloads.predict.table import read_points
from workloads.spec.cluster import ClusterSpec

Clusters = Mapping[str, ClusterSpec]

RAW_STUDY = "tok/s/gpu"
"""A column that only the study's raw table has."""
FAST_NETWORK_GB_S = 120.0
"""Threshold in GB/s of all-reduce bandwidth over eight and more nodes, between the study's fast network regime and its
slow one, in which nearly all its pipelines ran."""
NETWORK_FROM_GPUS = 64
REWRITTEN = "after_pp_fix"
STUDY_BATCH, STUDY_VOCABULARY = 256, 131072
LEAST_RUNS = 3
"""Least number of successful runs of a cell."""
COVARIATES = ("allreduce_gb_s", "allreduce_intra_gb_s")
CELL = ["layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "tie_embeddings", "seq", "gbs_seqs", "gpus"]
MODEL = CELL[:7]
_SIZES = ["layers", "hidden"]
LAYOUT = ["dp", "tp", "pp", "vpp", "cp", "ep", "mbs", "sharding", "recompute", "precision"]
SPREAD_OF_LOAD = {True: 0.08, False: 0.25}
"""Standard deviation of the log of predicted memory, with and without calibration."""
NEW_MODEL = 1.5
"""Factor that widens a fitted prediction for a model without rows in the fit."""
WITHOUT_ROWS = 1 / UNFITTED_WIDTH
"""Factor that widens a prediction fitted on nothing: that of a winner may be off by more than one interval in ten is.
With it the search of the study's cells is within 1 % in 27 of 27 after 270 runs, without it in 25 after 225."""
_NORMAL_90 = 2 * 1.645
"""Width of a normal distribution's middle 90 %, in standard deviations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedSpace:
    """A space whose candidates all ran once; its arrays have one entry per candidate."""

    space: SearchSpace
    outcome: Texts
    """``ok``, ``oom`` or ``other``."""
    step_time_s: Floats
    """NaN for failed runs."""
    log_expected: Floats
    """Logarithm of the step time that the prior predicts for this run, with the bandwidths that its job measured."""
    names: tuple[str, ...]
    """Name of each cell, by its number."""
    points: Points
    """Layouts of the candidates."""

    def tag(self, one: int) -> str:
        """Short text of a candidate's layout."""
        x = self.points
        return f"dp{x.dp[one]:g} tp{x.tp[one]:g} pp{x.pp[one]:g} mbs{x.mbs[one]:g} zero{x.zero[one]:g}"

    def contenders(self, within: float) -> RecordedSpace:
        """The same cells, with only those layouts whose step time is within this share of the best of their cell."""
        best = np.full(len(self.names), np.inf)
        np.fmin.at(best, self.space.cell, self.step_time_s)
        rows = np.flatnonzero(self.step_time_s <= (1 + within) * best[self.space.cell])
        return dataclasses.replace(
            self,
            space=self.space.take(rows),
            outcome=self.outcome[rows],
            step_time_s=self.step_time_s[rows],
            log_expected=self.log_expected[rows],
            points=self.points.take(rows),
        )


def read_recorded(path: Path) -> pd.DataFrame:
    """The rows to search in. Raises `UltrasweepError` for a table without a status or step times."""
    if path.suffix == ".csv" and path.is_file() and _begins_like_the_study(path):
        return study_regime(study_table(path))
    frame = read_table(path)
    if is_attempts(frame):
        frame = table_of_attempts(frame)
    if missing := [name for name in ("status", "step_time_s") if name not in frame]:
        raise UltrasweepError(f"{path} lacks the columns {', '.join(missing)}, which --replay needs")
    frame["status"] = frame["status"].astype(str).str.strip().str.lower().replace({"success": "ok"})
    frame["step_time_s"] = numeric(frame["step_time_s"])
    frame["candidate"] = (frame["status"] != "ok") | (frame["step_time_s"] > 0)
    return frame


def _begins_like_the_study(path: Path) -> bool:
    with path.open("rb") as file:
        header = file.readline(1 << 16).decode("utf-8-sig", errors="replace")
    return RAW_STUDY in [name.strip().strip('"') for name in header.split(",")]


def study_regime(rows: pd.DataFrame) -> pd.DataFrame:
    """The study's rows with its standard models and batch that obey nanotron's rules.

    ``candidate`` marks rows of one regime: the slow network, and for pipelines the rewritten code (other layouts do not
    use it). A failed run has no measured bandwidth, so all failed runs are candidates.
    """
    in_study = (
        (rows["gbs_seqs"] == STUDY_BATCH) & (rows["vocab"] == STUDY_VOCABULARY) & (rows["kv_heads"] == rows["heads"])
    )
    in_study &= (
        (rows["grad_accum"] >= rows["pp"] - 1) & (rows["heads"] % rows["tp"] == 0) & (rows["pp"] <= rows["layers"])
    )
    rows = rows[in_study].reset_index(drop=True)
    slow = (rows["gpus"] < NETWORK_FROM_GPUS) | (rows[COVARIATES[0]] < FAST_NETWORK_GB_S)
    ran, alone = rows["status"] == "ok", rows["pp"] == 1
    version = rows["code_version"].mask(~ran | alone, REWRITTEN)
    return rows.assign(code_version=version, candidate=~ran | (slow & (version == REWRITTEN)))


def recorded_space(frame: pd.DataFrame, calibrated: bool, folders: ConfFolders | None = None) -> RecordedSpace:
    """Builds the space. ``calibrated``: predict each model from the rows of all other models; otherwise without rows.
    ``folders``: with files of clusters that the table names.

    Predictions before a run use the median bandwidths for its number of devices. A layout with several runs counts
    once, with its last successful run. Raises `UltrasweepError` if no cell has `LEAST_RUNS` successful runs.
    """
    clusters = read_clusters(folders)
    rows = _candidates(frame, clusters)
    usual = rows.assign(**{name: _usual(rows, name) for name in COVARIATES if name in rows})
    predictors = _predictors(rows, frame, calibrated, clusters)
    before, for_this_run = _predicted(usual, predictors, clusters), _predicted(rows, predictors, clusters)
    known = np.isfinite(before.log_time) & np.isfinite(for_this_run.log_time)
    rows, before, for_this_run = rows[known].reset_index(drop=True), before.take(known), for_this_run.take(known)
    cell_of = rows.groupby([name for name in CELL if name in rows], sort=True, dropna=False).ngroup()
    model_of = rows.groupby([name for name in MODEL if name in rows], sort=True, dropna=False).ngroup()
    points = before.points
    degrees = zip(cell_of, points.dp, points.tp, points.pp, points.cp, points.recompute, strict=True)
    space = SearchSpace(
        cell=cell_of.to_numpy(np.int64),
        model=model_of.to_numpy(np.int64),
        gpus=points.gpus,
        layout=layout_features(points),
        family=families(points),
        log_time=before.log_time,
        time_spread=before.spread,
        log_load=before.log_load,
        load_spread=np.full(len(points), SPREAD_OF_LOAD[calibrated]),
        same_but_memory=np.array([" ".join(f"{one:g}" for one in row) for row in degrees]),
    )
    first = np.unique(cell_of, return_index=True)[1]
    names = tuple(f"{points.params[one] / 1e9:.3g}B on {points.gpus[one]:g}" for one in first)
    return RecordedSpace(
        space=space,
        outcome=rows["status"].to_numpy(),
        step_time_s=rows["step_time_s"].where(rows["status"] == "ok").to_numpy(float),
        log_expected=for_this_run.log_time,
        names=names,
        points=points,
    )


def _candidates(frame: pd.DataFrame, clusters: Clusters) -> pd.DataFrame:
    """One row per layout, in cells with enough runs."""
    rows = frame[frame["candidate"]].copy()
    profiles = read_profiles()
    # Drop layouts that no planner would choose, such as stages without a layer.
    rows = rows.iloc[read_points(rows, clusters, profiles, profiles[GENERAL]).rows]
    rank = rows["status"].map({"other": 0, "oom": 1, "ok": 2}).fillna(0)
    rows["status"] = rows["status"].where(rows["status"].isin(["ok", "oom"]), "other")
    key = [name for name in (*CELL, *LAYOUT) if name in rows]
    rows = rows.assign(_rank=rank, _place=np.arange(len(rows))).sort_values(["_rank", "_place"], kind="stable")
    rows = rows.groupby(key, dropna=False, sort=False).tail(1).sort_values("_place")
    cell = [name for name in CELL if name in rows]
    enough = rows.assign(_ran=rows["status"] == "ok").groupby(cell, dropna=False)["_ran"].transform("sum") >= LEAST_RUNS
    rows = rows[enough].drop(columns=["_rank", "_place"]).reset_index(drop=True)
    if rows.empty:
        raise UltrasweepError(f"no model and size of the table has {LEAST_RUNS} successful runs")
    return rows


def _usual(rows: pd.DataFrame, name: str) -> pd.Series[Any]:
    values = numeric(rows[name])
    return rows["gpus"].map(values.groupby(rows["gpus"]).median())


@dataclass(frozen=True, slots=True)
class _Predicted:
    points: Points
    log_time: Floats
    spread: Floats
    log_load: Floats

    def take(self, rows: Any) -> _Predicted:
        return _Predicted(self.points.take(rows), self.log_time[rows], self.spread[rows], self.log_load[rows])


def _predictors(rows: pd.DataFrame, frame: pd.DataFrame, calibrated: bool, clusters: Clusters) -> dict[Any, Predictor]:
    """One predictor per model, fitted on all rows of the other models, or not fitted."""
    profiles = read_profiles()
    keys = [key for key, _ in rows.groupby(_SIZES, sort=True)]
    if not calibrated:
        return {key: Predictor.learn(None, profiles) for key in keys}
    table = read_points(frame, clusters, profiles, profiles[GENERAL])
    measured = measured_of(frame, table)
    predictors = {}
    for key in keys:
        others = (frame[_SIZES] != pd.Series(key, index=_SIZES)).any(axis=1).to_numpy()[table.rows]
        given = Measured(
            measured.points.take(others),
            measured.step_time_s[others],
            measured.reserved_bytes[others],
            measured.out_of_memory[others],
        )
        predictors[key] = Predictor.learn(given if others.any() else None, profiles, widened=False)
    return predictors


def _predicted(rows: pd.DataFrame, predictors: dict[Any, Predictor], clusters: Clusters) -> _Predicted:
    profiles = read_profiles()
    table = read_points(rows, clusters, profiles, profiles[GENERAL])
    points, count = table.points, len(table.rows)
    log_time, spread, log_load = np.empty(count), np.empty(count), np.empty(count)
    keys = rows[_SIZES].iloc[table.rows].reset_index(drop=True)
    for key, group in keys.groupby(_SIZES, sort=True):
        at, predictor = group.index.to_numpy(), predictors[key]
        prediction = predictor.predict(points.take(at))
        limit = np.array([predictor.cut.get(name, 1.0) for name in points.codebase[at].tolist()])
        fitted = np.array([name in predictor.time for name in points.codebase[at].tolist()])
        log_time[at] = np.log(prediction.step_time_s)
        spread[at] = (
            np.log(prediction.high_s / prediction.low_s) / _NORMAL_90 * np.where(fitted, NEW_MODEL, WITHOUT_ROWS)
        )
        log_load[at] = np.log(prediction.load / limit)
    return _Predicted(points, log_time, spread, log_load)

"""``ultrasweep.load``: the rows of a results folder."""

from __future__ import annotations

from pathlib import Path

from analysis.rows import load as loading
from analysis.rows.load import LoadedResults as Results
from ultrasweep.given import path

__all__ = ["Results", "load"]


def load(results: str | Path) -> Results:
    """Every attempt and every planned point of ``results``: a folder of sweeps, one sweep, one Parquet file of
    attempts, a plan written by ``plan --out``, or the published table of the Ultra-Scale Playbook's study (CSV).

    Raises `UltrasweepError` with one line if the path holds nothing of that kind.
    """
    return loading.load(path("results", results))

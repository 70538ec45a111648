"""``report.json``: every number of the page, for scripts and agents.

The page computes answers in the browser for the limits that its reader sets; this file has the answers with which the
page opens (the usual batch of each model and size, no limits). Memory is in bytes, times are in seconds, throughputs in
tokens per second and device, shares are fractions.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pandas as pd

from analysis.index_page import headlines, page_data
from analysis.rows import answer, choice_costs, metrics
from analysis.rows.cohorts import Cohort
from results.statistics import noise

FORMAT = 2
TRAINED_TOKENS = 1e12
"""Number of training tokens for which days and GPU-hours are given."""
_LAYOUT = (
    *("experiment_id", "attempt_id", "layout", "dp", "zero_stage", "tp", "cp", "pp", "ep"),
    *("micro_batch_size", "num_microbatches", "recompute", "tokens_per_step", "network_regime", "engine_version"),
)
_SHOWN = 10


def write(parts: Sequence[Cohort], about: dict[str, Any], price: float | None) -> str:
    """Text of the file. ``about`` holds the facts on the whole report (title, source, warnings …)."""
    whole = {"format": FORMAT, **about, "parts": [_part(part, price) for part in parts]}
    return json.dumps(whole, indent=1, ensure_ascii=False, allow_nan=False)


def _part(part: Cohort, price: float | None) -> dict[str, Any]:
    frame = part.frame
    return {
        "slug": part.slug,
        "title": part.title,
        "meaning": part.meaning,
        "stamp": part.stamp or None,
        "capacity_bytes": page_data.capacity(frame),
        "memory": metrics.memory_column(frame),
        "sentences": [one.concluded + one.rest for one in headlines.of_part(part)],
        "trust": [{"mark": one.mark, "text": one.concluded + one.rest} for one in headlines.trust(part)],
        "cells": [_cell(one, frame, price) for one in answer.of_every_cell(frame)],
        "choices": page_data.choices_of(frame, choice_costs.COLUMNS),
    }


def _cell(one: answer.Answer, frame: pd.DataFrame, price: float | None) -> dict[str, Any]:
    return {
        "workload": one.query.workload,
        "world_size": one.query.world_size,
        "points": one.points,
        "out_of_memory": one.out_of_memory,
        "failed_otherwise": one.failed,
        "finished_layouts": one.finished,
        "tokens_per_step": one.tokens_per_step,
        "compared_layouts": len(one.layouts),
        "faster_at_another_batch": one.faster_at,
        "tied": len(one.ties),
        "tie_rests_on_5_percent": one.untimed,
        "noise": None if one.best is None else noise.describe(one.best),
        "layouts": [_layout(row, one, frame, price) for row in one.layouts[:_SHOWN]],
    }


def _layout(row: answer.Layout, one: answer.Answer, frame: pd.DataFrame, price: float | None) -> dict[str, Any]:
    hours = TRAINED_TOKENS / row[metrics.RANK_BY] / 3600
    return {name: _plain(row.get(name)) for name in _LAYOUT} | {
        "tokens_per_s_per_gpu": _plain(row[metrics.RANK_BY]),
        "mfu_palm": _plain(row["mfu_palm"]),
        "step_time_s": _plain(row["step_time_s"]),
        "memory_bytes": _plain(row[metrics.memory_column(frame)]),
        "repeats": _plain(row["repeats"]),
        "slower": _plain(row["behind"]),
        "tied": bool(row["tied"]),
        "device_hours": _plain(hours),
        "days": _plain(hours / one.query.world_size / 24),
        "cost": None if price is None else _plain(hours * price),
    }


def _plain(value: Any) -> Any:
    """The value in a type that JSON can store; unknown is null."""
    if value is None or pd.isna(value):
        return None
    if hasattr(value, "item"):
        value = value.item()
    return int(value) if isinstance(value, float) and value.is_integer() and abs(value) < 2**53 else value

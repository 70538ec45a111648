"""The rows of a report as the explorer's JSON: one entry per column; texts and repeated numbers are codes into a list.

This module derives no values: an unknown value is null.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd

from analysis.explorer import pack_texts
from analysis.rows.cohorts import Cohort
from analysis.rows.labels import OUTCOME_NAMES, device_noun
from results.tables.reference import EXTRA_COLUMNS
from results.tables.schema import ATTEMPT_COLUMNS, LEDGER_COLUMNS
from workloads.spec.experiment import ENGINE, ENGINE_VERSION
from workloads.spec.updates.words import UPDATE_FIELDS

COHORT = "cohort"
"""Column with the title of a row's cohort."""
NOT_SHOWN = frozenset({"config_json", "source_sha256", "log_dir", "job_id", "accumulation"})
"""Columns that the page does not get: ``config_json``, because the page rebuilds it from the other columns;
``source_sha256``, because it is large and hardly used; ``log_dir``, because it is shown above each log; the study's
``job_id``, because it equals ``scheduler_job``; and ``accumulation``, which is part of ``batching``."""
_LISTS = frozenset({"hosts", "nodes"})
"""Columns of lists that are shown as one text. Other lists, which are series such as losses or bytes by step, are left
out."""
_DIGITS = 7
"""Significant digits of a stored number."""
_LEVELS = 400
"""Largest number of distinct values for which a column of numbers is stored as codes."""
_LABELS = {
    COHORT: "cohort",
    "workload": "workload",
    "layout": "layout",
    "degrees": "degrees",
    "batching": "batching",
    "world_size": "GPUs",
    "micro_batch_size": "micro-batch",
    "num_params": "parameters",
    "num_microbatches": "micro-batches (accumulation)",
    "global_batch_size": "global batch",
    "study_label": "the study's label",
    "seq_len": "sequence length",
    "zero_stage": "ZeRO stage",
    "recompute": "recomputation",
    "recompute_every": "one layer recomputed in",
    "activation_offload": "offloaded activations",
    "tokens_per_s_per_gpu": "tokens/s/GPU",
    "tokens_per_s": "tokens/s",
    "step_time_s": "step time",
    "step_time_min_s": "fastest step",
    "step_time_max_s": "slowest step",
    "mfu_palm": "MFU (PaLM)",
    "mfu_causal": "MFU (causal)",
    "mfu_playbook": "MFU (Playbook)",
    "hfu": "HFU",
    "published_mfu": "MFU as published",
    "peak_allocated_bytes": "peak allocated",
    "peak_reserved_bytes": "peak reserved",
    "predicted_peak_bytes": "predicted peak",
    "predicted_step_time_s": "predicted step time",
    "predicted_step_time_low_s": "predicted step time, low end",
    "predicted_step_time_high_s": "predicted step time, high end",
    "predicted_tokens_per_s_per_gpu": "predicted tokens/s/GPU",
    "limit_bytes": "limit of the device",
    "expected_gpu_hours": "expected GPU-hours",
    "worst_gpu_hours": "GPU-hours at most",
}
_DESCRIBED = {
    column.name: (column.unit, column.description) for column in (*LEDGER_COLUMNS, *ATTEMPT_COLUMNS, *EXTRA_COLUMNS)
}
"""Unit and meaning of each column that the schema, or the reader of the study, defines."""
_UNIT_IN_LABEL = frozenset(
    {"world_size", "tokens_per_s", "tokens_per_s_per_gpu", "predicted_tokens_per_s_per_gpu", "expected_gpu_hours"}
    | {"worst_gpu_hours"}
)
_UNIT_ENDINGS = frozenset({"s", "bytes", "w", "c", "mhz"})
_FRACTIONS = frozenset({"mfu_palm", "mfu_causal", "mfu_playbook", "hfu", "published_mfu"})
_FILTERS = (
    *(COHORT, "verdict", "fit", "rule", "outcome", "phase", "model", "world_size", "tp", "pp", "dp", "cp", "ep"),
    *(
        "micro_batch_size",
        "num_microbatches",
        "zero_stage",
        "recompute",
        "recompute_every",
        "activation_offload",
        "global_batch_size",
    ),
    *("seq_len", "network_regime", "engine_version", "pp_schedule", "virtual_stages", "pp_split", "cp_kind"),
    *("pp_stages", "pad_vocab_to", "gradient_accumulation_fusion", "documents", "document_balance", *UPDATE_FIELDS),
    *("sequence_parallel", "precision", "attention", "recurrence", "compile", "cuda_graph", "dp_replicate"),
    *("sweep", "grid"),
    *("tokens_per_s_per_gpu", "mfu_palm", "step_time_s", "peak_allocated_bytes", "peak_reserved_bytes"),
    *("predicted_tokens_per_s_per_gpu", "predicted_peak_bytes"),
)
"""Filters in their order on the page, shown if a column has several values. Readers can add any other column."""
_TABLE = (
    *("model", "world_size", "layout", "outcome", "tokens_per_s_per_gpu", "mfu_palm", "step_time_s"),
    *("peak_allocated_bytes", "peak_reserved_bytes", "sweep"),
)
_PLAN_TABLE = (
    *("model", "world_size", "layout", "verdict", "fit", "predicted_tokens_per_s_per_gpu", "predicted_step_time_s"),
    *("predicted_peak_bytes", "limit_bytes", "expected_gpu_hours", "rule", "detail"),
)


def table(cohorts: Sequence[Cohort]) -> pd.DataFrame:
    """Every row of the cohorts in order, with its cohort's title in the column `COHORT`."""
    if not cohorts:
        return pd.DataFrame()
    frames = [cohort.frame.assign(**{COHORT: cohort.title}) for cohort in cohorts]
    return frames[0] if len(frames) == 1 else pd.concat(frames, ignore_index=True)


def encode(frame: pd.DataFrame, cohorts: Sequence[Cohort]) -> dict[str, Any]:
    """Data of ``frame`` (see `table`) for the page, ready for `json.dumps`."""
    columns = [column for name in frame.columns if name not in NOT_SHOWN and (column := _column(frame, str(name)))]
    order = {name: place for place, name in enumerate((*_LABELS, *_DESCRIBED))}
    columns.sort(key=lambda column: order.get(column["name"], len(order)))
    if "backend" in frame and device_noun(frame) != "GPUs":
        for column in columns:
            column["label"] = column["label"].replace("GPUs", device_noun(frame)).replace("/GPU", "/process")
    names = [column["name"] for column in columns]
    ids = "\n".join(frame["attempt_id"]) if len(frame) else ""
    return {
        "rows": len(frame),
        "fingerprint": hashlib.sha256(ids.encode("utf-8", "replace")).hexdigest()[:8],
        "cohorts": [{"title": c.title, "meaning": c.meaning, "stamp": c.stamp, "rows": len(c.frame)} for c in cohorts],
        "columns": columns,
        "filters": [name for name in _FILTERS if name in names],
        "table": [name for name in (_PLAN_TABLE if "verdict" in names else _TABLE) if name in names],
        "outcomes": OUTCOME_NAMES,
        "engine": {"name": ENGINE, "version": ENGINE_VERSION},
    }


def _column(frame: pd.DataFrame, name: str) -> dict[str, Any] | None:
    """One column; None if no row has a value in it."""
    values = frame[name]
    unit, description = _DESCRIBED.get(name, ("", ""))
    unit = "fraction" if name in _FRACTIONS else "" if name in _UNIT_IN_LABEL else unit
    about = {"name": name, "label": _LABELS.get(name) or _label(name, unit), "unit": unit, "description": description}
    if isinstance(values.dtype, pd.DatetimeTZDtype):
        seconds = (values - pd.Timestamp(0, tz="UTC")).dt.total_seconds()
        packed, kind = _numbers(seconds.to_numpy(dtype=float, na_value=np.nan), digits=None), "time"
    elif pd.api.types.is_bool_dtype(values):
        packed, kind = _codes(values.map({True: "yes", False: "no"}, na_action="ignore")), "text"
    elif pd.api.types.is_numeric_dtype(values):
        array = values.to_numpy(dtype=float, na_value=np.nan)
        packed, kind = _numbers(array, None if pd.api.types.is_integer_dtype(values) else _DIGITS), "number"
    else:
        if not isinstance(values.dtype, pd.StringDtype):  # flags with gaps, lists, or anything in a foreign table
            if name not in _LISTS and any(isinstance(value, list | np.ndarray) for value in values):
                return None
            values = values.map(_text, na_action="ignore")
        packed, kind = _codes(values), "text"
    return about | {"kind": kind} | packed if packed else None


def _label(name: str, unit: str) -> str:
    """Name of a column in words. It has no trailing unit if the page shows the unit next to it."""
    words = name.split("_")
    return " ".join(words[:-1] if unit and words[-1] in _UNIT_ENDINGS else words)


def _numbers(array: np.ndarray, digits: int | None) -> dict[str, Any] | None:
    """Numbers as ``levels`` and ``codes`` (-1: unknown) if few are distinct, otherwise as ``steps`` or as ``values``
    with nulls."""
    array = np.where(np.isfinite(array), array, np.nan)
    whole = array == np.floor(array)
    if digits is not None:  # whole numbers (e.g. bytes stored as floats because of nulls) stay exact
        with np.errstate(divide="ignore", invalid="ignore"):
            scale = 10.0 ** (digits - 1 - np.floor(np.log10(np.abs(array))))
            short = np.round(array * scale) / scale
        array = np.where(whole | ~np.isfinite(short), array, short)
    codes, levels = pd.factorize(array, sort=True)
    if not len(levels):
        return None
    if len(levels) <= _LEVELS:
        return {"levels": _plain(levels), **_packed(codes)}
    plain = _plain(array)
    return {"steps": steps} if (steps := pack_texts.steps(plain)) is not None else {"values": plain}


def _plain(array: np.ndarray) -> list[float | int | None]:
    """The numbers in their shortest JSON form; NaN becomes null."""
    known = ~np.isnan(array)
    exact = np.where(known, array, 0.0)
    if (exact == np.floor(exact)).all() and (np.abs(exact) < 2**53).all():
        exact = exact.astype(np.int64)
    numbers: list[float | int | None] = exact.tolist()
    for place in np.flatnonzero(~known):
        numbers[place] = None
    return numbers


def _codes(values: pd.Series) -> dict[str, Any] | None:
    codes, distinct = pd.factorize(values)
    if not len(distinct):
        return None
    levels = [str(level) for level in distinct]
    packed = pack_texts.pack(levels) if len(levels) > _LEVELS else None
    return {**({"levels": levels} if packed is None else {"texts": packed}), **_packed(codes)}


def _packed(codes: np.ndarray) -> dict[str, Any]:
    """Codes of a column: a single ``code`` if all are equal, differences if codes count up, otherwise a list."""
    if (codes == codes[0]).all():
        return {"code": int(codes[0])}
    steps = pack_texts.steps(codes)
    return {"codes": codes.tolist()} if steps is None else {"codeSteps": steps}


def _text(value: Any) -> str:
    if isinstance(value, bool | np.bool_):
        return "yes" if value else "no"
    if isinstance(value, list | tuple | np.ndarray):
        return ", ".join(str(part) for part in value)
    return str(value)

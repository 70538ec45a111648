"""The section of docs/accuracy.md on runs that other teams published: errors by source, nothing fitted.

The table of rows does not ship. It has the columns of ``predict``, and ``source``, ``step_time_s`` and ``mem_gib``
(allocated memory; a ``mem_kind`` that names anything else is not compared).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pandas as pd

from docs.tools.accuracy_scores import GIB, percent
from results.statistics.errors_of_predictions import coverage, relative_errors, summary
from sweep.predicting.predict_table import numeric, predict_frame, read_table

NAMES: Mapping[str, str] = {
    "SimuMax": "SimuMax, Megatron-LM on 8 B200",
    "MLPerf Training v5.0": "MLPerf Training 5.0, NeMo on H100 and GB200",
    "MLPerf Training v5.1": "MLPerf Training 5.1, NeMo",
    "Megatron-LM": "Megatron-LM, golden values of its tests",
    "Megatron-Bridge": "Megatron-Bridge, verification cards",
    "NeMo AutoModel": "NeMo AutoModel, performance summary",
    "AMD Primus": "AMD Primus on MI300X, MI325X and MI355X",
}
"""Sources in words, by how the column ``source`` starts."""
HEAD = """| published by | rows | predicted | step time | median | bias | inside 90 % | fits | memory |
|---|---:|---:|---:|---:|---:|---:|---:|---:|"""


def section(path: Path) -> str:
    """Errors by source, with dense models, context parallelism and experts apart."""
    rows = read_table(path).reset_index(drop=True)
    told = rows.drop(columns=[name for name in ("status", "step_time_s", "tok_s_gpu", "mem_gib") if name in rows])
    predicted = predict_frame(told, None).predictions
    rows = rows.join(predicted.add_prefix("of_"))
    groups = _group(rows)
    lines = [_line("all rows, nothing fitted", rows)]
    lines += [_line(name, rows[groups == name]) for name in sorted(set(groups))]
    return "\n".join([HEAD, *lines])


def _group(rows: pd.DataFrame) -> pd.Series[str]:
    source = rows["source"].map(lambda text: next((name for key, name in NAMES.items() if text.startswith(key)), text))
    experts, context = numeric(rows["num_experts"]) > 0, numeric(rows["cp"]) > 1
    kind = pd.Series("dense", index=rows.index).mask(context, "dense, cp").mask(experts, "experts")
    grouped: pd.Series[str] = source + ": " + kind
    return grouped


def _is_bound(rows: pd.DataFrame) -> pd.Series[bool]:
    """Rows whose memory is only said to be below a number."""
    bound: pd.Series[bool] = rows["mem_kind"].astype(str).str.startswith("<")
    return bound


def _line(name: str, rows: pd.DataFrame) -> str:
    known = rows[rows["of_step_time_s"].notna()]
    measured = numeric(known["step_time_s"])
    times = summary(relative_errors(known["of_step_time_s"].astype(float), measured))
    inside = coverage(known["of_step_time_low_s"], known["of_step_time_high_s"], measured)
    of_peak = known[known["mem_kind"].astype(str).str.match(".*alloc") & ~_is_bound(known)]
    peaks = of_peak["of_predicted_peak_allocated_bytes"].astype(float)
    memory = summary(relative_errors(peaks, numeric(of_peak["mem_gib"]) * GIB))
    cells = (
        [percent(times.mape), percent(times.median_size), f"{100 * times.bias:+.1f} %", percent(inside)]
        if times
        else ["–"] * 4
    )
    fits = (known["of_fits"] == 1).mean() if len(known) else None
    last = [percent(fits) if fits is not None else "–", percent(memory.mape) if memory else "–"]
    return f"| {name} | {len(rows)} | {len(known)} | {' | '.join([*cells, *last])} |"

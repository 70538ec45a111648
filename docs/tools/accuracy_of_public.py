"""The section of docs/accuracy.md on runs that other teams published: errors by source, also from ten of its rows.

The table of rows does not ship. It has the columns of ``predict``, and ``source``, ``step_time_s`` and ``mem_gib``
(allocated memory; a ``mem_kind`` that names anything else is not compared).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
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


SAID: tuple[tuple[str, str, Mapping[str, str]], ...] = (
    ("NeMo AutoModel", "gpt-oss-20b", {"recompute": "none"}),
    ("NeMo AutoModel", "gpt-oss-120b", {"recompute": "none", "ep": "64"}),
    ("Megatron-Bridge", "gpt-oss-120b in bf16", {"dispatcher": "alltoall"}),
    ("Megatron-LM", "gpt3_7b", {"gated_mlp": "false", "gradient_accumulation_fusion": "false"}),
)
"""What sources say of rows whose cells do not: (source, model, cells). AutoModel's examples/benchmark/configs
(``activation_checkpointing``, ``ep_size``); ``moe_token_dispatcher_type`` of Megatron-Bridge's GPTOSSProvider, which
its recipes in 16 bits keep; arguments in model_config.yaml of Megatron-LM's tests (no ``--swiglu``)."""
TEN, DRAWS, FEWEST = 10, 5, 16
"""Rows of a source that are drawn to predict its others, draws, and the fewest rows of a source with which this is
done."""


def section(path: Path) -> str:
    """Errors by source, with dense models, context parallelism and experts apart; of sources with `FEWEST` rows also
    from ten of them."""
    columns = read_table(path).reset_index(drop=True)
    rows = as_published(columns)
    columns, rows = (one.join(predict_frame(told(one), None).predictions.add_prefix("of_")) for one in (columns, rows))
    groups, experts = _group(rows), numeric(rows["num_experts"]) > 0
    lines = [
        _line("all rows, nothing fitted", rows),
        _line("dense models, nothing fitted", rows[~experts]),
        _line("mixtures of experts, nothing fitted", rows[experts]),
        _line("mixtures of experts, from their columns alone", columns[experts]),
    ]
    for source, own in rows.groupby(_source(rows), sort=True):
        kinds = groups[own.index]
        lines += [_line(name, own[kinds == name]) for name in sorted(set(kinds))]
        if len(own) >= FEWEST:
            of_ten = from_ten(own)
            lines.append(_line(f"{source}: from ten of its rows, {DRAWS} draws", of_ten))
            mixed = of_ten[numeric(of_ten["num_experts"]) > 0]
            if 0 < len(mixed) < len(of_ten):
                lines.append(_line(f"{source}: of these, experts", mixed))
    return "\n".join([HEAD, *lines])


def as_published(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows with what their sources say and their columns do not: ``routing``, ``sequence_parallel`` and
    ``deterministic``, from the column ``note``, and `SAID`."""
    words = ("natural", "no sequence parallel", "deterministic mode")
    natural, whole, ordered = (rows["note"].astype(str).str.contains(word) for word in words)
    rows = rows.assign(routing=np.where(natural, "learned", "balanced"), dispatcher="")
    rows = rows.assign(sequence_parallel=np.where(whole, "false", ""), deterministic=np.where(ordered, "true", ""))
    rows = rows.assign(gated_mlp="", gradient_accumulation_fusion="")
    for source, model, cells in SAID:
        name, _, precision = model.partition(" in ")
        found = rows["source"].astype(str).str.startswith(source) & (rows["model"] == name)
        found &= rows["precision"].str.startswith(precision)
        assert found.any(), f"no row of {source}, {model}"
        for column, value in cells.items():
            rows[column] = rows[column].mask(found, value)
    return rows


def told(rows: pd.DataFrame) -> pd.DataFrame:
    """What a row says before it runs."""
    measured = ("status", "step_time_s", "tok_s_gpu", "mem_gib")
    return rows.drop(columns=[name for name in rows if name in measured or str(name).startswith("of_")])


def from_ten(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows of a source predicted from ten others, for each draw. ``given``: indices of these ten."""
    parts = []
    for seed in range(DRAWS):
        given = rows.sample(TEN, random_state=seed)
        asked = rows.drop(given.index).reset_index(drop=True)
        known = given.reset_index(drop=True)
        known = known.drop(columns=[name for name in known if str(name).startswith("of_")])
        found = predict_frame(told(asked), known).predictions
        asked = asked.drop(columns=[name for name in asked if str(name).startswith("of_")])
        asked["given"] = [given.index.tolist()] * len(asked)
        parts.append(asked.join(found.add_prefix("of_")))
    return pd.concat(parts, ignore_index=True)


def _source(rows: pd.DataFrame) -> pd.Series[str]:
    named: pd.Series[str] = rows["source"].map(
        lambda text: next((name for key, name in NAMES.items() if text.startswith(key)), text)
    )
    return named


def _group(rows: pd.DataFrame) -> pd.Series[str]:
    experts, context = numeric(rows["num_experts"]) > 0, numeric(rows["cp"]) > 1
    kind = pd.Series("dense", index=rows.index).mask(context, "dense, cp").mask(experts, "experts")
    grouped: pd.Series[str] = _source(rows) + ": " + kind
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

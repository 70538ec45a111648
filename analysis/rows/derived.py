"""Parameter counts, FLOPs and MFU by closed form, for rows of other tools that lack these columns.

The formulas are those of our own runs. A row without its full model shape gets none of these columns.
"""

from __future__ import annotations

from typing import Any

import pandas as pd

from analysis.rows.labels import records
from results.text.numbers import plural
from workloads.costs.shape.flops import flops_per_token
from workloads.costs.shape.params import matmul_params, num_params
from workloads.spec.errors import InvalidExperiment
from workloads.spec.model_spec import ModelSpec, checked_model

SHAPE = (
    *("num_layers", "hidden_size", "num_heads", "num_kv_heads", "head_dim", "ffn_hidden_size", "vocab_size"),
    "tie_embeddings",
)
_UTILIZATION = {"palm": "mfu_palm", "causal": "mfu_causal", "playbook": "mfu_playbook"}


def add_formulas(attempts: pd.DataFrame) -> pd.DataFrame:
    """Copy of the frame with parameter counts, FLOPs per token and MFU by every convention.

    Without recomputation the hardware computes exactly the FLOPs that `causal` counts, so HFU is set only where
    ``recompute`` is none.
    """
    frame = attempts.copy()
    keys = frame[[*SHAPE, "seq_len", "pp"]].copy()
    keys["pp"] = keys["pp"].clip(upper=2)  # the formulas only distinguish one stage from several
    known = keys.dropna().drop_duplicates()
    known = known.assign(**_columns(known))
    columns = [name for name in known.columns if name not in keys.columns]
    filled = keys.merge(known, on=list(keys.columns), how="left").set_index(frame.index)
    frame[columns] = filled[columns]
    share = frame["tokens_per_s_per_gpu"] / frame["peak_flops"]
    for convention, name in _UTILIZATION.items():
        frame[name] = share * frame[f"flops_per_token_{convention}"]
    plain = frame["recompute"] == "none"
    frame["flops_per_token_hardware"] = frame["flops_per_token_causal"].where(plain)
    frame["hfu"] = frame["mfu_causal"].where(plain)
    return frame


def model_of(row: dict[str, Any]) -> ModelSpec:
    """Model shape of a row that has all of `SHAPE`."""
    fields = {name: int(row[name]) for name in SHAPE} | {"tie_embeddings": bool(row["tie_embeddings"])}
    name = str(row.get("model", "model"))
    return checked_model(f"model {name}", {"name": name, **fields})


def without_odd_shapes(attempts: pd.DataFrame) -> tuple[pd.DataFrame, list[str]]:
    """The rows whose model shape can exist, or is not known, and one line for each other shape."""
    shapes = attempts[[*SHAPE]].dropna().drop_duplicates()
    odd, problems = pd.Series(False, index=attempts.index), []
    for place, row in zip(shapes.index, records(shapes), strict=True):
        try:
            model_of({**row, "model": attempts["model"].loc[place]})
        except InvalidExperiment as error:
            same = attempts[[*SHAPE]].eq(shapes.loc[place]).all(axis=1)
            problems.append(f"{plural(int(same.sum()), 'row')} left out: {error}")
            odd |= same
    return (attempts[~odd].reset_index(drop=True) if problems else attempts), problems


def _columns(known: pd.DataFrame) -> dict[str, list[float]]:
    rows = records(known)
    models = [model_of(row) for row in rows]
    columns: dict[str, list[float]] = {
        "num_params": [num_params(model) for model in models],
        "num_matmul_params": [matmul_params(model) for model in models],
    }
    for convention in ("palm", "causal", "playbook"):
        columns[f"flops_per_token_{convention}"] = [
            flops_per_token(model, int(row["seq_len"]), convention, pp=int(row["pp"]))
            for model, row in zip(models, rows, strict=True)
        ]
    return columns

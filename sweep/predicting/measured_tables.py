"""Measured rows in the columns that ``predict`` takes: the shipped rows, and two tables that do not ship."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from results.errors import UltrasweepError
from results.tables.load import load
from results.tables.reference import check_header
from workloads.predict.points import CAPTURED
from workloads.predict.table import COLUMNS, MEASURED
from workloads.spec.experiment import ENGINE
from workloads.spec.updates.words import update_words

RECORDED = Path(__file__).parents[2] / "results" / "recorded"
GIB = 2**30


def recorded_table(folder: Path = RECORDED) -> pd.DataFrame:
    """Shipped rows of real runs of this project's engine that finished or ran out of memory."""
    rows = load(folder).table.to_pandas()
    return table_of_attempts(rows[rows["engine"] == ENGINE])


def table_of_attempts(attempts: pd.DataFrame) -> pd.DataFrame:
    """Rows of attempts (`results.tables.schema.ATTEMPTS`) in the columns of ``predict``.

    Only measured rows that columns describe are kept, see `measured_attempts`.
    """
    return columns_of_attempts(measured_attempts(attempts))


def measured_attempts(attempts: pd.DataFrame) -> pd.DataFrame:
    """Measured attempts that finished or ran out of memory, in the same order, without models with routed experts and
    without what no column says (`has_more_than_columns`), whose times would be taken for those of plain steps."""
    rows = attempts[(attempts["method"] == "measured") & attempts["outcome"].isin(["ok", "oom"])]
    return rows[~has_experts(rows) & ~has_more_than_columns(rows)].reset_index(drop=True)


def is_attempts(frame: pd.DataFrame) -> bool:
    """Whether a table has the columns of attempts."""
    return {"config_json", "engine", "engine_version", "zero_stage", "world_size", "device_name"} <= set(frame.columns)


def has_experts(attempts: pd.DataFrame) -> pd.Series[bool]:
    """True for rows whose model routes tokens to experts."""
    return attempts["config_json"].map(lambda text: bool(_part_of_model(text, "moe"))).astype(bool)


def has_latents(attempts: pd.DataFrame) -> pd.Series[bool]:
    """True for rows whose model has latent attention, for which ``predict`` has no columns."""
    return attempts["config_json"].map(lambda text: bool(_part_of_model(text, "mla"))).astype(bool)


def has_more_than_columns(attempts: pd.DataFrame) -> pd.Series[bool]:
    """True for rows with something that changes a step's work and that ``predict`` has no column for: another optimizer
    than AdamW, states, gradients or weights in other formats than usual, states or activations on the host, packed
    documents, layers of several kinds."""
    return attempts["config_json"].map(_says_more).astype(bool)


def _says_more(config_json: object) -> bool:
    try:
        config = json.loads(str(config_json))
    except ValueError:
        return False
    return bool(
        config.get("documents")
        or config.get("activation_offload", "none") != "none"
        or update_words(config)
        or _part_of_model(config_json, "layers")
    )


def _part_of_model(config_json: object, name: str) -> dict[str, Any]:
    """A part of a stored model; empty if the model has none or cannot be read."""
    try:
        return json.loads(str(config_json))["model"].get(name) or {}
    except (ValueError, KeyError, TypeError, AttributeError):
        return {}


_OF_EXPERTS = {
    "num_experts": "num_experts",
    "experts_per_token": "experts_per_token",
    "expert_ffn": "expert_hidden_size",
    "shared_experts": "num_shared_experts",
    "dense_layers": "num_dense_layers",
}
"""Columns of ``predict`` about experts and the fields of a stored model."""


def columns_of_attempts(rows: pd.DataFrame) -> pd.DataFrame:
    """Every row of attempts in the columns of ``predict``; the code base is the engine that ran it."""
    experts = [_part_of_model(text, "moe") for text in rows["config_json"]]
    return pd.DataFrame(
        {
            "gpu": _devices(rows),
            "gpus": rows["world_size"],
            "layers": rows["num_layers"],
            "hidden": rows["hidden_size"],
            "heads": rows["num_heads"],
            "kv_heads": rows["num_kv_heads"],
            "ffn": rows["ffn_hidden_size"],
            "vocab": rows["vocab_size"],
            "tie_embeddings": rows["tie_embeddings"],
            "seq": rows["seq_len"],
            "gbs_seqs": rows["global_batch_size"],
            "mbs": rows["micro_batch_size"],
            "grad_accum": rows["num_microbatches"],
            "dp": rows["dp"],
            "tp": rows["tp"],
            "pp": rows["pp"],
            "vpp": rows["virtual_stages"],
            "cp": rows["cp"],
            "ep": rows["ep"],
            **{
                name: pd.Series([of_row.get(field) for of_row in experts], index=rows.index, dtype=object)
                for name, field in _OF_EXPERTS.items()
            },
            "sharding": "zero" + rows["zero_stage"].astype(str),
            "recompute": _recomputed(rows),
            "precision": rows["precision"],
            "sequence_parallel": _of_dense("sequence_parallel", rows, experts),
            "gradient_accumulation_fusion": _of_dense("gradient_accumulation_fusion", rows, experts),
            "codebase": rows["engine"].fillna(ENGINE),
            "code_version": "engine " + rows["engine_version"].astype(str) + _captured(rows),
            "host_launch_s": rows.get("host_launch_s", np.nan),  # since schema version 11
            "status": rows["outcome"],
            "step_time_s": rows["step_time_s"].where(rows["outcome"] == "ok"),
            "reserved_gib": (rows["peak_reserved_bytes"] / GIB).where(rows["outcome"] == "ok"),
        }
    )


def _captured(rows: pd.DataFrame) -> pd.Series[str] | str:
    """Suffix of the version of rows whose steps were replays of a captured one (since schema version 15)."""
    return (rows["cuda_graph_run"] == "step").map({True: CAPTURED, False: ""}) if "cuda_graph_run" in rows else ""


def _of_dense(name: str, rows: pd.DataFrame, experts: list[dict[str, Any]]) -> pd.Series[Any]:
    """A column of dense rows; of rows with experts a ratio to their dense neighbour has it."""
    if name not in rows:
        return pd.Series(None, index=rows.index, dtype=object)
    dense: pd.Series[Any] = rows[name].astype(object).where(np.array([not of_row for of_row in experts]), None)
    return dense


def _recomputed(rows: pd.DataFrame) -> pd.Series[str]:
    """Returns ``full``, or ``full.every2`` if every second layer recomputes."""
    if "recompute_every" not in rows:
        return rows["recompute"]
    every = pd.to_numeric(rows["recompute_every"], errors="coerce").fillna(1).astype(int)
    return rows["recompute"].where(every <= 1, rows["recompute"].astype(str) + ".every" + every.astype(str))


def _devices(rows: pd.DataFrame) -> pd.Series[Any]:
    """Device names. A run that ended before it recorded its device gets that of another run on the cluster, or the
    cluster's name."""
    recorded_names: pd.Series[Any] = rows["device_name"]
    if "cluster" not in rows:
        return recorded_names
    others = rows[recorded_names.notna()].drop_duplicates("cluster").set_index("cluster")["device_name"]
    return recorded_names.fillna(rows["cluster"].map(others)).fillna(rows["cluster"])


_GATHERS_KEPT = ((0, 13_848_000), (14_016_386, 14_016_421), (14_028_970, 14_028_979), (14_102_904, 14_102_959))
"""First and last job of the study's blocks that kept the gathered inputs of tensor-parallel products. The table has no
column for it: with `tp` 8 and more the same layouts reserve up to 2.7 times as much in these blocks as in the others,
and by as much as two values a token and hidden unit of each layer need. An all-reduce inside a node reaches 458 GB/s in
these blocks and 425 in nearly all others, so that their software differs."""


def study_table(path: Path) -> pd.DataFrame:
    """Rows of ``bench_final2_mfu2.csv``, with the study's ``mfu`` and ``says_oom``: whether the log of the run has an
    error about memory, which those of 30 runs have that are said to have ended well.

    Feed-forward sizes follow from the study's models by hidden size; the step time follows from tokens per second.
    Raises `UltrasweepError` if it is another table, or a value is no number.
    """
    with path.open("rb") as file:
        check_header(path, file.read(1 << 16))
    try:
        return _of_study(pd.read_csv(path, low_memory=False))
    except (ValueError, TypeError, KeyError) as error:  # pandas' errors are ValueErrors
        reason = " ".join(str(error).split())[:200]
        raise UltrasweepError(f"{path} cannot be read as the study's table: {reason}") from None


def _of_study(raw: pd.DataFrame) -> pd.DataFrame:
    sequences = raw["dp"] * raw["mbs"] * raw["batch_accum"]
    gpus = (8 * raw["nodes"]).astype(int)
    # Failed runs have no column of key and value heads; if they were planned with 8, their name says so.
    planned_heads = raw["num_heads"].where(~raw["name"].str.endswith("_gqa8"), 8)
    gathers_kept = pd.concat([raw["job_id"].between(*block) for block in _GATHERS_KEPT], axis=1).any(axis=1)
    versions = np.where(raw["after_pp_fix"], "after_pp_fix", "before_pp_fix")
    return pd.DataFrame(
        {
            "gpu": "H100",
            "cluster": "h100_efa",
            "gpus": gpus,
            "layers": raw["num_layers"],
            "hidden": raw["hidden_size"],
            "heads": raw["num_heads"],
            "kv_heads": raw["num_kv_heads"].fillna(planned_heads),
            "ffn": raw["hidden_size"].map({2048: 8192, 3072: 8192, 4096: 14336, 8192: 28672, 16384: 53248}),
            "vocab": raw["vocab_size"],
            "tie_embeddings": raw["hidden_size"] < 4096,
            "seq": raw["seq_len"],
            "gbs_seqs": sequences,
            "mbs": raw["mbs"],
            "grad_accum": raw["batch_accum"],
            "dp": raw["dp"],
            "tp": raw["tp"],
            "pp": raw["pp"],
            "sharding": "zero" + raw["zero_stage"].astype(str),
            "recompute": "none",
            "precision": "bf16",
            "codebase": "nanotron",
            "code_version": np.where(gathers_kept, np.char.add(versions, ", gathers kept"), versions),
            "allreduce_gb_s": raw["AllReduce (GB/s)"],
            "allreduce_intra_gb_s": raw["AR Intra-node (GB/s)"],
            "status": raw["status"].map({"Success": "ok", "OOM": "oom", "Other": "other"}),
            "step_time_s": sequences * raw["seq_len"] / (raw["tok/s/gpu"] * gpus),
            "reserved_gib": raw["Mem Res (GB)"],
            "mfu": raw["mfu"],
            "says_oom": raw["oom_error"].astype(bool),
        }
    )


def a100_table(path: Path) -> pd.DataFrame:
    """Measured A100 runs of several sources, already in nearly these columns; ``dataset`` names the source."""
    raw = pd.read_csv(path, low_memory=False)
    rows = raw.rename(columns={"mem_gib": "reserved_gib"})
    keep = [name for name in (*COLUMNS, *MEASURED) if name in rows]
    return rows[["dataset", *keep]]

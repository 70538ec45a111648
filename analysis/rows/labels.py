"""Names of rows and columns for people: workloads, layouts, devices, outcomes, memory categories."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pandas as pd
from numpy.typing import NDArray

from analysis.rows.frame_cache import cache_per_frame
from results.tables.schema import UNKNOWN_OUTCOME
from results.text.numbers import listed, name_documents, name_routing, plural
from workloads.costs.shape.schedule import INTERLEAVED
from workloads.spec.engine_versions import capture_word, fuses_by_default, fusion_word
from workloads.spec.updates.words import UPDATE_FIELDS, update_words

OUTCOME_NAMES = {
    "ok": "ok",
    "oom": "out of memory",
    "hang": "hang",
    "timeout": "timeout",
    "crash": "crash",
    "nccl_error": "NCCL error",
    "node_failure": "node failure",
    "preempted": "preempted",
    "diverged": "diverged",
    "cancelled": "cancelled",
    UNKNOWN_OUTCOME: "failed, cause not recorded",
}
MEMORY_CATEGORIES = {
    "memory_parameters_bytes": "parameters",
    "memory_gradients_bytes": "gradients",
    "memory_optimizer_bytes": "optimizer",
    "memory_activations_bytes": "activations and rest",
}
"""Columns of the peak by category with their names; they sum to the allocated peak."""

ROUTING = ("routing", "routing_imbalance", "capacity_factor")
"""Columns that say how tokens choose experts; rows with unbalanced routing form a workload of their own."""
DOCUMENTS = "documents"
"""Column of the documents that are packed into sequences; rows with other documents form workloads of their own."""
_LABELLED_BY = (
    *("dp", "dp_replicate", "dp_shard", "zero_stage", "tp", "cp", "pp", "ep", "etp", "pp_schedule", "virtual_stages"),
    *("cp_kind", "pp_split", "pp_stages", "attention"),
    *("micro_batch_size", "num_microbatches", "recompute", "recompute_every", "compile", "cuda_graph", "precision"),
    *(
        "gradient_accumulation_fusion",
        "document_balance",
        "activation_offload",
        "recurrence",
        "engine",
        "engine_version",
        *UPDATE_FIELDS,
    ),
)


_LABELLED_IF_SEVERAL = ("sequence_parallel", "pad_vocab_to")
"""Columns that a label names only in a frame whose rows differ in them: rows of other tools have one unusual value."""


def add_labels(attempts: pd.DataFrame) -> pd.DataFrame:
    """Copy of the frame with the text columns ``workload``, ``degrees``, ``batching``, ``layout`` and ``accumulation``,
    which is empty for gradients that are added in the usual way of the layout.

    A workload is the model, its sequence length if the model has several, its routing if that is not balanced, and
    its documents if sequences are packed with several.
    """
    frame = attempts.assign(workload=workloads(attempts, lengths_of=attempts))
    several = [name for name in _LABELLED_IF_SEVERAL if name in frame and frame[name].nunique(dropna=False) > 1]
    number, rows = _kinds(frame, [*_LABELLED_BY, *several])
    texts = pd.DataFrame({"degrees": [degrees(row) for row in rows], "batching": [batching(row) for row in rows]})
    texts["accumulation"] = [_fusion(row) for row in rows]
    texts["layout"] = texts["degrees"] + " · " + texts["batching"]
    return frame.assign(**{str(name): texts[name].array.take(number) for name in texts})


def with_usual_ways(rows: pd.DataFrame) -> pd.DataFrame:
    """Copy with ``usual`` in ``cuda_graph`` and ``gradient_accumulation_fusion`` of runs that did what their engine's
    version does unless it is asked not to, so that the same layout of another engine or version has the same values."""
    number, kinds = _kinds(rows, [*_LABELLED_BY])
    ways = pd.DataFrame([usual_ways(kind) for kind in kinds], columns=list(WAYS), dtype=object)
    return rows.assign(**{name: ways[name].array.take(number) for name in WAYS})


WAYS = ("cuda_graph", "gradient_accumulation_fusion")
"""Columns that say how an engine runs a layout, not which layout."""


def usual_ways(row: Mapping[str, Any]) -> dict[str, Any]:
    """`WAYS` of a row, ``usual`` where they are what its engine's version does by itself."""
    captured = capture_word(row.get("cuda_graph"), row.get("engine"), row.get("engine_version"))
    words = {"cuda_graph": captured, "gradient_accumulation_fusion": _fusion(row)}
    return {name: row.get(name) if words[name] else "usual" for name in WAYS}


def workloads(rows: pd.DataFrame, lengths_of: pd.DataFrame) -> list[str]:
    """Workload name of each row; the sequence length is included if ``lengths_of`` has several for that model."""
    several = lengths_of.groupby("model")["seq_len"].nunique()
    several_lengths = set(several[several > 1].index)
    packs = [DOCUMENTS] if DOCUMENTS in rows else []
    number, kinds = _kinds(rows, ["model", "seq_len", *ROUTING, *packs])
    names = []
    for kind in kinds:
        model, seq, *routed = (kind[name] for name in ("model", "seq_len", *ROUTING))
        name = f"{model}, seq {int(seq)}" if model in several_lengths and pd.notna(seq) else str(model)
        parts = [name, name_routing(*routed), name_documents(kind.get(DOCUMENTS))]
        names.append(", ".join(filter(None, parts)))
    return [names[place] for place in number.tolist()]


def _kinds(rows: pd.DataFrame, columns: list[str]) -> tuple[NDArray[np.int64], list[dict[str, Any]]]:
    """The number of each row's combination of values, and these combinations: many rows share one, and texts of it."""
    kinds = rows[columns]
    number: NDArray[np.int64] = np.asarray(kinds.groupby(columns, dropna=False, sort=False).ngroup(), dtype=np.int64)
    return number, records(kinds[~pd.Series(number, index=kinds.index).duplicated()])


def tell_collectives_apart(frame: pd.DataFrame) -> pd.DataFrame:
    """Labelled frame with a separate workload for each tp and each cp of a model, if there are several.

    Use for rows whose times are not comparable across tp or cp: ranking is always within a workload.
    """
    for axis in ("tp", "cp"):
        if frame[axis].nunique() > 1:
            suffix = f", {axis} " + frame[axis].astype("Int64").astype(str)
            frame = frame.assign(workload=frame["workload"] + suffix.where(frame[axis].notna(), ""))
    return frame


def records(frame: pd.DataFrame) -> list[dict[str, Any]]:
    """Rows as dicts by column name, with native Python values."""
    names = [str(name) for name in frame.columns]
    values = [
        (column.to_numpy() if isinstance(column.dtype, np.dtype) else column.to_numpy(dtype=object)).tolist()
        for _, column in frame.items()
    ]
    return [dict(zip(names, row, strict=True)) for row in zip(*values, strict=True)]


def degrees(row: Mapping[str, Any]) -> str:
    """Parallel degrees and ZeRO stage, e.g. ``dp4 z3 tp2 pp2``; degrees of 1 are omitted except dp."""
    dp_replicate, dp_shard, dp = _int(row, "dp_replicate"), _int(row, "dp_shard"), _int(row, "dp")
    hybrid = (dp_replicate or 1) > 1 and ((dp_shard or 1) > 1 or bool(_int(row, "zero_stage") and dp_shard))
    parts = [f"dp{dp_replicate}×{dp_shard}" if hybrid else f"dp{'?' if dp is None else dp}"]
    if (dp or 1) > 1 and _int(row, "zero_stage") is not None:
        parts[0] += f" z{_int(row, 'zero_stage')}"
    parts += [f"{axis}{value}" for axis in ("tp", "cp", "pp", "ep", "etp") if (value := _int(row, axis) or 1) > 1]
    if (_int(row, "cp") or 1) > 1 and row.get("cp_kind") in ("allgather", "ulysses"):
        parts.append(str(row["cp_kind"]))
    if (_int(row, "tp") or 1) > 1 and _flag(row, "sequence_parallel") is False:
        parts.append("no sequence parallelism")
    if (_int(row, "pp") or 1) > 1 and row.get("pp_split") in ("even", "ends_count"):
        parts.append("even split" if row["pp_split"] == "even" else "even split with ends")
    if isinstance(row.get("pp_stages"), str):
        parts.append(f"stages {row['pp_stages']}")
    schedule = row.get("pp_schedule")
    if (_int(row, "pp") or 1) > 1 and isinstance(schedule, str) and schedule not in ("1f1b", "none"):
        parts.append(schedule.replace("_", " "))
        if schedule in INTERLEAVED and _int(row, "virtual_stages") is not None:
            parts[-1] += f" v{_int(row, 'virtual_stages')}"
    return " ".join(parts)


def batching(row: Mapping[str, Any]) -> str:
    """Micro-batch size times number of micro-batches, and options other than the defaults: ``mbs 2×8, rc full``."""
    parts = [f"mbs {_or_unknown(row, 'micro_batch_size')}×{_or_unknown(row, 'num_microbatches')}"]
    if row.get("recompute") not in (None, "none") and isinstance(row.get("recompute"), str):
        every = _int(row, "recompute_every") or 1
        parts.append(f"rc {row['recompute']}" + (f" every {every}" if every > 1 else ""))
    if isinstance(row.get("activation_offload"), str) and row["activation_offload"] != "none":
        parts.append(f"activations offloaded {row['activation_offload']}")
    if isinstance(row.get("attention"), str) and row["attention"] != "auto":
        parts.append(f"{row['attention']} attention")
    if isinstance(row.get("recurrence"), str) and row["recurrence"] != "torch":
        parts.append(f"{row['recurrence']} recurrences")
    if isinstance(row.get("compile"), str) and row["compile"] != "none":
        parts.append("compiled")
    if word := capture_word(row.get("cuda_graph"), row.get("engine"), row.get("engine_version")):
        parts.append(word)
    if isinstance(row.get("precision"), str) and row["precision"] != "bf16":
        parts.append(row["precision"].replace("_", " "))
    if word := _fusion(row):
        parts.append(f"{word} accumulation")
    parts += update_words(row)
    if (padded := _int(row, "pad_vocab_to")) is not None:
        parts.append(f"vocabulary padded to {padded}")
    if row.get("document_balance") == "greedy":
        parts.append("greedy documents")
    return ", ".join(parts)


def _fusion(row: Mapping[str, Any]) -> str:
    """Word for how a row accumulated gradients, if it is not the usual way; empty where the row does not say it."""
    fusion = _flag(row, "gradient_accumulation_fusion")
    by_default = fuses_by_default(
        engine=row.get("engine"),
        version=row.get("engine_version"),
        zero_stage=_int(row, "zero_stage"),
        compile=row.get("compile"),
        num_microbatches=_int(row, "num_microbatches") or 1,
    )
    return fusion_word(fusion, by_default)


ORDERED_BY = ("workload", "world_size", "num_params", "seq_len", "tp", "cp")
"""Columns that `workload_order` and `in_group_order` read."""


@cache_per_frame
def workload_order(frame: pd.DataFrame) -> list[str]:
    """Workloads from the smallest model to the largest, then by sequence length, then by tp and cp where they
    distinguish workloads."""
    groups = frame.groupby("workload")
    first = {"params": groups["num_params"].max(), "seq": groups["seq_len"].max()}
    first |= {"tp": groups["tp"].min(), "cp": groups["cp"].min()}
    return list(pd.DataFrame(first).reset_index().sort_values([*first, "workload"])["workload"])


def study_label(frame: pd.DataFrame) -> pd.Series:
    """Group label of the study: its own model label, which several shapes may share; without it the workload."""
    return frame["study_label"].fillna(frame["workload"]) if "study_label" in frame else frame["workload"]


def under_study_labels(frame: pd.DataFrame) -> tuple[pd.DataFrame, str | None]:
    """Frame with the study's labels as workloads, and a line that names the labels used for several shapes (None if
    there are none)."""
    label = study_label(frame)
    other = label[label != frame["workload"]]
    if other.empty:
        return frame, None
    named = listed(sorted(other.unique(), key=lambda name: (len(name), name)))
    return frame.assign(workload=label), f"{named}: with {plural(len(other), 'point')} of other shapes"


def in_group_order(rows: pd.DataFrame) -> pd.DataFrame:
    """Rows sorted by workload (see `workload_order`), then by number of devices."""
    order = {workload: i for i, workload in enumerate(workload_order(rows))}
    keys = pd.DataFrame({"workload": rows["workload"].map(order), "world_size": rows["world_size"]})
    return rows.loc[keys.sort_values(["workload", "world_size"], kind="stable").index]


def world_sizes(frame: pd.DataFrame) -> list[int]:
    return sorted(int(value) for value in frame["world_size"].dropna().unique())


@cache_per_frame
def device_noun(frame: pd.DataFrame) -> str:
    """Plural noun for what a rank runs on: ``GPUs``, unless every row with a ``backend`` has ``cpu``."""
    backends = frame["backend"].dropna()
    return "CPU processes" if len(backends) and backends.eq("cpu").all() else "GPUs"


def group_name(workload: str, size: float, noun: str) -> str:
    """Name of a group for people: ``llama8b, 8 GPUs``."""
    return f"{workload}, {devices(size, noun)}"


def devices(size: float, noun: str) -> str:
    return plural(int(size), noun.removesuffix("es" if noun.endswith("sses") else "s"))


def rate_unit(frame: pd.DataFrame) -> str:
    return "tokens/s/process" if device_noun(frame) != "GPUs" else "tokens/s/GPU"


def _flag(row: Mapping[str, Any], name: str) -> bool | None:
    """A flag of Python or NumPy; None: the row does not say it."""
    return {"True": True, "False": False}.get(str(row.get(name)))


def _int(row: Mapping[str, Any], name: str) -> int | None:
    value = row.get(name)
    return None if value is None or pd.isna(value) else int(value)


def _or_unknown(row: Mapping[str, Any], name: str) -> str:
    value = _int(row, name)
    return "?" if value is None else str(value)

"""Reads the raw table of the Ultra-Scale Playbook's study as rows of ``attempts``.

The table is ``bench_final2_mfu2.csv`` of the Hugging Face dataset ``nanotron/ultrascale-playbook-data``: 4,104 runs of
nanotron on 1 to 64 nodes of eight H100. It is not shipped; the user gives the path of the file. The names of some of
its columns are misleading, so columns are not matched by name:

- ``gbs`` mixes sequences and tokens: the global batch is ``dp * mbs * batch_accum``.
- The authors' label covers several shapes: runs with 8 key-value heads or a vocabulary of 49,152 are other models.
  Failed runs have no column of key-value heads; if they were planned with 8, their name says so.
- ``Mem Alloc (GB)`` was read after the counters had been reset, so it is not a peak. Both memory columns are in GiB.
- ``status`` Other is a failure of unknown kind.
- With 8 or more nodes the network ran in one of two regimes (see `network_regime`).
- The communication of the pipeline was rewritten during the study: runs before and after have two engine versions.

Numbers that need a formula in addition to the table (parameters, FLOPs, MFU) are not added here.
"""

from __future__ import annotations

import csv
import hashlib
import io
import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.csv as pa_csv

from results.errors import InvalidResults
from results.tables.files import nullable
from results.tables.rows import conform
from results.tables.schema import ATTEMPTS, SCHEMA_VERSION, UNKNOWN_OUTCOME, Column
from results.text.numbers import GIB

ENGINE = "nanotron"
BEFORE, AFTER = "before the pipeline rewrite", "after the pipeline rewrite"
"""Versions of the engine; the table has no other information about them."""
MEASUREMENT_VERSION = 0
"""Version of the measurement; this program's versions start at 1. The study timed one step and read the memory of rank
0, so its rows are never pooled with those of this program."""
SWEEP = "ultrascale-playbook"
CLUSTER = "h100_efa"
DEVICES_PER_NODE = 8
SHA256 = "2b20c1ecbab9de9af9627c3ebb727f72bad447ceca1b5503e00abd74ac5e7958"
"""Checksum of the published file with which this reader was tested."""
PEAK_FLOPS = 989e12
DEVICE_NAME = "NVIDIA H100 80GB HBM3"
DEVICE_MEMORY_BYTES = 85_520_809_984
"""Memory of every device of the cluster (p5.48xlarge), as nvidia-smi reports it: 81,559 MiB. It is not in the table."""
REGIME_NODES = 8
REGIME_BYTES_PER_S = 120e9
"""Threshold between the two regimes at every number of nodes: the slow one ends at 102 GB/s, the fast one starts at
141."""

_VOCABULARY = 131_072
_OUTCOMES = {"Success": "ok", "OOM": "oom", "Other": UNKNOWN_OUTCOME}


@dataclass(frozen=True, slots=True)
class StudyModel:
    label: str
    """The authors' name of the model."""
    ffn_hidden_size: int
    """Width from the authors' scripts; it is not in the table. With it the table's parameter counts are reproduced."""


_SHAPES = {
    (16, 2048, 32): StudyModel("1.34B", 8192),
    (28, 3072, 32): StudyModel("3.57B", 8192),
    (32, 4096, 32): StudyModel("8.86B", 14336),
    (80, 8192, 64): StudyModel("80B", 28672),
    (126, 16384, 128): StudyModel("469B", 53248),
}
"""Shapes by number of layers, hidden size and number of heads."""

_INT, _FLOAT, _TEXT, _BOOL = pa.int64(), pa.float64(), pa.string(), pa.bool_()
_BANDWIDTHS = {
    "all_reduce_bytes_per_s": "AllReduce (GB/s)",
    "all_gather_bytes_per_s": "AllGather (GB/s)",
    "reduce_scatter_bytes_per_s": "ReduceScatter (GB/s)",
    "all_reduce_intra_bytes_per_s": "AR Intra-node (GB/s)",
    "all_gather_intra_bytes_per_s": "AG Intra-node (GB/s)",
    "reduce_scatter_intra_bytes_per_s": "RS Intra-node (GB/s)",
}
_READ: dict[str, pa.DataType] = {
    "job_id": _INT,
    "name": _TEXT,
    "nodes": _FLOAT,
    "seq_len": _INT,
    "mbs": _INT,
    "batch_accum": _FLOAT,
    "mTFLOPs": _FLOAT,
    "tok/s/gpu": _FLOAT,
    **dict.fromkeys(_BANDWIDTHS.values(), _FLOAT),
    "Mem Alloc (GB)": _FLOAT,
    "Mem Res (GB)": _FLOAT,
    "dp": _INT,
    "pp": _INT,
    "tp": _INT,
    "hidden_size": _INT,
    "num_layers": _INT,
    "num_heads": _INT,
    "num_kv_heads": _FLOAT,
    "vocab_size": _INT,
    "tie_word_embeddings": _BOOL,
    "zero_stage": _INT,
    "status": _TEXT,
    "oom_error": _BOOL,
    "Total Params Numeric": _FLOAT,
    "mfu": _FLOAT,
    "after_pp_fix": _BOOL,
}
"""The columns that are used, and their types in the file."""
_REQUIRED = (
    *("job_id", "name", "nodes", "seq_len", "mbs", "batch_accum", "dp", "pp", "tp", "hidden_size", "num_layers"),
    *("num_heads", "vocab_size", "zero_stage", "status", "after_pp_fix"),
)
"""Columns that are never empty in the published table; a row without one of them cannot be used."""
_COUNTS = ("nodes", "batch_accum", "mbs", "dp", "tp", "pp")
_REQUIRED_OF_SUCCESS = ("tok/s/gpu", "mfu", "Mem Res (GB)")

EXTRA_COLUMNS: tuple[Column, ...] = (
    Column("study_label", _TEXT, "Name of the model by its authors; several shapes may share a name"),
    Column("run_name", _TEXT, "Name of the run; where it contradicts the columns (2 rows), the columns are right"),
    Column("job_id", _INT, "Id of the Slurm job; later jobs have higher ids"),
    Column("source_row", _INT, "Number of the row in the file; the first below the header is 1"),
    Column("node_count", _INT, "Number of nodes, each with eight devices"),
    Column("published_mfu", _FLOAT, "Model FLOPs utilization as published, computed from counted_params"),
    Column("published_model_flops_per_s", _FLOAT, "Model FLOP/s of one device as published", "FLOP/s"),
    Column(
        "counted_params",
        _FLOAT,
        "Number of parameters as the run counted them, to three digits; tied ones count twice if pp > 1",
    ),
    Column("allocated_after_step_bytes", _INT, "Allocated memory of rank 0 after the step; not a peak", "B"),
    *(
        Column(
            name,
            _FLOAT,
            f"Bus bandwidth of {name.split('_bytes')[0].replace('_intra', '').replace('_', '-')} before training, "
            f"{'inside a node' if 'intra' in name else 'over all ranks'}, 1 GiB of fp32",
            "B/s",
        )
        for name in _BANDWIDTHS
    ),
    Column(
        "network_regime",
        _TEXT,
        "Regime of the network by the all-reduce over 8 or more nodes: fast or slow; null: unknown",
    ),
    Column("after_pp_fix", _BOOL, "True: ran after the authors had rewritten the communication of their pipeline"),
    Column("oom_in_log", _BOOL, "True: the log has an out-of-memory error; this includes 30 runs that succeeded"),
    Column("source_sha256", _TEXT, "Checksum of the file that the row was read from"),
)
STUDY = pa.schema([*ATTEMPTS, *(column.field() for column in EXTRA_COLUMNS)], metadata=ATTEMPTS.metadata)


@dataclass(frozen=True, slots=True)
class Reference:
    """The study's rows (schema `STUDY`), and one line for each unexpected property of the file."""

    table: pa.Table
    problems: tuple[str, ...]


def read(path: Path) -> Reference:
    """Returns the rows of the published table at ``path``, in its order.

    Raises `InvalidResults` if ``path`` is not that table: it cannot be read, columns are missing, or a cell is empty,
    of the wrong type or out of range.
    """
    path = Path(path)
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InvalidResults(f"{path} cannot be read: {error.strerror or error}") from None
    check_header(path, content)
    cells = _cells(path, content)
    digest = hashlib.sha256(content).hexdigest()
    records = [_record(path, number, row) for number, row in enumerate(cells.to_pylist(), start=1)]
    _number_attempts(records)
    names = list(dict.fromkeys(name for record in records for name in record))
    columns: dict[str, list[Any]] = {name: [record.get(name) for record in records] for name in names}
    columns["source_sha256"] = [digest] * len(records)
    types = {field.name: field.type for field in STUDY}
    table = conform(
        pa.table({name: pa.array(values, types[name]) for name, values in columns.items()}), nullable(STUDY)
    )
    problems = []
    if digest != SHA256:
        problems.append(
            f"{path} is not the file that this reader was checked with: sha256 {digest[:8]}…, published {SHA256[:8]}…"
        )
    return Reference(table, tuple(problems))


def network_regime(nodes: int, all_reduce_bytes_per_s: float | None) -> str | None:
    """``fast`` or ``slow`` by the all-reduce over all ranks; None below 8 nodes or if it was not measured.

    With 8 or more nodes the measured bandwidths form two groups with nothing between 102 and 141 GB/s, while the speed
    inside the nodes is the same. With fewer nodes there are no separate groups.
    """
    if nodes < REGIME_NODES or all_reduce_bytes_per_s is None:
        return None
    return "fast" if all_reduce_bytes_per_s >= REGIME_BYTES_PER_S else "slow"


def check_header(path: Path, content: bytes) -> None:
    """Raises `InvalidResults` if the first bytes of a file are not those of the study's table."""
    try:
        header = next(csv.reader(io.StringIO(content[: 1 << 16].decode("utf-8-sig", errors="strict"))), [])
    except (UnicodeDecodeError, csv.Error):
        header = []
    if missing := [name for name in _READ if name not in header]:
        named = ", ".join(missing[:4]) + (f" and {len(missing) - 4} more" if len(missing) > 4 else "")
        raise InvalidResults(
            f"{path} is not the study's table: it has no column {named}; expected is bench_final2_mfu2.csv of the "
            "Hugging Face dataset nanotron/ultrascale-playbook-data"
        )


def _cells(path: Path, content: bytes) -> pa.Table:
    options = pa_csv.ConvertOptions(include_columns=list(_READ), column_types=_READ, strings_can_be_null=True)
    try:
        table = pa_csv.read_csv(pa.BufferReader(content), convert_options=options)
    except (pa.ArrowException, KeyError) as error:
        raise InvalidResults(f"{path} cannot be read as the study's table: {str(error).splitlines()[0]}") from None
    if not table.num_rows:
        raise InvalidResults(f"{path} is the study's table, but has no rows")
    return table


def _record(path: Path, number: int, row: Mapping[str, Any]) -> dict[str, Any]:
    """One row of the file as columns of `STUDY`; absent values are null."""

    def wrong(what: str) -> InvalidResults:
        return InvalidResults(f"{path}, row {number}: {what}")

    if (outcome := _OUTCOMES.get(row["status"])) is None:
        raise wrong(f"status={row['status']!r}; it may be one of {', '.join(_OUTCOMES)}")
    required = (*_REQUIRED, *(_REQUIRED_OF_SUCCESS if outcome == "ok" else ()))
    if empty := [name for name in required if row[name] is None]:
        raise wrong(f"column {empty[0]} is empty")
    for name in _COUNTS:
        if row[name] < 1 or row[name] != int(row[name]):
            raise wrong(f"column {name} is {row[name]:g}, not a whole number of at least 1")
    nodes, accumulation, micro, dp, tp, pp = (int(row[name]) for name in _COUNTS)
    world = dp * tp * pp
    if world != nodes * DEVICES_PER_NODE:
        raise wrong(f"dp={dp} * tp={tp} * pp={pp} is not {DEVICES_PER_NODE} devices on each of {nodes} nodes")
    after = row["after_pp_fix"]
    record = {
        "attempt_id": f"{ENGINE}-{row['job_id']}-{number}",
        "schema_version": SCHEMA_VERSION,
        "measurement_version": MEASUREMENT_VERSION,
        "sweep": SWEEP,
        "method": "measured",
        "world_size": world,
        "dp": dp,
        # ZeRO shards the optimizer state over all data-parallel ranks.
        "dp_replicate": 1 if row["zero_stage"] else dp,
        "dp_shard": dp if row["zero_stage"] else 1,
        "tp": tp,
        "pp": pp,
        "micro_batch_size": micro,
        "num_microbatches": accumulation,
        "global_batch_size": dp * micro * accumulation,
        "seq_len": row["seq_len"],
        "tokens_per_step": dp * micro * accumulation * row["seq_len"],
        "zero_stage": row["zero_stage"],
        "pp_schedule": "1f1b" if pp > 1 else "none",
        "engine": ENGINE,
        "engine_version": AFTER if after else BEFORE,
        "outcome": outcome,
        "evidence": None if outcome == "ok" else f"status {row['status']} in the published table",
        "cluster": CLUSTER,
        "scheduler_job": str(row["job_id"]),
        "run_name": row["name"],
        "job_id": row["job_id"],
        "source_row": number,
        "node_count": nodes,
        "after_pp_fix": after,
        "oom_in_log": row["oom_error"],
        **_IN_ALL_RUNS,
        **_model(row),
    }
    if outcome == "ok":
        record |= _measured(row, record["tokens_per_step"], world, nodes)
    return record | {"experiment_id": _experiment_id(record)}


_IN_ALL_RUNS = {
    "cp": 1,
    "ep": 1,
    "recompute": "none",
    "recompute_every": 1,
    "activation_offload": "none",
    "etp": 1,
    "routing": "balanced",
    "routing_imbalance": 1.0,
    "cuda_graph": "none",
    "grad_reduce": "fp32",
    "optimizer": "adamw",
    "optimizer_states": "fp32",
    "master_weights": "fp32",
    "optimizer_offload": 0.0,
    "virtual_stages": 1,
    "sequence_parallel": True,
    "precision": "bf16",
    "device_name": DEVICE_NAME,
    "device_memory_bytes": DEVICE_MEMORY_BYTES,
    "peak_flops": PEAK_FLOPS,
    "peak_flops_source": "the study's own formula: H100 SXM, dense bf16",
}
"""Settings of the authors' scripts for every run, and the devices on which all of them ran."""


def _model(row: Mapping[str, Any]) -> dict[str, Any]:
    layers, hidden, heads = row["num_layers"], row["hidden_size"], row["num_heads"]
    shape = _SHAPES.get((layers, hidden, heads))
    label = shape.label if shape else f"{layers} layers of {hidden}"
    kv_heads = None if row["num_kv_heads"] is None else int(row["num_kv_heads"])
    if kv_heads is None and row["name"].endswith("_gqa8"):
        kv_heads = 8
    other = []
    if kv_heads not in (None, heads):
        other.append(f"{kv_heads} kv heads")
    if row["vocab_size"] != _VOCABULARY:
        other.append(f"vocabulary {row['vocab_size']:,}")
    return {
        "study_label": label,
        "model": f"{label} ({'; '.join(other)})" if other else label,
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": hidden // heads,
        "ffn_hidden_size": shape.ffn_hidden_size if shape else None,
        "vocab_size": row["vocab_size"],
        "tie_embeddings": row["tie_word_embeddings"],
    }


def _measured(row: Mapping[str, Any], tokens_per_step: int, world: int, nodes: int) -> dict[str, Any]:
    """Columns that only successful runs have."""

    def scaled(name: str, factor: float) -> float | None:
        return None if row[name] is None else row[name] * factor

    allocated, counted = row["Mem Alloc (GB)"], row["Total Params Numeric"]
    rate = row["tok/s/gpu"]
    bandwidths = {name: scaled(column, 1e9) for name, column in _BANDWIDTHS.items()}
    return {
        "warmup_steps": 2,
        "timed_steps": 1,
        "tokens_per_s_per_gpu": rate,
        "tokens_per_s": rate * world,
        "step_time_s": tokens_per_step / (rate * world) if rate > 0 else None,
        "time_source": "measured",
        "peak_reserved_bytes": round(row["Mem Res (GB)"] * GIB),
        "allocated_after_step_bytes": None if allocated is None else round(allocated * GIB),
        "published_mfu": row["mfu"] / 100,
        "published_model_flops_per_s": scaled("mTFLOPs", 1e12),
        "counted_params": None if counted is None else counted * 1e9,
        "network_regime": network_regime(nodes, bandwidths["all_reduce_bytes_per_s"]),
        **bandwidths,
    }


def _experiment_id(record: Mapping[str, Any]) -> str:
    """An id that is equal for two runs of the same configuration by the same version of the engine."""
    fields = ("num_layers", "hidden_size", "num_heads", "vocab_size", "seq_len", "engine_version")
    # Failed rows have no number of key-value heads; if it is known, it is part of the model's name.
    layout = ("model", "dp", "tp", "pp", "zero_stage", "micro_batch_size", "num_microbatches")
    digest = hashlib.sha256(json.dumps([record[name] for name in (*fields, *layout)]).encode()).hexdigest()[:8]
    slug = "".join(c if c.isalnum() or c == "." else "" for c in record["model"].lower())
    degrees = f"dp{record['dp']}z{record['zero_stage']}-tp{record['tp']}-pp{record['pp']}"
    return f"{ENGINE}-{slug}-{degrees}-mbs{record['micro_batch_size']}-gbs{record['global_batch_size']}-{digest}"


def _number_attempts(records: list[dict[str, Any]]) -> None:
    """Number the runs of one configuration in the order of their jobs."""
    seen: Counter[str] = Counter()
    for record in sorted(records, key=lambda record: (record["job_id"], record["source_row"])):
        seen[record["experiment_id"]] += 1
        record["attempt_number"] = seen[record["experiment_id"]]

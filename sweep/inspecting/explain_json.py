"""``explain --json``: everything known about one point as one JSON document; docs/json.md has its fields."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from results.tables.schema import ATTEMPT_COLUMNS, CONFIG_COLUMNS, LEDGER_COLUMNS
from results.text.json_document import json_document
from sweep.composing.conffiles import ConfFolders
from sweep.inspecting.explain import log_folder, memory_is_known, predicted_idle
from sweep.inspecting.explain_groups import group_fields
from sweep.inspecting.explain_host import host_fields
from sweep.inspecting.explain_memory import peak_events
from sweep.inspecting.lookup import Record
from sweep.inspecting.planned_cluster import find_cluster
from workloads.costs.memory.estimate import estimate_memory
from workloads.costs.memory.events import TENSORS
from workloads.costs.shape.flops import flops_per_token, hardware_flops_per_token
from workloads.costs.shape.params import active_params_with_embedding, num_params
from workloads.spec.cluster import ClusterSpec
from workloads.spec.experiment import to_dict

VERSION = 1
"""Version of the documents. It rises when a field changes its meaning or goes; new fields may come."""
_CONFIG = {column.name for column in CONFIG_COLUMNS}
_LEDGER = [column.name for column in LEDGER_COLUMNS if column.name not in _CONFIG]
_ATTEMPT = [column.name for column in ATTEMPT_COLUMNS if column.name not in _CONFIG]


def explanation_json(record: Record, results: Path, folders: ConfFolders) -> str:
    """Configuration, verdicts, predicted memory by stage and attempts as JSON text; what is unknown is null.

    ``results``: the folder searched. ``folders``: with files of the user's own clusters.
    """
    e = record.experiment
    cluster, why_not = find_cluster(record, folders)
    idle = predicted_idle(e, cluster)
    fields = {
        "experiment_id": record.id,
        "experiment": to_dict(e),
        "world_size": e.world_size,
        "num_microbatches": e.num_microbatches,
        "tokens_per_step": e.tokens_per_step,
        "attended_length": e.attended_length,
        "attention_imbalance": e.attention_imbalance,
        "parameters": num_params(e.model),
        "active_parameters": active_params_with_embedding(e.model),
        "flops_per_token_palm": flops_per_token(e.model, e.attended_length, "palm"),
        "flops_per_token_on_device": hardware_flops_per_token(e),
        "cluster": cluster.name if cluster is not None else None,
        "cluster_unknown": why_not,
        "groups": group_fields(e, cluster),
        "verdicts": [_columns(row, _LEDGER) for row in record.ledger],
        "memory": _memory(record, cluster) if memory_is_known(record) else None,
        "host": host_fields(e, cluster) if memory_is_known(record) else None,
        "idle_cluster": cluster.name if cluster is not None and idle is not None else None,
        "idle_shares": list(idle) if idle is not None else None,
        "attempts": [
            {**_columns(row, _ATTEMPT), "logs": str(folder) if (folder := log_folder(row, results)) else None}
            for row in record.attempts
        ],
    }
    return json_document("explain", VERSION, fields)


def memory_json(record: Record) -> str:
    """The allocations and frees of ``explain --memory`` as JSON text. Raises `UltrasweepError` as `peak_events`
    does."""
    found = peak_events(record)
    fields = {
        "experiment_id": record.id,
        "stage": found.stage,
        "action": found.action,
        "peak_bytes": found.events[found.peak].total,
        "peak_event": found.peak,
        "events": [
            {
                "unit": event.unit,
                "tensor": TENSORS[event.tensor].name,
                "made_in": TENSORS[event.tensor].made_in,
                "allocated_bytes": event.bytes,
                "total_bytes": event.total,
            }
            for event in found.events
        ],
    }
    return json_document("explain_memory", VERSION, fields)


def _columns(row: Mapping[str, Any], names: list[str]) -> dict[str, Any]:
    """A stored row without its configuration; a row of an older version lacks columns, which are null."""
    return {name: row.get(name) for name in names}


def _memory(record: Record, cluster: ClusterSpec | None) -> dict[str, Any]:
    """Bytes of one device: each stage at its peak, and the whole with the workspace of matrix products."""
    memory = estimate_memory(record.experiment)
    workspace_bytes = cluster.device.workspace_bytes if cluster is not None else None
    return {
        "stages": [{**dataclasses.asdict(one), "peak_bytes": one.peak_bytes} for one in memory.stages],
        "peak_stage": memory.peak_stage,
        "peak_bytes": memory.peak_bytes,
        "workspace_bytes": workspace_bytes,
        "limit_bytes": next((row["limit_bytes"] for row in record.ledger if row["limit_bytes"]), None),
    }

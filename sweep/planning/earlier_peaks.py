"""Predicted peaks of an earlier plan of the same sweep, which the same closed form would only compute again.

The closed form takes a third of the time of a large plan. Its result depends on the experiment and on code alone, so
the ledger names the code that computed its peaks (`memory_model`), and peaks of other code are not used.
"""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path

from sweep.composing.config import SweepConfig
from workloads.spec.cluster import ClusterSpec

MEMORY_MODEL = "memory_model"
"""Name of the digest in the ledger's file."""
_CODE = ("costs", "spec")
"""Folders of ``workloads`` on which a peak depends."""


def memory_model(cluster: ClusterSpec) -> str:
    """A digest of everything except the experiment on which a predicted peak depends."""
    return f"{_digest_of_code()} workspace_bytes={cluster.device.workspace_bytes}"


def earlier_peaks(config: SweepConfig) -> dict[str, int]:
    """Peaks in bytes without the workspace of matrix products, by experiment id; empty without a ledger of the same
    code."""
    path = config.sweep_dir / "ledger.parquet"
    if not path.is_file():
        return {}
    import pyarrow as pa

    from results.errors import InvalidResults
    from results.shared_filesystem.whole_files import NotAFile
    from results.tables import limits
    from results.tables.rows import conform
    from results.tables.schema import LEDGER

    columns = pa.schema([LEDGER.field(name) for name in ("experiment_id", "predicted_peak_bytes")])
    try:
        table = limits.read_parquet(path, columns=columns.names)
        if (table.schema.metadata or {}).get(MEMORY_MODEL.encode()) != memory_model(config.cluster).encode():
            return {}
        rows = conform(table, columns)
    except (OSError, NotAFile, InvalidResults, pa.ArrowException):
        return {}
    workspace = config.cluster.device.workspace_bytes
    peaks = zip(rows["experiment_id"].to_pylist(), rows["predicted_peak_bytes"].to_pylist(), strict=True)
    return {one: peak - workspace for one, peak in peaks if one is not None and peak is not None}


@cache
def _digest_of_code() -> str:
    root, digest = Path(__file__).resolve().parents[2] / "workloads", hashlib.sha256()
    for path in sorted(path for folder in _CODE for path in (root / folder).rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\n".encode() + path.read_bytes())
    return digest.hexdigest()

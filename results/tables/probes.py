"""The tables of ``python -m sweep probe``: one row per figure, one file per probe, in a folder for each cluster.

<results>/probes/<cluster>/<when>-<host>.parquet    files that `load_probe` reads; the newest one is used
         probes/runs/<cluster>-<when>/              the sweep that measured it: logs, and rows of its real steps

``docs/probe.md`` lists the figures.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa

from results.errors import InvalidResults
from results.tables import files
from results.tables.rows import conform, table_from_rows
from results.tables.schema import Column
from results.text.numbers import plural

PROBE_VERSION = 3
"""Version of the tests; figures of different versions are not compared."""
FOLDER = "probes"
_S, _I, _F = pa.string(), pa.int64(), pa.float64()

COLUMNS: tuple[Column, ...] = (
    Column("probe_id", _S, "Unique id of the probe, the name of its file", nullable=False),
    Column("probe_version", _I, "Version of the tests", nullable=False),
    Column("measured_at", pa.timestamp("us", tz="UTC"), "Time at which the probe ended", nullable=False),
    Column("cluster", _S, "Cluster description that the probe was run with", nullable=False),
    Column("backend", _S, "Kind of device: cuda or cpu"),
    Column(
        "kind",
        _S,
        "Kind of test: matmul, attention, copy, optimizer, layer, host, collective, interference or step",
        nullable=False,
    ),
    Column("name", _S, "Name of the test, see docs/probe.md", nullable=False),
    Column("value", _F, "Measured value, in the unit of the column unit", nullable=False),
    Column("unit", _S, "Unit of the value: s, FLOP/s, B/s or x (slowdown factor)", nullable=False),
    Column("spread", _F, "Standard deviation of the repeats divided by their mean"),
    Column("repeats", _I, "Number of timed calls or steps"),
    Column("rows", _I, "Rows (tokens) of a product [rows, inner] x [inner, columns]"),
    Column("columns", _I, "Columns of the product; for the optimizer the number of parameters"),
    Column("inner", _I, "Inner size of the product"),
    Column("bytes", _I, "Whole buffer of one rank in a collective, or bytes moved by a copy", "B"),
    Column("group_size", _I, "Number of ranks in the collective", "ranks"),
    Column("placement", _S, "Placement of the group: inside_node, between_nodes (one rank per node) or mixed"),
    Column("tp", _I, "Tensor-parallel degree to which the shapes belong"),
    Column("dp", _I, "Data-parallel degree"),
    Column("zero_stage", _I, "ZeRO stage 0 to 3"),
    Column("micro_batch_size", _I, "Sequences in the micro-batch", "sequences"),
    Column("seq_len", _I, "Tokens in one sequence", "tokens"),
    Column("recompute", _S, "Activation recomputation"),
    Column("num_layers", _I, "Number of layers in the measurement"),
    Column("world_size", _I, "Number of ranks of a real step", "ranks"),
    Column("beside", _S, "Operation that ran at the same time; only for kind interference"),
    Column("sm_clock_mhz", _F, "SM clock during the measurement", "MHz"),
    Column("power_w", _F, "Power of the device during the measurement", "W"),
    Column("temperature_c", _F, "Temperature of the device during the measurement", "degC"),
    Column("model", _S, "Model whose shapes were measured"),
    Column("hidden_size", _I, "Width of the residual stream of that model"),
    Column("precision", _S, "Compute precision"),
    Column("rank", _I, "Rank that made the measurement"),
    Column("host", _S, "Host of that rank"),
    Column("node", _S, "Node of that rank, by the scheduler's name"),
    Column("nodes", _I, "Number of nodes of the probe"),
    Column("devices_per_node", _I, "Number of ranks on each node"),
    Column("device_name", _S, "Name of the device as the driver reports it"),
    Column("device_id", _S, "UUID of the device"),
    Column("torch_version", _S, "Version of PyTorch"),
    Column("cuda_version", _S, "Version of PyTorch's CUDA runtime"),
    Column("nccl_version", _S, "Version of NCCL"),
    Column("driver_version", _S, "Version of the NVIDIA driver"),
    Column("engine_version", _S, "Version of the training engine"),
    Column("git_commit", _S, "Git commit of the code that ran"),
    Column("command", _S, "Command line that started the probe"),
)
PROBE = pa.schema(
    [column.field() for column in COLUMNS], metadata={"table": "probe", "probe_version": str(PROBE_VERSION)}
)


@dataclass(frozen=True, slots=True)
class Probe:
    """One probe of a cluster."""

    path: Path
    rows: tuple[Mapping[str, Any], ...]
    """All figures, with the columns of `COLUMNS`."""

    @property
    def measured_at(self) -> datetime:
        value: datetime = self.rows[0]["measured_at"]
        return value

    @property
    def device_name(self) -> str | None:
        value: str | None = self.rows[0]["device_name"]
        return value

    def select(self, kind: str, name: str | None = None, **fields: Any) -> list[Mapping[str, Any]]:
        """Returns the figures of a kind whose columns have these values."""
        wanted = {"kind": kind, **({"name": name} if name is not None else {}), **fields}
        return [row for row in self.rows if all(row[column] == value for column, value in wanted.items())]

    def describe(self) -> str:
        """One line that identifies the probe."""
        first = self.rows[0]
        age_h = (time.time() - self.measured_at.timestamp()) / 3600
        age = f"{age_h / 24:.0f} days old" if age_h >= 48 else f"{age_h:.0f} h old"
        devices = plural((first["nodes"] or 1) * (first["devices_per_node"] or 1), "device")
        return f"{self.path} ({plural(len(self.rows), 'figure')} of {devices} {first['device_name']}, {age})"


def probe_dir(results_dir: Path, cluster: str) -> Path:
    return Path(results_dir) / FOLDER / cluster


def write_probe(results_dir: Path, cluster: str, probe_id: str, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Stores the figures of one probe and returns the file's path. Raises `InvalidResults` with the column and the
    value."""
    path = probe_dir(results_dir, cluster) / f"{probe_id}.parquet"
    files.write_parquet(path, table_from_rows(rows, PROBE))
    return path


def read_probe(path: Path) -> Probe:
    """Reads one file. Raises `FileNotFoundError`, or `InvalidResults` if the file has no figures."""
    rows = conform(files.read_parquet(path), PROBE).to_pylist()
    if not rows or rows[0]["measured_at"] is None:
        raise InvalidResults(f"{path} holds no figure of a probe")
    return Probe(Path(path), tuple(rows))


def load_probe(cluster: str, results_dir: Path = Path("results")) -> Probe | None:
    """Returns the newest probe of a cluster, by its name; None if there is none that can be read and has today's
    version of the tests."""
    newest: Probe | None = None
    for path in sorted(probe_dir(results_dir, cluster).glob("*.parquet")):
        try:
            probe = read_probe(path)
        except (InvalidResults, OSError):
            continue
        if probe.rows[0]["probe_version"] != PROBE_VERSION:
            continue
        if newest is None or probe.measured_at > newest.measured_at:
            newest = probe
    return newest


def now() -> datetime:
    return datetime.now(UTC)

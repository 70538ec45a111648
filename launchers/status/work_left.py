"""Groups the points of a sweep by the nodes and devices that they need, and estimates the remaining device-hours.

The needs of a point are in the sweep's ledger. A point of an earlier plan, which the ledger lacks, is read once from
its own file.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow as pa

from launchers.state.history import AttemptRecord
from launchers.state.sweep_dir import SweepDir, read_point, split_name
from results.errors import InvalidResults
from results.shared_filesystem.whole_files import NotAFile
from results.tables import limits
from results.tables.rows import conform
from results.tables.schema import LEDGER

_NEEDED = pa.schema([LEDGER.field(name) for name in ("experiment_id", "world_size", "expected_gpu_hours")])
"""The only columns of the ledger that are needed here; it has more than fifty."""
RECENT = 20
"""Number of last attempts whose mean duration is the estimate for points without a prediction."""


@dataclass(frozen=True, slots=True)
class Need:
    """Devices and time that one point needs."""

    devices: int
    expected_s: float | None
    """Predicted seconds from start to end; None without a prediction."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ShapeStatus:
    """Points that need the same number of devices. Counts are of points."""

    devices: int
    nodes: int | None
    """None in a sweep that does not record the devices per node."""
    waiting: int
    running: int
    done: Mapping[str, int]
    """Finished points by outcome."""
    device_hours: float
    """Devices times hours of all recorded attempts."""
    device_hours_left: float | None
    """Device-hours of points that wait or run; None without a prediction and without an ended attempt."""

    @property
    def total(self) -> int:
        return self.waiting + self.running + sum(self.done.values())


@dataclass(slots=True)
class PointNeeds:
    """The needs of a sweep's points. Rereads the ledger only when it has changed."""

    sweep: SweepDir
    _ledger: dict[str, Need] = field(default_factory=dict)
    _ledger_stamp: tuple[int, int] | None = None
    _own: dict[str, Need | None] = field(default_factory=dict)
    _devices_per_node: int | None = None

    def __post_init__(self) -> None:
        try:
            given = self.sweep.settings().get("devices_per_node")
        except (OSError, ValueError, TypeError, KeyError):
            given = None
        self._devices_per_node = given if isinstance(given, int) and given > 0 else None

    def refresh(self) -> None:
        """Read the ledger if it has changed."""
        path = self.sweep.path / "ledger.parquet"
        try:
            about = path.stat()
            stamp = (about.st_mtime_ns, about.st_size)
            if stamp == self._ledger_stamp:
                return
            rows = conform(limits.read_parquet(path, columns=_NEEDED.names), _NEEDED).to_pylist()
        except (
            OSError,
            NotAFile,
            InvalidResults,
            pa.ArrowException,
        ):  # missing or unreadable: `need` reads the points' own files
            return
        self._ledger_stamp = stamp
        self._ledger = {row["experiment_id"]: _need(row) for row in rows if row["world_size"]}

    def need(self, key: str, folder: Path, name: str) -> Need | None:
        """The need of the point with this key; None when the point is neither in the ledger nor readable in the
        queue."""
        experiment_id, _, method = key.partition("+")
        need = self._ledger.get(experiment_id)
        if need is not None:
            if not method:
                return need
            device_s = need.expected_s * need.devices if need.expected_s is not None else None
            return Need(1, device_s)  # a rehearsal holds one device, whatever the layout
        if key not in self._own:
            try:
                self._own[key] = Need(1 if method else read_point(folder / name).experiment.world_size, None)
            except FileNotFoundError:  # the point is moving to another folder: the next read finds it
                return None
            except (OSError, InvalidResults):
                self._own[key] = None
        return self._own[key]

    def nodes(self, devices: int) -> int | None:
        """Number of nodes for so many devices; None where the sweep does not record the devices per node."""
        return -(-devices // self._devices_per_node) if self._devices_per_node is not None else None


def devices_of(record: AttemptRecord) -> int:
    """Number of devices that an attempt held."""
    return record.world_size if record.method == "measured" else 1


@dataclass(frozen=True, slots=True)
class Pace:
    """Duration of points, estimated from the recorded attempts."""

    ratio: float | None
    """Measured time over predicted time of the successful attempts; None before the first."""
    mean_s: float | None
    """Mean seconds of the last attempts; None before the first."""

    @classmethod
    def of(cls, attempts: Sequence[AttemptRecord], needs: Mapping[str, Need]) -> Pace:
        """The pace of recorded attempts. ``needs``: by experiment id."""
        predicted = measured = 0.0
        for record in attempts:
            need = needs.get(record.experiment_id)
            if record.outcome == "ok" and need is not None and need.expected_s:
                predicted += need.expected_s
                measured += record.duration_s
        recent = attempts[-RECENT:]
        return cls(
            ratio=measured / predicted if predicted > 0 else None,
            mean_s=statistics.fmean(record.duration_s for record in recent) if recent else None,
        )

    def time_s(self, need: Need | None) -> float | None:
        """Expected seconds of a point; None while there is no estimate."""
        if need is not None and need.expected_s is not None:
            return need.expected_s * (self.ratio if self.ratio is not None else 1.0)
        return self.mean_s


def by_shape(
    point_needs: PointNeeds,
    pace: Pace,
    needs: Mapping[Path, Mapping[str, Need | None]],
    attempts: Iterable[AttemptRecord],
) -> tuple[ShapeStatus, ...]:
    """The points by shape. ``needs``: by folder of the queue (``todo``, ``claimed`` or ``done``) and file name."""
    counts: defaultdict[int, Counter[str]] = defaultdict(Counter)
    outcomes: defaultdict[int, Counter[str]] = defaultdict(Counter)
    left_s: dict[int, float | None] = {}
    todo, done = point_needs.sweep.todo, point_needs.sweep.done
    for folder, entries in needs.items():
        has_ended, state = folder == done, "waiting" if folder == todo else "running"
        for name, need in entries.items():
            if need is None:
                continue
            if has_ended:
                outcomes[need.devices][split_name(name)[1]] += 1
                continue
            counts[need.devices][state] += 1
            each_s, so_far = pace.time_s(need), left_s.get(need.devices, 0.0)
            left_s[need.devices] = so_far + each_s if so_far is not None and each_s is not None else None
    spent_s: defaultdict[int, float] = defaultdict(float)
    for record in attempts:
        spent_s[devices_of(record)] += record.duration_s
    return tuple(
        ShapeStatus(
            devices=devices,
            nodes=point_needs.nodes(devices),
            waiting=counts[devices]["waiting"],
            running=counts[devices]["running"],
            done=dict(outcomes[devices]),
            device_hours=spent_s[devices] * devices / 3600,
            device_hours_left=None if (left := left_s.get(devices, 0.0)) is None else left * devices / 3600,
        )
        for devices in sorted({*counts, *outcomes})
    )


def _need(row: Mapping[str, Any]) -> Need:
    """The need in a row of the ledger, whose hours are summed over all devices."""
    devices, hours = row["world_size"], row["expected_gpu_hours"]
    return Need(devices, hours * 3600 / devices if hours is not None else None)

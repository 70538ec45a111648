"""The status of a sweep whose folder has only the tables left, such as the sweeps that come with the program."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from typing import Any

from launchers.state.history import AttemptRecord
from launchers.state.sweep_dir import SweepDir
from launchers.status.status import SweepStatus
from launchers.status.work_left import Need, Pace, PointNeeds, by_shape, devices_of
from results.tables.store import read_attempts

_SAME = {field.name for field in dataclasses.fields(AttemptRecord)} - {"started_at", "ended_at", "infrastructure"}
"""Fields of a record that are also columns of the table of attempts."""


def archived_status(sweep: SweepDir) -> SweepStatus:
    """Status from the rows alone: its points are those with a row, and none of them waits."""
    rows = read_attempts(sweep.path).to_pylist()
    records = tuple(sorted((_record(row) for row in rows), key=lambda record: record.ended_at))
    last = {(record.experiment_id, record.method): record for record in records}
    done = {
        f"{number:06d}-{record.experiment_id}@{record.outcome}.json": Need(devices_of(record), None)
        for number, record in enumerate(last.values())
    }
    return SweepStatus(
        name=sweep.name,
        total=len(last),
        todo=0,
        claimed=0,
        done=dict(Counter(record.outcome for record in last.values())),
        pilots=(),
        attempts=records,
        device_hours=sum(record.duration_s * devices_of(record) for record in records) / 3600,
        expected_left_s=None,
        shapes=by_shape(PointNeeds(sweep), Pace(None, None), {sweep.done: done}, records),
    )


def _record(row: Mapping[str, Any]) -> AttemptRecord:
    fields = {name: value for name, value in row.items() if name in _SAME}
    started, ended = row["started_at"], row["ended_at"]
    fields["nodes"] = row["nodes"] or ()
    return AttemptRecord(
        **fields,
        infrastructure=row["outcome"] == "node_failure",
        started_at=started.timestamp() if started is not None else 0.0,
        ended_at=(ended or started).timestamp() if ended or started else 0.0,
    )

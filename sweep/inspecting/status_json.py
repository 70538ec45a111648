"""``status --json``: the progress of sweeps as one JSON document; docs/json.md has its fields."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from launchers.pilot.rebuild import rebuild_lost_rows
from launchers.slurm.client import Job
from launchers.state import circuit_breaker, node_exclusions, submissions
from launchers.state.pilot_state import PilotState
from launchers.state.sweep_dir import SweepDir
from launchers.status.status import SweepStatus
from launchers.status.work_left import ShapeStatus
from results.text.json_document import json_document
from sweep.inspecting.status import open_sweeps, read_status

VERSION = 1
"""Version of the document. It rises when a field changes its meaning or goes; new fields may come."""


def status_json(path: Path) -> str:
    """The sweeps below ``path`` as JSON text; what is unknown is null.

    Raises `InvalidResults` if there is no sweep that can be read.
    """
    sweeps, unread = open_sweeps(path)
    fields = {"path": str(path), "sweeps": [_of_sweep(sweep) for sweep in sweeps], "unread": unread}
    return json_document("status", VERSION, fields)


def _of_sweep(sweep: SweepDir) -> dict[str, Any]:
    rebuilt = None if sweep.archived else rebuild_lost_rows(sweep)
    status, jobs = read_status(sweep)
    left = [shape.device_hours_left for shape in status.shapes]
    submitted = [] if sweep.archived else submissions.all_submissions(sweep)
    notes = (rebuilt, status.damage, status.damaged_records, submissions.damage(submitted))
    return {
        "name": status.name,
        "path": str(sweep.path),
        "archived": sweep.archived,
        "points": status.total,
        "ended": status.finished,
        "running": status.claimed,
        "waiting": status.todo,
        "damaged": len(status.damaged),
        "outcomes": dict(sorted(status.done.items())),
        "attempts": len(status.attempts),
        "device_hours": status.device_hours,
        "device_hours_left": None if None in left else sum(hours or 0.0 for hours in left),
        "expected_left_s": status.expected_left_s,
        "shapes": [_of_shape(shape) for shape in status.shapes],
        "slurm_answers": jobs is not None if any(one.open for one in submitted) else None,
        "pilots": _of_pilots(status, jobs or []),
        "excluded_nodes": [
            {"node": one.node, "until": one.until, "reason": one.reason}
            for one in node_exclusions.excluded(sweep).values()
        ],
        "paused_kinds": [
            {"kind": kind, "reason": why} for kind, why in circuit_breaker.paused_kinds(sweep, status.attempts).items()
        ],
        "failures": [
            {
                "outcome": record.outcome,
                "experiment_id": record.experiment_id,
                "phase": record.phase,
                "evidence": record.evidence,
            }
            for record in status.failures()
        ],
        "notes": [line for line in notes if line],
    }


def _of_shape(shape: ShapeStatus) -> dict[str, Any]:
    return {
        "devices": shape.devices,
        "nodes": shape.nodes,
        "points": shape.total,
        "waiting": shape.waiting,
        "running": shape.running,
        "outcomes": dict(sorted(shape.done.items())),
        "device_hours": shape.device_hours,
        "device_hours_left": shape.device_hours_left,
    }


def _of_pilots(status: SweepStatus, jobs: Sequence[Job]) -> list[dict[str, Any]]:
    """The pilots that have written their state, then the jobs whose pilot has not."""
    by_name = {job.name: job for job in jobs}
    known = {pilot.job for pilot in status.pilots}
    pilots = [_of_pilot(pilot, by_name) for pilot in status.pilots]
    fields: Mapping[str, None] = dict.fromkeys(("pilot_id", "activity", "message"))
    return pilots + [
        {**fields, "job": job.name, "slurm_state": job.state, "nodes": None, "running": []}
        for job in jobs
        if job.alive and job.name not in known
    ]


def _of_pilot(pilot: PilotState, by_name: Mapping[str, Job]) -> dict[str, Any]:
    job = by_name.get(pilot.job or "")
    return {
        "pilot_id": pilot.pilot_id,
        "activity": pilot.activity,
        "message": pilot.message or None,
        "job": pilot.job,
        "slurm_state": job.state if job is not None else None,
        "nodes": list(pilot.nodes),
        "running": [
            {
                "experiment_id": one.experiment_id,
                "attempt_id": one.attempt_id,
                "devices": one.world_size,
                "phase": one.phase,
                "step": one.step,
                "elapsed_s": pilot.elapsed_s(one),
                "deadline_s": one.deadline_s,
                "nodes": list(one.nodes),
            }
            for one in pilot.running
        ],
    }

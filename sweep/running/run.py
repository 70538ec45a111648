"""Prepares a run: plans for this machine or for Slurm, and fills the sweep's queue."""

from __future__ import annotations

import gc
import os
import pwd
import shlex
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from launchers.settings import LaunchSettings
from launchers.state import plan_lease, submissions
from launchers.state.fresh_start import describe_anew, has_begun, has_pilots
from launchers.state.sweep_dir import Point, SweepDir, entry_names, key_of
from results.errors import InvalidResults, UltrasweepError
from results.text.numbers import plural
from results.text.secrets import hide_in_arguments
from sweep.composing.conffiles import ConfFolders
from sweep.composing.config import SweepConfig, compose_sweep
from sweep.composing.machine import Machine, default_launcher, fitting_cluster, this_machine
from sweep.composing.planned_only import refuse_planned_only
from sweep.planning.assemble import plan_sweep
from sweep.planning.ledger import ledger_rows, origin_of
from sweep.planning.plan import Plan, refuse_if_nothing_can_run
from sweep.planning.point_verdict import PlannedPoint
from sweep.running.launch import is_dry, launch_options
from workloads.contract.protocol import Method
from workloads.rules.engine_kinds import refuse_lacking_kinds, refuse_planned_formats
from workloads.rules.installed_packages import require_torch

if TYPE_CHECKING:
    from launchers.slurm.options import SlurmOptions

_OBJECTS_PER_COLLECTION = 50_000
"""Allocations between two garbage collections. At Python's default of 700 the collector would examine the many
long-lived objects of a plan too often."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan bound to the place where it will run, and how its points are launched."""

    plan: Plan
    settings: LaunchSettings
    slurm: SlurmOptions | None
    """Options of the Slurm jobs; None: this machine runs the points itself."""
    dry: bool
    """Show what would be submitted and do nothing."""
    notes: tuple[str, ...]
    """Lines for the user about choices made automatically: launcher, cluster file."""


def prepare(overrides: Sequence[str], folders: ConfFolders, extra_where: Sequence[str]) -> Prepared:
    """Compose and plan; choose the launcher and the cluster file if the user did not.

    A local run needs a cluster file that describes this machine. Under Slurm the user or the grid must choose the file,
    because a login node has other devices than the nodes. Raises `InvalidSweep` (or another `UltrasweepError`) for a
    mistake of the user, or if no point can run.
    """
    gc.set_threshold(_OBJECTS_PER_COLLECTION, 20, 100)
    config = compose_sweep(overrides, folders, extra_where=extra_where, launcher=default_launcher())
    refuse_planned_only(config.cluster)
    refuse_lacking_kinds(config.models.values())
    machine, notes = Machine(gpu_name=None, num_gpus=0), []
    if config.launcher_kind != "slurm":
        require_torch(f"launcher={config.launcher_kind}")
        machine = this_machine()
    elif not config.launcher_given:
        notes.append("launcher=slurm: this machine can submit to Slurm (launcher=local would run here)")
    if config.launcher_kind == "local":
        other = fitting_cluster(folders, machine, config.cluster, config.cluster_given)
        if other is not None:
            config = compose_sweep(overrides, folders, extra_where=extra_where, cluster=other, launcher="local")
            notes.append(f"cluster={other}: this machine has {machine.gpu_name}")
    settings, slurm = launch_options(config, machine)
    dry = is_dry(config)
    if not dry and (rebuilt := _rebuilt(config)) is not None:
        notes.append(rebuilt)
    plan = plan_sweep(config, settings.method, slurm, settings.num_devices)
    refuse_planned_formats(point.experiment.precision for point in plan.to_run)
    refuse_if_nothing_can_run(plan)
    return Prepared(plan=plan, settings=settings, slurm=slurm, dry=dry, notes=tuple(notes))


def _rebuilt(config: SweepConfig) -> str | None:
    """Rebuilds rows that the sweep's tables have lost. Returns one line on what was rebuilt."""
    if not SweepDir(config.sweep_dir).marker.is_file():
        return None
    from launchers.pilot.rebuild import rebuild_lost_rows

    return rebuild_lost_rows(SweepDir(config.sweep_dir))


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """Numbers of points that `enqueue` added, removed and left."""

    sweep: SweepDir
    added: int
    removed: int
    """Points of an earlier run that were waiting and are not in this plan: removed from the queue."""
    foreign: int
    """Points of an earlier run that are running and are not in this plan: left to finish."""


@contextmanager
def enqueued(prepared: Prepared, added: Collection[str] | None = None) -> Iterator[Queued]:
    """Fill the queue as `enqueue` does. Inside the block, commands with another plan are refused."""
    if prepared.dry:
        raise UltrasweepError("launcher.dry=true queues and submits nothing, and this command has no other result")
    about = _about(prepared.plan.config)
    sweep = SweepDir.create(prepared.plan.config.sweep_dir, about)
    if _is_other_device(sweep, about):
        describe_anew(sweep, about)
    with plan_lease.hold(sweep) as other:
        yield _fill(prepared, sweep, added, other)


def enqueue(prepared: Prepared, added: Collection[str] | None = None) -> Queued:
    """Write the ledger and the queue. Raises `InvalidResults` if the folder's rows are from another device, or if
    somebody else runs another plan in it.

    ``added``: ids of the experiments to queue; None: all that are to run. If given, waiting points also stay, as long
    as their layout is planned.

    Waiting points of an earlier run that are not in this plan (another budget, other axes) are removed, so that only
    the plan is run. Points requeued by ``retry`` stay.
    """
    with enqueued(prepared, added) as queued:
        return queued


def _fill(prepared: Prepared, sweep: SweepDir, added: Collection[str] | None, other: str | None) -> Queued:
    """The work of `enqueue`. ``other``: another command that runs this sweep now."""
    from results.tables.store import ledger_is_of, write_ledger

    plan, settings = prepared.plan, prepared.settings
    points = _points_of(prepared)
    planned = {point.key for point in points}
    waiting, claimed = (
        [name for name in entry_names(folder) if not _is_planned(name, planned, settings)]
        for folder in (sweep.todo, sweep.claimed)
    )
    _refuse_other_plan(sweep, len(waiting) + len(claimed), other)
    if not ledger_is_of(sweep.path, origin := origin_of(plan)):
        write_ledger(sweep.path, ledger_rows(plan), origin)
    removed = 0
    for name in waiting if added is None else ():
        (sweep.todo / name).unlink(missing_ok=True)
        removed += 1
    foreign = len(claimed)
    to_run = {point.experiment.id for point in plan.to_run} if added is None else added
    count = sweep.add_points(point for point in points if point.experiment.id in to_run)
    return Queued(sweep=sweep, added=count, removed=removed, foreign=foreign)


def lost_points(prepared: Prepared, sweep: SweepDir) -> str:
    """Why this plan is not done although no point of its queue is left; empty when each of its points has ended or
    still waits. A command with another plan may have removed points."""
    folders = (sweep.todo, sweep.claimed, sweep.done)
    # The second look finds a point that a pilot of another command gave back during the first one.
    known = {key_of(name) for folder in (*folders, *folders) for name in entry_names(folder)}
    to_run = {point.experiment.id for point in prepared.plan.to_run}
    planned = [point for point in _points_of(prepared) if point.experiment.id in to_run]
    lost = sum(point.key not in known for point in planned)
    if not lost:
        return ""
    return (
        f"{lost} of the {plural(len(planned), 'point')} of this plan were not run: another command with "
        f"name={sweep.name} took them out of the queue; give this run another name=NAME"
    )


def would_wait(prepared: Prepared) -> list[Point]:
    """The points that would wait in the queue after `enqueue`. Nothing is written."""
    config = prepared.plan.config
    sweep = SweepDir(config.sweep_dir)
    points = _points_of(prepared)
    to_run = {point.experiment.id for point in prepared.plan.to_run}
    if not sweep.marker.exists():
        return [point for point in points if point.experiment.id in to_run]
    sweep = SweepDir.open(sweep.path)
    if _is_other_device(sweep, _about(config)):
        return [point for point in points if point.experiment.id in to_run]
    waiting = {key_of(name) for name in entry_names(sweep.todo)}
    begun = {key_of(name) for folder in (sweep.claimed, sweep.done) for name in entry_names(folder)}
    return [
        point for point in points if point.key in waiting or (point.experiment.id in to_run and point.key not in begun)
    ]


def _points_of(prepared: Prepared) -> list[Point]:
    """The plan's points as entries of the queue: those to run, and the cached ones, which `retry` may put back."""
    return [
        point_of(index, point, prepared.settings.method)
        for index, point in enumerate(prepared.plan.points)
        if point.verdict in ("run", "cached") and point.price is not None
    ]


def point_of(index: int, point: PlannedPoint, method: Method) -> Point:
    """One priced point of a plan as an entry of the queue."""
    assert point.price is not None
    return Point(
        index=index,
        grid=point.grid,
        experiment=point.experiment,
        predicted_peak_bytes=point.peak_bytes,
        predicted_step_time_s=point.time.step_time_s if point.time is not None else None,
        predicted_step_time_low_s=point.time.low_s if point.time is not None else None,
        predicted_step_time_high_s=point.time.high_s if point.time is not None else None,
        deadline_s=point.price.deadline_s,
        method=method,
    )


def _is_planned(name: str, planned: set[str], settings: LaunchSettings) -> bool:
    """Whether a file of the queue may stay: its point is in this plan, or it runs by another method (measured,
    rehearsed), which this plan does not cover."""
    key = key_of(name)
    return key in planned or (key.partition("+")[2] or "measured") != settings.method


def _about(config: SweepConfig) -> dict[str, Any]:
    return {
        "cluster": config.cluster.name,
        "device": config.cluster.device.name,
        "devices_per_node": config.cluster.devices_per_node,
        "grids": [grid.name for grid in config.grids],
        "command": hide_in_arguments(sys.argv[1:]),
    }


def _refuse_other_plan(sweep: SweepDir, foreign: int, other: str | None) -> None:
    """Raise `InvalidResults` when ``foreign`` open points of the queue belong to the plan of a command that still runs,
    or to pilots of another user."""
    owners = {one.uid for one in submissions.all_submissions(sweep) if one.open} - {os.getuid()}
    who = other or (f"user {_user(min(owners))}" if owners else None)
    if foreign and who is not None:
        raise InvalidResults(
            f"{sweep.path} is in use: {who} runs {plural(foreign, 'point')} there that this plan does not have; give "
            "this run another name=NAME"
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _is_other_device(sweep: SweepDir, about: Mapping[str, Any]) -> bool:
    """Whether the sweep was planned for another device and nothing of it has begun, so that it may be planned anew.

    Raises `InvalidResults` if something has.
    """
    device = sweep.settings().get("device")
    if device is None or device == about["device"]:
        return False
    if has_begun(sweep):
        raise InvalidResults(
            f"{sweep.path} holds runs for {device}, this run is for {about['device']}: give it another name=NAME"
        )
    if has_pilots(sweep):
        raise InvalidResults(
            f"{sweep.path} has pilots for {device}, this run is for {about['device']}: end them with "
            f"`python -m sweep cancel {shlex.quote(str(sweep.path))}`, or give this run another name=NAME"
        )
    return True

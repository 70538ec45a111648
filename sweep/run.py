"""``run``: plan, put the points into the sweep's queue, let the launcher work, say what came of it."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from rich.console import Console

from launchers.settings import LaunchSettings
from launchers.state.sweep_dir import Point, SweepDir, entry_names, key_of
from launchers.status.run_summary import RunSummary
from launchers.status.status import SweepStatus, sweep_status
from results.errors import InvalidResults
from results.schema import VERDICTS
from results.text import format_duration, plural
from sweep.conffiles import ConfFolders
from sweep.config import SweepConfig, compose_sweep
from sweep.expand import expand_all
from sweep.launch import is_dry, launch_settings, slurm_options
from sweep.ledger import ledger_rows
from sweep.machine import Machine, default_launcher, fitting_cluster, this_machine
from sweep.plan import DeviceLimit, Plan, known_answers, make_plan, refuse_hopeless
from sweep.retry import SETTLED
from sweep.summary import print_jobs

if TYPE_CHECKING:
    from launchers.slurm.options import SlurmOptions


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan bound to where it will run, and how its points are to be launched."""

    plan: Plan
    settings: LaunchSettings
    slurm: SlurmOptions | None
    """How allocations are asked for; None: this machine runs the points itself."""
    dry: bool
    """Show what would be submitted and do nothing."""
    notes: tuple[str, ...]
    """What was chosen for the user."""


def prepare(words: Sequence[str], folders: ConfFolders, extra_where: Sequence[str]) -> Prepared:
    """Compose, choose the launcher and the cluster file where the user has not, and plan.

    A local run needs a cluster file that describes this machine. A login node says nothing about the nodes behind it:
    for Slurm the file is the user's or the grid's word.
    """
    config = compose_sweep(words, folders, extra_where=extra_where, launcher=default_launcher())
    machine, notes = Machine(gpu_name=None, num_gpus=0), []
    if config.launcher_kind != "slurm":
        machine = this_machine()
    elif not config.launcher_given:
        notes.append("launcher=slurm: this machine submits to Slurm (launcher=local would run here)")
    if config.launcher_kind == "local":
        other = fitting_cluster(folders, machine, config.cluster, config.cluster_given)
        if other is not None:
            config = compose_sweep(words, folders, extra_where=extra_where, cluster=other, launcher="local")
            notes.append(f"cluster={other}: this machine has {machine.gpu_name}")
    settings, slurm = launch_settings(config, machine), slurm_options(config)
    plan = make_plan(
        config,
        expand_all(config.grids, config.models.__getitem__),
        settings.method,
        known_answers(config.results_dir, settings.method, config.cluster),
        device_limit=_device_limit(settings, slurm),
    )
    refuse_hopeless(plan)
    return Prepared(plan=plan, settings=settings, slurm=slurm, dry=is_dry(config), notes=tuple(notes))


def _device_limit(settings: LaunchSettings, slurm: SlurmOptions | None) -> DeviceLimit | None:
    """The most devices that one point can get."""
    if settings.method != "measured":
        return None
    if slurm is None:
        return DeviceLimit(
            settings.num_devices, f"this machine gives {settings.num_devices}; launcher=rehearse needs one"
        )
    if slurm.max_nodes is None:
        return None
    devices = slurm.max_nodes * settings.cluster.devices_per_node
    return DeviceLimit(devices, f"launcher.max_nodes={slurm.max_nodes} gives {devices}")


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """What `enqueue` did. Counts of points."""

    sweep: SweepDir
    added: int
    removed: int
    """Waited from an earlier run and are not part of this plan."""
    foreign: int
    """Are not part of this plan either, but run now: they end as they would have."""


def enqueue(prepared: Prepared) -> Queued:
    """Write the ledger and the queue.

    Points that wait from an earlier run and are not part of this plan (another budget, other axes) are taken off, so
    that what runs is what was planned. Points put back by ``retry`` stay.
    """
    plan, settings = prepared.plan, prepared.settings
    config = plan.config
    about = _about(config)
    sweep = SweepDir.create(config.sweep_dir, about)
    _refuse_other_device(sweep, about)
    from results.store import write_ledger

    write_ledger(sweep.path, ledger_rows(plan))
    points = _points_of(prepared)
    wanted = {point.key for point in points}
    removed = 0
    for name in entry_names(sweep.todo):
        if not _is_planned(name, wanted, settings):
            (sweep.todo / name).unlink(missing_ok=True)
            removed += 1
    foreign = sum(not _is_planned(name, wanted, settings) for name in entry_names(sweep.claimed))
    to_run = {point.experiment.id for point in plan.to_run}
    added = sweep.add_points(point for point in points if point.experiment.id in to_run)
    return Queued(sweep=sweep, added=added, removed=removed, foreign=foreign)


def would_wait(prepared: Prepared) -> list[Point]:
    """Points that would wait in the queue after `enqueue`; nothing is written."""
    config = prepared.plan.config
    sweep = SweepDir(config.sweep_dir)
    points = _points_of(prepared)
    to_run = {point.experiment.id for point in prepared.plan.to_run}
    if not sweep.marker.exists():
        return [point for point in points if point.experiment.id in to_run]
    sweep = SweepDir.open(sweep.path)
    _refuse_other_device(sweep, _about(config))
    waiting = {key_of(name) for name in entry_names(sweep.todo)}
    begun = {key_of(name) for folder in (sweep.claimed, sweep.done) for name in entry_names(folder)}
    return [
        point for point in points if point.key in waiting or (point.experiment.id in to_run and point.key not in begun)
    ]


def _points_of(prepared: Prepared) -> list[Point]:
    """The plan's points as the queue takes them: those to run, and those answered, which `retry` may put back."""
    return [
        Point(
            index=index,
            grid=point.grid,
            experiment=point.experiment,
            predicted_peak_bytes=point.peak_bytes,
            predicted_step_time_s=point.time.step_time_s if point.time is not None else None,
            deadline_s=point.price.deadline_s,
            method=prepared.settings.method,
        )
        for index, point in enumerate(prepared.plan.points)
        if point.verdict in ("run", "cached") and point.price is not None
    ]


def _is_planned(name: str, wanted: set[str], settings: LaunchSettings) -> bool:
    """Whether a file of the queue is this plan's business and in it; what is run in another way is not."""
    key = key_of(name)
    return key in wanted or (key.partition("+")[2] or "measured") != settings.method


def _about(config: SweepConfig) -> dict[str, Any]:
    return {
        "cluster": config.cluster.name,
        "device": config.cluster.device.name,
        "devices_per_node": config.cluster.devices_per_node,
        "grids": [grid.name for grid in config.grids],
        "command": sys.argv[1:],
    }


def _refuse_other_device(sweep: SweepDir, about: Mapping[str, Any]) -> None:
    device = sweep.settings().get("device")
    if device is not None and device != about["device"]:
        raise InvalidResults(
            f"{sweep.path} holds runs planned for {device}; give this one, for {about['device']}, another name=NAME"
        )


def tell_start(prepared: Prepared, queued: Queued, console: Console) -> None:
    """What is about to happen, in a few lines; its price too where others may wait for the devices."""
    plan = prepared.plan
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    for note in prepared.notes:
        say(note)
    say(f"{queued.sweep.path}: {plural(len(plan.points), 'point')}: {_verdicts(plan)}")
    if queued.removed:
        say(f"{queued.removed:,} points of an earlier run are not in this plan and were taken off the queue")
    if queued.foreign:
        say(f"{queued.foreign:,} of an earlier run are not in this plan and run now; they will end and keep their rows")
    status = sweep_status(queued.sweep)
    if not status.left:
        lost = len(plan.to_run) - _failed(status)
        if lost > 0:  # finished says the queue, and no row can be read
            retry = f"python -m sweep retry {shlex.quote(str(queued.sweep.path))} ok"
            say(f"nothing to run: every point was run, but the rows of {lost:,} cannot be read; {retry} puts them back")
        else:
            say(f"nothing to run: every point has its row{_failures(status)}")
        return
    settings = prepared.settings
    if prepared.slurm is not None:
        if plan.to_run:
            print_jobs(plan, console)
        say(f"{plural(status.left, 'point')} to run by Slurm, on nodes of {_devices(settings)}")
        return
    how = "run" if settings.method == "measured" else "be rehearsed"
    say(f"{plural(status.left, 'point')} to {how}, with up to {_devices(settings)} at a time")
    if settings.method == "rehearsed_fake":
        say("no GPU here: memory is traced on FakeTensor, step times are estimates")


def tell_dry(prepared: Prepared, points: Sequence[Point], console: Console) -> None:
    """The lines before the sbatch files of ``launcher.dry=true``, as comments of the shell."""
    plan = prepared.plan
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"# dry run of {shlex.quote(plan.config.name)}: nothing is written, nothing is submitted")
    say(f"# {plural(len(plan.points), 'point')}: {_verdicts(plan)}; {plural(len(points), 'point')} would wait")
    for line in _jobs(prepared, points):
        say(f"# {line}")


def _jobs(prepared: Prepared, points: Sequence[Point]) -> list[str]:
    """What would be submitted for ``points``, in words."""
    from launchers.slurm.demand import demand_of

    assert prepared.slurm is not None
    demand, limit = demand_of(points, prepared.settings, prepared.slurm), prepared.slurm.time_min
    lines = [
        f"{plural(len(demand.points[nodes]), 'point')} on {plural(nodes, 'node')}: "
        f"{plural(count, 'pilot')} of at most {limit} minutes"
        for nodes, count in demand.pilots.items()
    ]
    if demand.too_long:
        lines.append(
            f"{plural(demand.too_long, 'point')} may need {format_duration(demand.longest_s)}, and a pilot of "
            f"launcher.time_min={limit} has {format_duration(prepared.slurm.usable_s)}: not submitted"
        )
    return lines


def tell_end(sweep: SweepDir, summary: RunSummary, command: str, console: Console) -> None:
    """What came of it, and how to go on."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(summary.outcomes.items()))
    if summary.attempts:
        say(f"{plural(summary.attempts, 'attempt')}; points by outcome: {outcomes or 'none yet'}")
    if summary.interrupted:
        say(f"interrupted, {plural(summary.left, 'point')} left; go on with: {command}")
    elif summary.message:
        say(summary.message)
    elif summary.attempts and not summary.left:
        say(f"report: python -m analysis.report {shlex.quote(str(sweep.path))}")


def _verdicts(plan: Plan) -> str:
    return ", ".join(f"{verdict} {plan.counts[verdict]:,}" for verdict in VERDICTS if plan.counts[verdict])


def _devices(settings: LaunchSettings) -> str:
    return plural(settings.num_devices, {"cuda": "GPU", "cpu": "CPU process"}[settings.device])


def _failed(status: SweepStatus) -> int:
    return sum(count for outcome, count in status.done.items() if outcome not in SETTLED)


def _failures(status: SweepStatus) -> str:
    failed = _failed(status)
    return f"; {failed:,} failed (python -m sweep retry puts them back)" if failed else ""

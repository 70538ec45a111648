"""``run``: plan for this machine, put the points into the sweep's queue, let the launcher work, say what came of it."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from rich.console import Console

from launchers.local import RunSummary
from launchers.settings import LaunchSettings, settings_from_dict
from launchers.status import SweepStatus, sweep_status
from launchers.sweepdir import Point, SweepDir, entry_names, key_of
from results.errors import InvalidResults
from results.schema import VERDICTS
from sweep.conffiles import ConfFolders
from sweep.config import SweepConfig, compose_sweep
from sweep.expand import expand_all
from sweep.ledger import ledger_rows
from sweep.machine import Machine, fitting_cluster, method_of, refuse_slurm, this_machine
from sweep.plan import Plan, known_answers, make_plan, refuse_hopeless
from sweep.progress import SETTLED
from workloads.cluster import to_dict
from workloads.errors import InvalidSweep


@dataclass(frozen=True, slots=True, kw_only=True)
class Prepared:
    """A plan bound to this machine, and how its points are to be launched."""

    plan: Plan
    settings: LaunchSettings
    note: str
    """What was chosen for the user, empty if nothing."""


def prepare(words: Sequence[str], folders: ConfFolders, extra_where: Sequence[str]) -> Prepared:
    """Compose, choose the cluster file that describes this machine, and plan for it."""
    config = compose_sweep(words, folders, extra_where=extra_where)
    refuse_slurm(config)
    machine, note = this_machine(), ""
    if config.launcher_kind == "local":
        other = fitting_cluster(folders, machine, config.cluster, config.cluster_given)
        if other is not None:
            config = compose_sweep(words, folders, extra_where=extra_where, cluster=other)
            note = f"cluster={other}: this machine has {machine.gpu_name}"
    settings = launch_settings(config, machine)
    plan = make_plan(
        config,
        expand_all(config.grids, config.models.__getitem__),
        settings.method,
        known_answers(config.results_dir, settings.method, config.cluster),
        max_devices=settings.num_devices if settings.method == "measured" else None,
    )
    refuse_hopeless(plan)
    return Prepared(plan=plan, settings=settings, note=note)


def launch_settings(config: SweepConfig, machine: Machine) -> LaunchSettings:
    """The launcher's file as settings for this machine. Raises `InvalidSweep` for values that cannot be."""
    method = method_of(config)
    on_gpu = config.cluster.backend == "cuda" if method == "measured" else method == "rehearsed"
    fields: dict[str, Any] = dict(config.launcher)
    if fields.get("num_devices") is None:
        fields["num_devices"] = machine.num_gpus if on_gpu else config.cluster.devices_per_node
    if method != "measured":
        fields["num_devices"] = 1
    fields |= {
        "device": "cuda" if on_gpu else "cpu",
        "cluster": to_dict(config.cluster),
        "method": method,
    }
    try:
        return dataclasses.replace(settings_from_dict(fields), measure=config.measure)
    except TypeError as error:
        raise InvalidSweep(f"launcher: {error}; its options are numbers") from None


@dataclass(frozen=True, slots=True, kw_only=True)
class Queued:
    """What `enqueue` did. Counts of points."""

    sweep: SweepDir
    added: int
    removed: int
    """Waited from an earlier run and are not part of this plan."""


def enqueue(prepared: Prepared) -> Queued:
    """Write the ledger and the queue.

    Points that wait from an earlier run and are not part of this plan (another budget, other axes) are taken off, so
    that what runs is what was planned. Points put back by ``retry`` stay.
    """
    plan, settings = prepared.plan, prepared.settings
    config = plan.config
    about = {
        "cluster": config.cluster.name,
        "device": config.cluster.device.name,
        "grids": [grid.name for grid in config.grids],
        "command": sys.argv[1:],
    }
    sweep = SweepDir.create(config.sweep_dir, about)
    _refuse_other_device(sweep, about)
    from results.store import write_ledger

    write_ledger(sweep.path, ledger_rows(plan))
    points = [
        Point(
            index=index,
            grid=point.grid,
            experiment=point.experiment,
            predicted_peak_bytes=point.peak_bytes,
            predicted_step_time_s=point.time.step_time_s if point.time is not None else None,
            deadline_s=point.price.deadline_s,
            method=settings.method,
        )
        for index, point in enumerate(plan.points)
        if point.verdict in ("run", "cached") and point.price is not None
    ]
    wanted = {point.key for point in points}
    removed = 0
    for name in entry_names(sweep.todo):
        key = key_of(name)
        if key not in wanted and _method_of_key(key) == settings.method:
            (sweep.todo / name).unlink(missing_ok=True)
            removed += 1
    to_run = {point.experiment.id for point in plan.to_run}
    added = sweep.add_points(point for point in points if point.experiment.id in to_run)
    return Queued(sweep=sweep, added=added, removed=removed)


def _method_of_key(key: str) -> str:
    return key.partition("+")[2] or "measured"


def _refuse_other_device(sweep: SweepDir, about: Mapping[str, Any]) -> None:
    device = sweep.settings().get("device")
    if device is not None and device != about["device"]:
        raise InvalidResults(
            f"{sweep.path} holds runs planned for {device}; give this one, for {about['device']}, another name=NAME"
        )


def tell_start(prepared: Prepared, queued: Queued, console: Console) -> None:
    """What is about to happen, in a few lines."""
    plan = prepared.plan
    counts = ", ".join(f"{verdict} {plan.counts[verdict]:,}" for verdict in VERDICTS if plan.counts[verdict])
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    if prepared.note:
        say(prepared.note)
    say(f"{queued.sweep.path}: {_points(len(plan.points))}: {counts}")
    if queued.removed:
        say(f"{queued.removed:,} points of an earlier run are not in this plan and were taken off the queue")
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
    unit = {"cuda": "GPU", "cpu": "CPU process"}[settings.device]
    plural = {"GPU": "s", "CPU process": "es"}[unit] if settings.num_devices > 1 else ""
    how = "run" if settings.method == "measured" else "be rehearsed"
    say(f"{_points(status.left)} to {how}, with up to {settings.num_devices} {unit}{plural} at a time")
    if settings.method == "rehearsed_fake":
        say("no GPU here: memory is traced on FakeTensor, step times are estimates")


def tell_end(sweep: SweepDir, summary: RunSummary, command: str, console: Console) -> None:
    """What came of it, and how to go on."""
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    outcomes = ", ".join(f"{outcome} {count:,}" for outcome, count in sorted(summary.outcomes.items()))
    if summary.attempts:
        plural = "" if summary.attempts == 1 else "s"
        say(f"{summary.attempts:,} attempt{plural}; points by outcome: {outcomes or 'none yet'}")
    if summary.interrupted:
        say(f"interrupted, {_points(summary.left)} left; go on with: {command}")
    elif summary.message:
        say(summary.message)
    elif summary.attempts:
        say(f"report: python -m analysis.report {shlex.quote(str(sweep.path))}")


def _points(count: int) -> str:
    return f"{count:,} point{'' if count == 1 else 's'}"


def _failed(status: SweepStatus) -> int:
    return sum(count for outcome, count in status.done.items() if outcome not in SETTLED)


def _failures(status: SweepStatus) -> str:
    failed = _failed(status)
    return f"; {failed:,} failed (python -m sweep retry puts them back)" if failed else ""

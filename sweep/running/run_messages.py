"""Messages of ``run`` and of a dry run before the launcher works. Messages at the end are in
`sweep.running.run_end`."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from functools import partial

from rich.console import Console

from launchers.settings import LaunchSettings
from launchers.state.sweep_dir import Point
from launchers.status.status import SweepStatus, sweep_status
from results.tables.schema import VERDICTS
from results.text.numbers import format_duration, plural
from sweep.inspecting.retry import SETTLED
from sweep.planning.plan import Plan
from sweep.planning.summary import print_jobs, reused_from
from sweep.running.run import Prepared, Queued


def print_start(prepared: Prepared, queued: Queued, console: Console) -> None:
    """Print in a few lines what is about to run. Under Slurm, where others may wait for the devices, with its price."""
    plan = prepared.plan
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    for note in prepared.notes:
        say(note)
    say(f"{queued.sweep.path}: {plural(len(plan.points), 'point')}: {_verdicts(plan)}")
    if reused := reused_from(plan):
        say(reused)
    if queued.removed:
        are, were = ("is", "was") if queued.removed == 1 else ("are", "were")
        points = plural(queued.removed, "point")
        say(f"{points} of an earlier run {are} not in this plan and {were} removed from the queue")
    if queued.foreign:
        are, they = ("is", "it is") if queued.foreign == 1 else ("are", "they are")
        points = plural(queued.foreign, "point")
        say(f"{points} of an earlier run {are} still running; {they} not in this plan but will be recorded")
    status = sweep_status(queued.sweep)
    if status.damaged:
        say(status.damage)
    if not status.left:
        lost = len(plan.to_run) - _failed(status)
        if lost > 0:  # the queue lists them as finished, but their rows cannot be read
            retry = f"python -m sweep retry {shlex.quote(str(queued.sweep.path))} ok"
            say(f"nothing to run: every point was run, but the rows of {lost:,} cannot be read; {retry} requeues them")
        elif unpaid := sum(point.verdict == "over_budget" for point in plan.points):
            say(f"nothing to run: the budget covers none of the {plural(unpaid, 'point')} that could run")
        else:
            say(f"nothing to run: every point has a row{_failures(status)}")
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
        rates = settings.cluster.matmul_efficiency is not None
        times = "are estimates" if rates else f"are unknown (the file of cluster {settings.cluster.name} has no rates)"
        say(f"no GPU here: memory is traced on FakeTensor, step times {times}")


def print_dry_run(prepared: Prepared, points: Sequence[Point], console: Console) -> None:
    """Print what would be submitted, as comments of a shell script: the batch files of ``launcher.dry=true`` follow."""
    plan = prepared.plan
    say = partial(console.print, highlight=False, markup=False, soft_wrap=True)
    say(f"# dry run of {shlex.quote(plan.config.name)}: nothing is written, nothing is submitted")
    say(f"# {plural(len(plan.points), 'point')}: {_verdicts(plan)}; {plural(len(points), 'point')} would wait")
    if reused := reused_from(plan):
        say(f"# {reused}")
    for line in _jobs(prepared, points):
        say(f"# {line}")


def _jobs(prepared: Prepared, points: Sequence[Point]) -> list[str]:
    """One line for each number of nodes: the points, and the pilots that would be submitted for them."""
    from launchers.slurm.demand import demand_of

    assert prepared.slurm is not None
    demand, limit = demand_of(points, prepared.settings, prepared.slurm), prepared.slurm.time_min
    lines = [
        f"{plural(len(demand.points[nodes]), 'point')} on {plural(nodes, 'node')}: "
        f"{plural(count, 'pilot')} of at most {limit} minutes"
        for nodes, count in demand.pilots.items()
    ]
    lines += demand.capped.values()
    if demand.too_long:
        lines.append(
            f"{plural(demand.too_long, 'point')} not submitted: up to {format_duration(demand.longest_s)} needed, "
            f"a pilot with launcher.time_min={limit} has {format_duration(prepared.slurm.usable_s)}"
        )
    return lines


def _verdicts(plan: Plan) -> str:
    return ", ".join(f"{verdict} {plan.counts[verdict]:,}" for verdict in VERDICTS if plan.counts[verdict])


def _devices(settings: LaunchSettings) -> str:
    return plural(settings.num_devices, {"cuda": "GPU", "cpu": "CPU process"}[settings.device])


def _failed(status: SweepStatus) -> int:
    return sum(count for outcome, count in status.done.items() if outcome not in SETTLED)


def _failures(status: SweepStatus) -> str:
    failed = _failed(status)
    return f"; {failed:,} failed (python -m sweep retry requeues them)" if failed else ""

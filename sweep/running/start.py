"""Runs the queued points of a command here or through Slurm, or only shows the batch files (``launcher.dry=true``).

Every command that can submit asks `only_shown` first, then queues with `enqueue`, which refuses a dry run, and calls
`start`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.console import Console

from launchers.state.sweep_dir import Point, SweepDir
from launchers.status.run_summary import RunSummary
from results.text.printable import printable
from sweep.running.run import Prepared, Queued, would_wait
from sweep.running.run_messages import print_dry_run


def only_shown(
    prepared: Prepared, console: Console, points_of: Callable[[Prepared], Sequence[Point]] = would_wait
) -> bool:
    """Show what would be submitted if the user asked for a dry run. Returns whether that was asked: then nothing may
    be queued. ``points_of``: the points that the command would put into the queue first."""
    if not prepared.dry:
        return False
    assert prepared.slurm is not None, "only launcher=slurm has the option dry"
    from launchers.slurm.submit import dry_run

    points = points_of(prepared)
    print_dry_run(prepared, points, console)
    sweep = SweepDir(prepared.plan.config.sweep_dir)
    for text in dry_run(sweep, points, prepared.settings, prepared.slurm):
        print("\n" + printable(text.rstrip(), keep="\n\t"))
    return True


def start(
    prepared: Prepared,
    queued: Queued,
    *,
    live: bool | None,
    command: str,
    detach: bool = False,
    feed: Callable[[], str] = lambda: "",
    most_points: int = 0,
) -> RunSummary:
    """Run the queue until no point is left. The options are those of `run_slurm`; a local run has no ``detach``."""
    if prepared.slurm is None:
        from launchers.local import run_local

        return run_local(
            queued.sweep, prepared.settings, live=live, command=command, feed=feed, most_points=most_points
        )
    from launchers.slurm.submit import run_slurm

    return run_slurm(
        queued.sweep,
        prepared.settings,
        prepared.slurm,
        live=live,
        command=command,
        detach=detach,
        feed=feed,
        most_points=most_points,
        experiments={point.experiment.id: point.experiment for point in prepared.plan.points},
    )

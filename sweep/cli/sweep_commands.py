"""Commands about a sweep that exists: status, watch, logs, cancel, retry."""

from __future__ import annotations

from argparse import Namespace

from results.text.command_line import Parser, path
from results.text.numbers import plural
from results.text.printable import printable
from results.text.terminal import open_console
from sweep.cli.command import RESULTS, SWEEP_PATH, Command, add_results, not_negative, positive


def _status_arguments(parser: Parser) -> None:
    parser.add_argument(
        "path",
        type=path,
        nargs="?",
        default=RESULTS,
        help="a sweep or a folder of sweeps (default: results)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON document, see docs/json.md")


def _status(options: Namespace) -> int:
    if options.json:
        from sweep.inspecting.status_json import status_json

        print(status_json(options.path))
        return 0
    from sweep.inspecting.status import print_status

    print_status(options.path, open_console())
    return 0


STATUS = Command(
    name="status",
    description="Show the progress of the sweeps below a folder, from their files and from Slurm.",
    arguments=_status_arguments,
    run=_status,
)


def _watch_arguments(parser: Parser) -> None:
    parser.add_argument("path", type=path, help=SWEEP_PATH)
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    parser.add_argument(
        "--report", type=path, metavar="DIR", help="write the report into DIR again and again while rows come"
    )


def _watch(options: Namespace) -> int:
    from launchers.slurm.watch import watch
    from launchers.state.sweep_dir import SweepDir
    from launchers.status.status import sweep_status
    from sweep.running.live_page import LivePage
    from sweep.running.run_end import print_end

    sweep = SweepDir.open(options.path, with_queue=True)
    page = LivePage(sweep.path, options.report) if options.report else None
    try:
        summary = watch(sweep, live=False if options.plain else None, follower=page)
        print_end(sweep, summary, "", open_console())
        if page is not None and not summary.detached:
            for line in page.finish(sweep_status(sweep)):
                print(printable(line))
    finally:
        if page is not None:
            page.stop()
    if summary.detached:
        print(f"{plural(summary.left, 'point')} left; stopped watching, the sweep goes on")
    return summary.exit_code


WATCH = Command(
    name="watch",
    description="Follow a sweep, wherever it runs, until no point is left. Ctrl-C only stops watching.",
    arguments=_watch_arguments,
    run=_watch,
)


def _logs_arguments(parser: Parser) -> None:
    parser.add_argument("id", help="id of an experiment or attempt, or a part of it that is unique")
    add_results(parser, "folder of sweeps, or one sweep (default: results)")
    parser.add_argument("--rank", type=not_negative, metavar="N", help="show only this rank's log")
    parser.add_argument("--lines", type=positive, default=20, metavar="N", help="lines of each log (default: 20)")


def _logs(options: Namespace) -> int:
    from sweep.inspecting.logs import print_logs

    print_logs(options.results, options.id, open_console(), rank=options.rank, lines=options.lines)
    return 0


LOGS = Command(
    name="logs",
    description="Show the last log lines of the ranks and the pilot of a point's newest attempt.",
    arguments=_logs_arguments,
    run=_logs,
)


def _cancel_arguments(parser: Parser) -> None:
    parser.add_argument("path", type=path, help=SWEEP_PATH)


def _cancel(options: Namespace) -> int:
    from launchers.slurm.cancel import cancel
    from launchers.state.submissions import cancel_mark
    from launchers.state.sweep_dir import SweepDir

    sweep = SweepDir.open(options.path)
    mark = cancel_mark(sweep)
    count = cancel(sweep, lambda line: print(printable(line)))
    if count:
        print(f"{plural(count, 'pilot')} cancelled; what they ran waits again, `run` resumes it")
    elif cancel_mark(sweep) != mark:
        print("Slurm has no pilot of this sweep; commands that watch it stop and submit none")
    else:
        print("nothing to cancel: Slurm has no pilot of this sweep (to stop a local run, press Ctrl-C there)")
    return 0


CANCEL = Command(
    name="cancel",
    description=(
        "Cancel a sweep's Slurm jobs; unfinished points stay in its queue. Running points get a row with the outcome\n"
        "preempted. To resume, repeat the `run` command."
    ),
    arguments=_cancel_arguments,
    run=_cancel,
)


def _retry_arguments(parser: Parser) -> None:
    parser.add_argument("path", type=path, help=SWEEP_PATH)
    parser.add_argument(
        "which", nargs="*", help="outcomes (crash, hang ...) or ids (default: all outcomes except ok and oom)"
    )
    parser.add_argument(
        "--outcome", action="append", default=[], metavar="OUTCOME", help="an outcome; unlike `which`, never an id"
    )
    parser.add_argument(
        "--paused", action="store_true", help="only unpause paused kinds of points (every retry does), requeue nothing"
    )


def _retry(options: Namespace) -> int:
    from sweep.inspecting.retry import check_outcomes, resume_paused, retry_points

    if options.paused and not options.which and not options.outcome:
        resume_paused(options.path)
        print("no kind of point is paused any more; repeat the `run` command to run the waiting points")
        return 0
    check_outcomes(options.outcome)
    count = retry_points(options.path, [*options.which, *options.outcome])
    hint = "repeat the `run` command to run them" if count else "kinds of points that were paused may run again"
    print(f"{plural(count, 'point')} requeued; {hint}")
    return 0


RETRY = Command(
    name="retry",
    description="Requeue finished points of a sweep. Repeat its `run` command to run them.",
    arguments=_retry_arguments,
    run=_retry,
)

"""One function for each command of ``python -m sweep``: its options, and who does the work.

Modules are imported by the command that needs them, so that each starts fast; none of them imports torch.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from results.errors import UltrasweepError
from results.terminal import open_console
from results.text import plural

SWEEP_WORDS = """\
words (Hydra's grammar; in zsh, quote those with brackets):
  +grid=NAME, +grid=[A,B]      which grids (files in sweep/conf/grid, or --conf DIR/grid)
  model=NAME, model=[A,B]      models, instead of the grids' own
  cluster=NAME                 what the points run on, instead of the cluster the grid is meant for
  launcher=local|slurm|rehearse
                               on this machine's devices; on allocations of Slurm (the default where jobs are
                               submitted); or single ranks of any layout on one device
  launcher.time_min=120        and all other options in sweep/conf/launcher/; launcher.dry=true shows the sbatch files
  measure=default|quick        warm-up and timed steps
  grid.axes.tp=[1,2]           change or add an axis; also grid.derive.X, grid.where.X, grid.subsample.count
  budget.gpu_hours=10          cap on expected GPU-hours
  name=NAME results_dir=DIR    the sweep's folder is results_dir/name
  plan.oom_margin=1.2          any other option of sweep/conf/config.yaml
"""


class _Parser(argparse.ArgumentParser):
    """Errors are one line, like all others."""

    def error(self, message: str) -> NoReturn:
        raise UltrasweepError(f"{message}; see {self.prog} --help")


def _plan(rest: list[str]) -> int:
    parser = _sweep_parser("plan", "Every point of the grids with its verdict; nothing is run.")
    parser.add_argument("--out", type=Path, metavar="FILE.parquet", help="write the ledger: one row a point")
    parser.add_argument("--top", type=_positive, default=40, metavar="N", help="rows of the last table (default 40)")
    options = parser.parse_intermixed_args(rest)
    from sweep.conffiles import ConfFolders
    from sweep.config import compose_sweep
    from sweep.expand import expand_all
    from sweep.launch import slurm_options
    from sweep.ledger import write_ledger_file
    from sweep.machine import default_launcher, method_of
    from sweep.plan import known_answers, make_plan, refuse_hopeless
    from sweep.summary import print_plan

    config = compose_sweep(
        options.words, ConfFolders(tuple(options.conf)), extra_where=options.where, launcher=default_launcher()
    )
    slurm_options(config)  # mistakes in them are told now, not after the plan
    method = method_of(config)
    answers = known_answers(config.results_dir, method, config.cluster)
    plan = make_plan(config, expand_all(config.grids, config.models.__getitem__), method, answers)
    if options.out is not None:
        write_ledger_file(options.out, plan)
    refuse_hopeless(plan)
    console = open_console()
    print_plan(plan, console, top=options.top)
    if options.out is not None:
        console.print(f"ledger: {options.out}", highlight=False, markup=False)
    return 0


def _run(rest: list[str]) -> int:
    parser = _sweep_parser("run", "Plan, then run every point that is worth running: here, or on allocations of Slurm.")
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    parser.add_argument("--detach", action="store_true", help="Slurm: return when the jobs are submitted")
    options = parser.parse_intermixed_args(rest)
    from sweep.conffiles import ConfFolders
    from sweep.run import enqueue, prepare, tell_dry, tell_end, tell_start, would_wait

    prepared = prepare(options.words, ConfFolders(tuple(options.conf)), options.where)
    command, console = _command("run", rest), open_console()
    if options.detach and prepared.slurm is None:
        raise UltrasweepError("--detach is for launcher=slurm: a run on this machine ends with this command")
    if prepared.dry and prepared.slurm is not None:
        from launchers.slurm.submit import dry_run
        from launchers.state.sweep_dir import SweepDir

        points = would_wait(prepared)
        tell_dry(prepared, points, console)
        for text in dry_run(SweepDir(prepared.plan.config.sweep_dir), points, prepared.settings, prepared.slurm):
            print(f"\n{text.rstrip()}")
        return 0
    queued = enqueue(prepared)
    tell_start(prepared, queued, console)
    live = False if options.plain else None
    if prepared.slurm is not None:
        from launchers.slurm.submit import run_slurm

        summary = run_slurm(
            queued.sweep, prepared.settings, prepared.slurm, live=live, command=command, detach=options.detach
        )
    else:
        from launchers.local import run_local

        summary = run_local(queued.sweep, prepared.settings, live=live, command=command)
    tell_end(queued.sweep, summary, command, console)
    return summary.exit_code


def _status(rest: list[str]) -> int:
    parser = _parser("status", "Where the sweeps below a folder stand, from their files, and from Slurm if it answers.")
    parser.add_argument("path", type=Path, nargs="?", default=Path("results"), help="a sweep or a folder of sweeps")
    options = parser.parse_args(rest)
    from sweep.status import print_status

    print_status(options.path, open_console())
    return 0


def _watch(rest: list[str]) -> int:
    parser = _parser("watch", "Follow a sweep that runs somewhere, until no point is left. Ctrl-C only stops watching.")
    parser.add_argument("path", type=Path, help="the sweep's folder, e.g. results/tiny")
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    options = parser.parse_args(rest)
    from launchers.slurm.watch import watch
    from launchers.state.sweep_dir import SweepDir
    from sweep.run import tell_end

    sweep = SweepDir.open(options.path)
    summary = watch(sweep, live=False if options.plain else None)
    tell_end(sweep, summary, "", open_console())
    if summary.detached:
        print(f"{plural(summary.left, 'point')} left; only the watching has stopped")
    return summary.exit_code


def _cancel(rest: list[str]) -> int:
    parser = _parser(
        "cancel",
        "Take a sweep's jobs back from Slurm. Running points get their row (preempted), and all that wait stay in the "
        "queue: `run` with the same words goes on.",
    )
    parser.add_argument("path", type=Path, help="the sweep's folder, e.g. results/tiny")
    options = parser.parse_args(rest)
    from launchers.slurm.cancel import cancel
    from launchers.state.sweep_dir import SweepDir

    count = cancel(SweepDir.open(options.path))
    if count:
        print(f"{plural(count, 'pilot')} cancelled; what they ran waits again, `run` goes on with it")
    else:
        print("nothing to cancel: Slurm has no pilot of this sweep (a run on one machine ends with Ctrl-C there)")
    return 0


def _logs(rest: list[str]) -> int:
    parser = _parser("logs", "The last lines of the ranks and of the pilot of a point's newest attempt.")
    parser.add_argument("id", help="an experiment's or attempt's id, or a part that only one experiment has")
    _add_results(parser, "folder of sweeps, or one sweep (default: results)")
    parser.add_argument("--rank", type=_count, metavar="N", help="only this rank's")
    parser.add_argument("--lines", type=_positive, default=20, metavar="N", help="of each file (default 20)")
    options = parser.parse_args(rest)
    from sweep.logs import print_logs

    print_logs(options.results, options.id, open_console(), rank=options.rank, lines=options.lines)
    return 0


def _retry(rest: list[str]) -> int:
    parser = _parser("retry", "Requeue finished points; `run` with the same words then runs them.")
    parser.add_argument("path", type=Path, help="the sweep's folder, e.g. results/tiny")
    parser.add_argument("which", nargs="*", help="outcomes (crash, hang ...) or ids; default: all but ok and oom")
    parser.add_argument("--outcome", action="append", default=[], metavar="OUTCOME", help="the same, by its name only")
    parser.add_argument(
        "--paused", action="store_true", help="requeue nothing, only let paused kinds of points run (any retry does)"
    )
    options = parser.parse_intermixed_args(rest)
    from sweep.retry import check_outcomes, resume_paused, retry_points

    if options.paused and not options.which and not options.outcome:
        resume_paused(options.path)
        print("no kind of point is paused any more; run the sweep again to run what waits")
        return 0
    check_outcomes(options.outcome)
    count = retry_points(options.path, [*options.which, *options.outcome])
    hint = "; run the sweep again to run what waits" if count else ""
    print(f"{plural(count, 'point')} requeued{hint}")
    return 0


def _explain(rest: list[str]) -> int:
    parser = _parser("explain", "All that is known of one point: configuration, verdict, prediction, attempts.")
    parser.add_argument("id", help="an experiment's id, or a part that only it has (the hash at its end)")
    _add_results(parser)
    options = parser.parse_args(rest)
    from sweep.explain import print_explanation
    from sweep.lookup import Results

    print_explanation(Results(options.results).find(options.id), open_console())
    return 0


def _diff(rest: list[str]) -> int:
    parser = _parser("diff", "What two points do not share, with their predictions and measurements.")
    parser.add_argument("first", help="an experiment's id, or a part that only it has")
    parser.add_argument("second")
    _add_results(parser)
    options = parser.parse_args(rest)
    from sweep.explain import print_difference
    from sweep.lookup import Results

    results = Results(options.results)
    print_difference(results.find(options.first), results.find(options.second), open_console())
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "plan": _plan,
    "run": _run,
    "status": _status,
    "watch": _watch,
    "logs": _logs,
    "cancel": _cancel,
    "retry": _retry,
    "explain": _explain,
    "diff": _diff,
}


def _parser(command: str, description: str, epilog: str | None = None) -> _Parser:
    return _Parser(
        prog=f"python -m sweep {command}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )


def _sweep_parser(command: str, description: str) -> _Parser:
    parser = _parser(command, description, SWEEP_WORDS)
    parser.add_argument("words", nargs="*", metavar="word", help="what to sweep, see below")
    parser.add_argument(
        "--where", action="append", default=[], metavar="EXPR", help="one more filter on every grid, e.g. 'tp <= 4'"
    )
    parser.add_argument(
        "--conf",
        action="append",
        default=[],
        type=Path,
        metavar="DIR",
        help="folder with your own grid/, model/ ...",
    )
    return parser


def _add_results(
    parser: _Parser, what: str = "folder of sweeps, one sweep, or a ledger written by plan --out (default: results)"
) -> None:
    parser.add_argument("--results", type=Path, default=Path("results"), metavar="PATH", help=what)


def _command(name: str, rest: Sequence[str]) -> str:
    import shlex

    return shlex.join(["python", "-m", "sweep", name, *rest])


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)

"""The command line: ``python -m sweep COMMAND`` (or ``ultrasweep COMMAND``).

Whatever a user can get wrong ends in one line on standard error and exit code 2. Modules are imported by the command
that needs them, so that each starts fast; none of them imports torch.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from results.errors import UltrasweepError

if TYPE_CHECKING:
    from rich.console import Console

USAGE, INTERRUPTED = 2, 130
_MIN_WIDTH = 120

DESCRIPTION = """\
Plan and run sweeps over the parallel layouts of LLM training.

  plan     every point of a grid with its verdict, predicted memory and speed, and the price of the sweep
  run      plan, then run what is worth running; Ctrl-C stops cleanly, the same command goes on
  status   where the sweeps of a results folder stand
  retry    put failed points back into a sweep's queue
  explain  all that is known of one point
  diff     what two points do not share

examples:
  python -m sweep plan +grid=playbook
  python -m sweep plan +grid=llama8b_8gpu cluster=h100_ib400 grid.axes.tp=[1,2] --out plan.parquet
  python -m sweep run +grid=tiny
  python -m sweep run +grid=[llama1b_8gpu,llama8b_8gpu] name=one_node budget.gpu_hours=10
  python -m sweep run +grid=llama70b_512gpu launcher=rehearse
"""

SWEEP_WORDS = """\
words (Hydra's grammar; in zsh, quote those with brackets):
  +grid=NAME, +grid=[A,B]      which grids (files in sweep/conf/grid, or --conf DIR/grid)
  model=NAME, model=[A,B]      models, instead of the grids' own
  cluster=NAME                 what the points run on, instead of the cluster the grid is meant for
  launcher=local|rehearse      on this machine's devices; or single ranks of any layout on one device
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


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 2 for what the user got wrong, 130 for Ctrl-C, 1 when points are left."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UltrasweepError as error:
        print(f"ultrasweep: {' '.join(str(error).split())}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("ultrasweep: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has gone: nothing is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that is not ours or has gone: the machine's matter, not a bug
        where = f" {error.filename}" if error.filename else ""
        print(f"ultrasweep: cannot use{where}: {error.strerror or error}", file=sys.stderr)
        return USAGE


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(f"usage: python -m sweep COMMAND [words] [options]\n\n{DESCRIPTION}\n{SWEEP_WORDS}")
        print("python -m sweep COMMAND --help has the options of each.")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        from results.provenance import code_provenance

        print(f"ultrasweep {code_provenance(Path(__file__).parent.parent)['ultrasweep_version'] or '(not installed)'}")
        return 0
    command = COMMANDS.get(name)
    if command is None:
        from sweep.grid import suggest

        raise UltrasweepError(f"no command {name!r}{suggest(name, COMMANDS)}")
    return command(rest)


def _plan(rest: list[str]) -> int:
    parser = _sweep_parser("plan", "Every point of the grids with its verdict; nothing is run.")
    parser.add_argument("--out", type=Path, metavar="FILE.parquet", help="write the ledger: one row a point")
    parser.add_argument("--top", type=_positive, default=40, metavar="N", help="rows of the last table (default 40)")
    options = parser.parse_intermixed_args(rest)
    from sweep.conffiles import ConfFolders
    from sweep.config import compose_sweep
    from sweep.expand import expand_all
    from sweep.ledger import write_ledger_file
    from sweep.machine import method_of, refuse_slurm
    from sweep.plan import known_answers, make_plan, refuse_hopeless
    from sweep.summary import print_plan

    config = compose_sweep(options.words, ConfFolders(tuple(options.conf)), extra_where=options.where)
    refuse_slurm(config)
    method = method_of(config)
    answers = known_answers(config.results_dir, method, config.cluster)
    plan = make_plan(config, expand_all(config.grids, config.models.__getitem__), method, answers)
    if options.out is not None:
        write_ledger_file(options.out, plan)
    refuse_hopeless(plan)
    console = _console()
    print_plan(plan, console, top=options.top)
    if options.out is not None:
        console.print(f"ledger: {options.out}", highlight=False)
    return 0


def _run(rest: list[str]) -> int:
    parser = _sweep_parser("run", "Plan, then run every point that is worth running, one after the other.")
    parser.add_argument("--plain", action="store_true", help="one line for each attempt instead of a live view")
    options = parser.parse_intermixed_args(rest)
    from sweep.conffiles import ConfFolders
    from sweep.run import enqueue, prepare, tell_end, tell_start

    prepared = prepare(options.words, ConfFolders(tuple(options.conf)), options.where)
    queued = enqueue(prepared)
    console = _console()
    tell_start(prepared, queued, console)
    from launchers.local import run_local

    summary = run_local(
        queued.sweep, prepared.settings, live=False if options.plain else None, command=_command("run", rest)
    )
    tell_end(queued.sweep, summary, _command("run", rest), console)
    return summary.exit_code


def _status(rest: list[str]) -> int:
    parser = _parser("status", "Where the sweeps below a folder stand, from their files alone.")
    parser.add_argument("path", type=Path, nargs="?", default=Path("results"), help="a sweep or a folder of sweeps")
    options = parser.parse_args(rest)
    from sweep.progress import print_status

    print_status(options.path, _console())
    return 0


def _retry(rest: list[str]) -> int:
    parser = _parser("retry", "Put finished points back into the queue; `run` with the same words then runs them.")
    parser.add_argument("path", type=Path, help="the sweep's folder, e.g. results/tiny")
    parser.add_argument("which", nargs="*", help="outcomes (crash, hang ...) or ids; default: all but ok and oom")
    options = parser.parse_args(rest)
    from sweep.progress import retry_points

    count = retry_points(options.path, options.which)
    hint = "; run the sweep again to run what waits" if count else ""
    print(f"{count} point{'' if count == 1 else 's'} put back{hint}")
    return 0


def _explain(rest: list[str]) -> int:
    parser = _parser("explain", "All that is known of one point: configuration, verdict, prediction, attempts.")
    parser.add_argument("id", help="an experiment's id, or a part that only it has (the hash at its end)")
    _add_results(parser)
    options = parser.parse_args(rest)
    from sweep.explain import print_explanation
    from sweep.lookup import Results

    print_explanation(Results(options.results).find(options.id), _console())
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
    print_difference(results.find(options.first), results.find(options.second), _console())
    return 0


COMMANDS: dict[str, Callable[[list[str]], int]] = {
    "plan": _plan,
    "run": _run,
    "status": _status,
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


def _add_results(parser: _Parser) -> None:
    parser.add_argument(
        "--results",
        type=Path,
        default=Path("results"),
        metavar="PATH",
        help="folder of sweeps, one sweep, or a ledger written by plan --out (default: results)",
    )


def _console() -> Console:
    from rich.console import Console

    console = Console()
    # Tables need room where nobody set a width: in a pipe or a log file.
    return console if console.is_terminal or console.width >= _MIN_WIDTH else Console(width=_MIN_WIDTH)


def _command(name: str, rest: Sequence[str]) -> str:
    import shlex

    return shlex.join(["python", "-m", "sweep", name, *rest])


def _positive(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())

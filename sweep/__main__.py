"""The command line: ``python -m sweep COMMAND`` (or ``ultrasweep COMMAND``).

Whatever a user can get wrong ends in one line on standard error and exit code 2. The commands themselves are in
`sweep.commands`.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from results.errors import UltrasweepError
from results.terminal import one_line

USAGE, INTERRUPTED = 2, 130

DESCRIPTION = """\
Plan and run sweeps over the parallel layouts of LLM training.

  plan     every point of a grid with its verdict, predicted memory and speed, and the price of the sweep
  run      plan, then run what is worth running; Ctrl-C stops cleanly, the same command goes on
           (under Slurm: submit and watch; Ctrl-C only stops watching)
  status   where the sweeps of a results folder stand
  watch    the same, live, until no point is left
  logs     the last lines that a point's ranks and its pilot have written
  cancel   take a sweep's jobs back from Slurm; its points wait for the next run
  retry    put failed points back into a sweep's queue
  explain  all that is known of one point
  diff     what two points do not share

examples:
  python -m sweep plan +grid=playbook
  python -m sweep plan +grid=llama8b_8gpu cluster=h100_ib400 grid.axes.tp=[1,2] --out plan.parquet
  python -m sweep run +grid=tiny
  python -m sweep run +grid=[llama1b_8gpu,llama8b_8gpu] name=one_node budget.gpu_hours=10
  python -m sweep run +grid=llama70b_512gpu launcher=rehearse
  python -m sweep run +grid=playbook launcher=slurm launcher.partition=main --detach
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit code: 0, 2 for what the user got wrong, 130 for Ctrl-C, 1 when points are left."""
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UltrasweepError as error:
        print(f"ultrasweep: {one_line(str(error))}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("ultrasweep: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader (head, less) has gone: nothing is left to tell
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, a folder that is not ours or has gone: the machine's matter, not a bug
        where = f" {error.filename}" if error.filename else ""
        print(one_line(f"ultrasweep: cannot use{where}: {error.strerror or error}"), file=sys.stderr)
        return USAGE


def _dispatch(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        from sweep.commands import SWEEP_WORDS

        print(f"usage: python -m sweep COMMAND [words] [options]\n\n{DESCRIPTION}\n{SWEEP_WORDS}")
        print("python -m sweep COMMAND --help has the options of each.")
        return 0
    name, rest = arguments[0], arguments[1:]
    if name == "--version":
        from results.provenance import code_provenance

        print(f"ultrasweep {code_provenance(Path(__file__).parent.parent)['ultrasweep_version'] or '(not installed)'}")
        return 0
    from sweep.commands import COMMANDS

    command = COMMANDS.get(name)
    if command is None:
        from workloads.checks import suggest

        raise UltrasweepError(f"no command {name!r}{suggest(name, COMMANDS)}")
    return command(rest)


if __name__ == "__main__":
    sys.exit(main())

"""Commands about a machine or a site: doctor."""

from __future__ import annotations

from argparse import Namespace

from results.text.command_line import Parser, path
from results.text.printable import printable
from results.text.terminal import open_console
from sweep.cli.command import Command, positive
from sweep.cli.help_texts import DOCTOR_EXAMPLES


def _doctor_arguments(parser: Parser) -> None:
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="OVERRIDE",
        help="cluster=NAME (needed with launcher=slurm), launcher=local or slurm and its options, results_dir=DIR",
    )
    parser.add_argument("--nodes", type=positive, default=1, metavar="N", help="nodes to check in one job (default: 1)")
    parser.add_argument(
        "--wait", type=positive, default=600, metavar="SECONDS", help="longest time for the job (default: 600)"
    )
    parser.add_argument(
        "--conf", action="append", default=[], type=path, metavar="DIR", help="folder with your own cluster/ files"
    )


def _doctor(options: Namespace) -> int:
    from sweep.composing.conffiles import ConfFolders
    from sweep.running.doctor import diagnose, print_diagnosis

    console = open_console(soft_wrap=True)
    folders = ConfFolders(tuple(options.conf))
    diagnosis = diagnose(
        options.overrides,
        folders,
        options.nodes,
        options.wait,
        lambda line: console.print(printable(line), highlight=False, markup=False),
    )
    if isinstance(diagnosis, str):
        print(printable(diagnosis.rstrip(), keep="\n\t"))
        return 0
    print_diagnosis(diagnosis, console)
    return diagnosis.exit_code


DOCTOR = Command(
    name="doctor",
    description=(
        "Check what must be true on a compute node, through one short Slurm job or on this machine. Each line is\n"
        "pass, fail or unknown, with the value and the remedy. Exit code: 0 nothing fails, 1 something does, 2 a\n"
        "mistake."
    ),
    arguments=_doctor_arguments,
    run=_doctor,
    epilog=DOCTOR_EXAMPLES,
)

"""``ultrasweep --print-completion SHELL``: the shell's completion of commands, options, their values and files."""

from __future__ import annotations

import argparse

from results.text.command_line import Parser, path
from sweep.cli.command import Command
from sweep.cli.commands import COMMANDS

SHELLS = ("bash", "zsh")


def completion_script(shell: str) -> str:
    """The script that completes the installed command ``ultrasweep`` in ``shell``, one of `SHELLS`.

    Raises `InvalidOption` for another shell.
    """
    import shtab

    parser = Parser(prog="ultrasweep", description="Plan and run sweeps over the parallel layouts of LLM training.")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--print-completion", choices=SHELLS, help="print the completion of a shell")
    if shell not in SHELLS:
        parser.error(f"--print-completion {shell}: not one of {', '.join(SHELLS)}")
    commands = parser.add_subparsers()
    for command in COMMANDS.values():
        _add(commands, command)
        for action in commands.choices[command.name]._actions:
            if action.type is path:
                action.complete = shtab.FILE  # type: ignore[attr-defined]
    return str(shtab.complete(parser, shell))


def _add(commands: argparse._SubParsersAction[Parser], command: Command) -> None:
    about = command.description.partition(". ")[0].rstrip(".")
    command.arguments(commands.add_parser(command.name, help=about, description=about))

"""The table of all commands of ``python -m sweep``, its help, and how one of them is run.

The reference of the command line (`docs.tools.write_reference`) is made from this table.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from results.text.command_line import InvalidOption
from sweep.cli.command import Command
from sweep.cli.help_texts import EXAMPLES, OVERRIDES
from sweep.cli.planning_commands import ADVISE, GRADE, MODEL, PLAN, PREDICT
from sweep.cli.point_commands import CARD, DIFF, EXPLAIN, EXPORT, VERIFY
from sweep.cli.running_commands import PARITY, PROBE, RUN, SEARCH
from sweep.cli.site_commands import CLUSTER, DOCTOR
from sweep.cli.sweep_commands import CANCEL, LOGS, RETRY, STATUS, WATCH

COMMANDS: Mapping[str, Command] = {
    command.name: command
    for command in (
        ADVISE,
        PLAN,
        MODEL,
        RUN,
        STATUS,
        WATCH,
        LOGS,
        CANCEL,
        RETRY,
        EXPLAIN,
        DIFF,
        EXPORT,
        CARD,
        VERIFY,
        GRADE,
        PREDICT,
        SEARCH,
        PARITY,
        PROBE,
        CLUSTER,
        DOCTOR,
    )
}
"""Every command, in the order of the help."""


def help_text() -> str:
    """Text of ``python -m sweep --help``: every command in one line, examples, and the overrides."""
    first_sentences = {name: command.description.partition(". ")[0] for name, command in COMMANDS.items()}
    commands = "\n".join(f"  {name:8} {sentence.rstrip('.')}" for name, sentence in first_sentences.items())
    return (
        "usage: python -m sweep COMMAND [OVERRIDE ...] [options]\n\n"
        f"Plan and run sweeps over the parallel layouts of LLM training.\n\n{commands}\n\n{EXAMPLES}\n{OVERRIDES}\n"
        "python -m sweep COMMAND --help has the options of each command. Completion of the installed command in\n"
        'bash or zsh: eval "$(ultrasweep --print-completion bash)"'
    )


def run_command(name: str, arguments: Sequence[str]) -> int:
    """Parse the arguments of one command, run it and return its exit code. Raises `UltrasweepError` for wrong
    arguments."""
    try:
        options = COMMANDS[name].parser().parse_intermixed_args(list(arguments))
    except InvalidOption as error:
        from sweep.cli.dashes import hint

        how = hint(name, str(error), arguments)
        raise InvalidOption(f"{error}; {how}" if how else str(error)) from None
    options.command_line = _command_line(name, arguments)
    return COMMANDS[name].run(options)


def _command_line(name: str, arguments: Sequence[str]) -> str:
    from results.tables.provenance import command_line

    return command_line(["python", "-m", "sweep", name, *arguments])

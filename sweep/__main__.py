"""The command line: ``python -m sweep COMMAND`` (or ``ultrasweep COMMAND``).

A mistake of the user ends with one line on standard error (several mistakes: one line each) and exit code 2. The
commands are listed in `sweep.cli.commands`.
"""

from __future__ import annotations

import errno
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from results.errors import UltrasweepError
from results.text.printable import OneLineFormatter, one_line

USAGE, INTERRUPTED = 2, 130
_FULL = (errno.ENOSPC, errno.EDQUOT)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Exit codes: 0; 1 when points are left; 2 after a mistake of the user; 130 after Ctrl-C."""
    warnings = logging.StreamHandler()
    warnings.setFormatter(OneLineFormatter("%(message)s"))
    logging.basicConfig(level=logging.WARNING, handlers=[warnings])
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except UltrasweepError as error:
        print("\n".join(_lines(error)), file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("ultrasweep: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # the reader of the output (head, less) has closed it
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:  # a full disk, no permission, a missing folder: not a bug
        what = f"use {error.filename}" if error.filename else "go on"
        cure = "; nothing is lost: free some and give the command again" if error.errno in _FULL else ""
        print(one_line(f"ultrasweep: cannot {what}: {error.strerror or error}{cure}"), file=sys.stderr)
        return USAGE


def _lines(error: UltrasweepError) -> list[str]:
    """The lines that tell the user of an error: one, or a heading and one for each of several mistakes."""
    if len(error.messages) < 2:
        return [f"ultrasweep: {one_line(str(error))}"]
    return [f"ultrasweep: {len(error.messages)} mistakes:", *(f"  {one_line(text)}" for text in error.messages)]


def _dispatch(arguments: list[str]) -> int:
    from sweep.cli.commands import COMMANDS, help_text, run_command

    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(help_text())
        return 0
    name = arguments[0]
    if name == "--version":
        from results.tables.provenance import code_provenance

        print(f"ultrasweep {code_provenance(Path(__file__).parent.parent)['ultrasweep_version'] or '(not installed)'}")
        return 0
    if name == "--print-completion":
        from sweep.cli.completion import completion_script

        print(completion_script(" ".join(arguments[1:])))
        return 0
    if name not in COMMANDS:
        from workloads.spec.checks import suggest

        raise UltrasweepError(f"no command {name!r}{suggest(name, COMMANDS)}")
    return run_command(name, arguments[1:])


if __name__ == "__main__":
    sys.exit(main())

"""``python -m docs.tools.write_search TABLE``: writes the tables of docs/search.md that are replays on the study."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console

from docs.tools.search_under_noise import table
from docs.tools.write_accuracy import put_section
from results.errors import UltrasweepError
from results.text import command_line
from sweep.composing.search_settings import Settings
from sweep.searching.recorded import read_recorded
from sweep.searching.replay import Trouble
from sweep.searching.search_replay import print_replay, replay_table

PAGE = Path(__file__).parents[1] / "search.md"
DRAWS = 8
TROUBLES = (Trouble(noise=0.04), Trouble(noise=0.04, failures=0.02, slow_node=1.2))
WIDTH = 1000
"""Columns of the console: no line of a table is broken."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 after a user's mistake."""
    parser = command_line.Parser(
        prog="python -m docs.tools.write_search",
        description="Writes the tables of docs/search.md that come from replays on the study.",
        allow_abbrev=False,
    )
    makers: dict[str, Callable[[Path], str]] = {"replay": _replay, "noise": _noise}
    parser.add_argument("table", type=command_line.path, metavar="TABLE", help="the study's raw table")
    parser.add_argument("--only", choices=makers, help="write this table alone")
    options: argparse.Namespace = parser.parse_args(argv)
    try:
        names = [options.only] if options.only else list(makers)
        for name in names:
            put_section(PAGE.read_text(), name, "")  # a replay takes minutes: a missing section is found before
        for name in names:
            write(name, makers[name](options.table))
        return 0
    except UltrasweepError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def write(name: str, contents: str) -> None:
    """Put a table between its marks in docs/search.md."""
    PAGE.write_text(put_section(PAGE.read_text(), name, contents))
    print(f"{PAGE.name}: {name}")


def _replay(path: Path) -> str:
    said = StringIO()
    print_replay(replay_table(path, Settings()), Settings(), Console(file=said, width=WIDTH))
    return said.getvalue().strip()


def _noise(path: Path) -> str:
    return "\n".join(table(read_recorded(path), Settings(), TROUBLES, range(DRAWS)))


if __name__ == "__main__":
    sys.exit(main())

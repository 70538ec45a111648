"""What commands print to a terminal: one console, one kind of table, and text that cannot disturb either."""

from __future__ import annotations

import logging
import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LEAST_WIDTH = 120
_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, movements, modes
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # titles, links, clipboard
    r"|\x1b[ -/]*[0-~]"
)
"""Escape sequences of terminals (ECMA-48). One that does not end is no sequence: only its first characters match."""


def open_console(*, soft_wrap: bool = False) -> Console:
    """A console on standard output, through which no text can command the terminal. In a pipe or a log file it is at
    least 120 characters wide, so that tables fit. ``soft_wrap``: lines are not folded but left to the terminal."""
    from results.console import SafeConsole

    console = SafeConsole(soft_wrap=soft_wrap)
    if console.is_terminal or console.width >= _LEAST_WIDTH:
        return console
    return SafeConsole(soft_wrap=soft_wrap, width=_LEAST_WIDTH)


def plain_table(*, title: str | None = None, show_footer: bool = False) -> Table:
    """A table without lines and without columns yet."""
    from rich.table import Table

    return Table(
        box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", show_footer=show_footer
    )


def printable(text: str, *, keep: str = "") -> str:
    """``text`` without the sequences that a terminal obeys, and with a mark for every other character that does not
    print, except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else "\N{REPLACEMENT CHARACTER}" for char in _SEQUENCE.sub("", text)
    )


def one_line(text: str) -> str:
    """``text`` in one printable line, with single spaces."""
    return printable(" ".join(text.split()))


class OneLineFormatter(logging.Formatter):
    """Warnings as single lines that cannot command the terminal."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))

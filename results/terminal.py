"""What commands print to a terminal: one console, one kind of table, and text that cannot disturb either."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LEAST_WIDTH = 120


def open_console() -> Console:
    """A console on standard output. In a pipe or a log file it is at least 120 characters wide, so that tables fit."""
    from rich.console import Console

    console = Console()
    return console if console.is_terminal or console.width >= _LEAST_WIDTH else Console(width=_LEAST_WIDTH)


def plain_table(*, title: str | None = None, show_footer: bool = False) -> Table:
    """A table without lines and without columns yet."""
    from rich.table import Table

    return Table(
        box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", show_footer=show_footer
    )


def printable(text: str, *, keep: str = "") -> str:
    """``text`` without characters that a terminal would obey, except those in ``keep``."""
    return "".join(char if char.isprintable() or char in keep else "\N{REPLACEMENT CHARACTER}" for char in text)


def one_line(text: str) -> str:
    """``text`` in one printable line, with single spaces."""
    return printable(" ".join(text.split()))

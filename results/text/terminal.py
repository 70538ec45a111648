"""Opens the console and makes the tables that commands print."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

_LEAST_WIDTH = 120


def open_console(*, soft_wrap: bool = False) -> Console:
    """Opens a console on standard output that removes control sequences from printed text. In a pipe or a log file it
    is at least 120 characters wide, so that tables fit. ``soft_wrap``: long lines are left to the terminal instead of
    being folded."""
    from results.text.console import SafeConsole

    console = SafeConsole(soft_wrap=soft_wrap)
    if console.is_terminal or console.width >= _LEAST_WIDTH:
        return console
    return SafeConsole(soft_wrap=soft_wrap, width=_LEAST_WIDTH)


def plain_table(*, title: str | None = None, show_footer: bool = False) -> Table:
    """Makes a table without lines, and without columns yet."""
    from rich.table import Table

    return Table(
        box=None, pad_edge=False, header_style="bold", title=title, title_justify="left", show_footer=show_footer
    )

"""What commands print to a terminal."""

from __future__ import annotations

import logging

import pytest
from rich.live import Live
from rich.text import Text

from results.text.printable import OneLineFormatter, one_line, printable
from results.text.terminal import open_console, plain_table

MARK = "\N{REPLACEMENT CHARACTER}"
TITLE = "\x1b]0;owned\x07"
HOSTILE = f"red \x1b[31mtext\x1b[0m, a title {TITLE}, \x1b[2J\x1b[1;1Hcleared, a bell\x07, C1 \x9b5n, back\b\b"
ATTACKS = ("\x1b", "\x9b", "\x07", "\b")


def test_text_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[31mb\tc") == f"ab{MARK}c"
    assert printable("a\tb", keep="\t") == "a\tb"
    assert one_line("  two\nlines \t of\x07 text ") == f"two lines of{MARK} text"
    assert printable(HOSTILE) == f"red text, a title , cleared, a bell{MARK}, C1 , back{MARK}{MARK}"


def test_a_sequence_that_does_not_end_hides_nothing() -> None:
    assert printable("\x1b]0;the last words of a rank") == "0;the last words of a rank"
    assert printable("before \x1b[") == "before "
    assert printable("\x1b") == MARK
    assert printable("\x1bPdata\x1b\\after") == "after"


def test_nothing_that_is_printed_commands_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever the way: a string, a text, a cell of a table, soft wrapped, or in a live view."""
    console = open_console()
    table = plain_table(title=HOSTILE)
    table.add_column(HOSTILE)
    table.add_row(HOSTILE)
    table.add_row(Text(HOSTILE))
    console.print(HOSTILE, markup=False, highlight=False)
    console.print(Text(HOSTILE), soft_wrap=True)
    console.print(table)
    open_console(soft_wrap=True).print(Text(HOSTILE))
    with Live(console=console) as live:
        live.update(Text(HOSTILE))
        console.print(HOSTILE)
    told = capsys.readouterr().out
    assert not [attack for attack in ATTACKS if attack in told]
    assert told.count("cleared") >= 8


def test_colours_of_our_own_pass(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    open_console().print(Text(f"{TITLE}bad", style="red"))
    told = capsys.readouterr().out
    assert told.startswith("\x1b[31m") and "bad" in told and "\x1b]" not in told


def test_warnings_are_single_printable_lines() -> None:
    record = logging.LogRecord("x", logging.WARNING, "", 0, f"%s cannot\nbe read{TITLE}", ("a\x1b[1m.parquet",), None)
    assert OneLineFormatter("%(message)s").format(record) == "a.parquet cannot be read"


def test_tables_have_room_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = plain_table(title="a title")
    table.add_column("name")
    table.add_row("x" * 100)
    console = open_console()
    assert console.width >= 120
    console.print(table)
    assert "x" * 100 in capsys.readouterr().out

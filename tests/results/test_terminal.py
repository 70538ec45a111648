"""What commands print to a terminal."""

from __future__ import annotations

import pytest

from results.terminal import one_line, open_console, plain_table, printable


def test_text_cannot_command_the_terminal() -> None:
    assert printable("a\x1b[31mb\tc") == "a\N{REPLACEMENT CHARACTER}[31mb\N{REPLACEMENT CHARACTER}c"
    assert printable("a\tb", keep="\t") == "a\tb"
    assert one_line("  two\nlines \t of\x07 text ") == "two lines of\N{REPLACEMENT CHARACTER} text"


def test_tables_have_room_in_a_pipe(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    table = plain_table(title="a title")
    table.add_column("name")
    table.add_row("x" * 100)
    console = open_console()
    assert console.width >= 120
    console.print(table)
    assert "x" * 100 in capsys.readouterr().out

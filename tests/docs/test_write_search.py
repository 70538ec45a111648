"""The writer of docs/search.md: a section is what the commands say of the same table; one without marks is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from docs.tools import search_under_noise, write_search
from sweep.__main__ import main
from tests.sweep.searching.spaces import table

DRAWS = 2
BEFORE = (
    "# A page\n\nBefore.\n\n<!-- replay: begin -->\nold\n<!-- replay: end -->\n\nBetween.\n\n"
    "<!-- noise: begin -->\nold\n<!-- noise: end -->\n\nAfter.\n"
)


@pytest.fixture
def page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "page.md"
    path.write_text(BEFORE)
    monkeypatch.setattr(write_search, "PAGE", path)
    monkeypatch.setattr(write_search, "DRAWS", DRAWS)
    return path


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    """Two models on eight devices."""
    path, frame = tmp_path / "rows.csv", table()
    frame[(frame["gpus"] == 8) & (frame["layers"] != frame["layers"].max())].to_csv(path, index=False)
    return path


def _words(text: str) -> str:
    """The text with every space and end of line as one space: a console breaks long lines."""
    return " ".join(text.split())


@pytest.mark.slow(seconds=4)
def test_the_sections_are_what_the_commands_say(page: Path, rows: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert write_search.main([str(rows)]) == 0
    text = page.read_text()
    capsys.readouterr()
    assert main(["search", "--replay", str(rows)]) == 0
    replayed = capsys.readouterr().out
    assert search_under_noise.main([str(rows), "--draws", str(DRAWS)]) == 0
    noisy = capsys.readouterr().out
    head, _, rest = text.partition("<!-- replay: begin -->")
    replay, _, rest = rest.partition("<!-- replay: end -->")
    between, _, rest = rest.partition("<!-- noise: begin -->")
    noise, _, tail = rest.partition("<!-- noise: end -->")
    assert (head, between, tail) == ("# A page\n\nBefore.\n\n", "\n\nBetween.\n\n", "\n\nAfter.\n")
    assert "| other models | search |" in replay and _words(replay) in _words(replayed)
    assert f"| noise {write_search.TROUBLES[0].noise:.1%} |" in noise and noise.strip() == noisy.strip()


@pytest.mark.slow
def test_one_section_alone(page: Path, rows: Path) -> None:
    assert write_search.main([str(rows), "--only", "noise"]) == 0
    text = page.read_text()
    assert "<!-- replay: begin -->\nold\n" in text and "<!-- noise: begin -->\nold\n" not in text


def test_a_missing_section_is_named_before_anything_is_replayed(
    page: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    without = BEFORE.replace("<!-- noise: begin -->", "")
    page.write_text(without)
    assert write_search.main([str(tmp_path / "not_read.csv")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == (
        "error: the page has no section noise: a line <!-- noise: begin --> and below it a line <!-- noise: end -->"
    )
    assert page.read_text() == without
    assert write_search.main([str(tmp_path / "not_read.csv"), "--only", "replay"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "not_read.csv" in line

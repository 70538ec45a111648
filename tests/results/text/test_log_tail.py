"""The last lines of logs: small ones, huge ones, binary ones and missing ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from results.text.log_tail import READ_BYTES, read_tail, tail_in_one_line


def test_small_log(tmp_path: Path) -> None:
    log = tmp_path / "a.log"
    log.write_text("one\n\ntwo\nthree\n")
    assert read_tail(log, 2) == (["two", "three"], False)
    assert read_tail(log, 4) == (["one", "", "two", "three"], True)
    assert read_tail(log, 3, skip_blank=True).lines == ["one", "two", "three"]
    assert tail_in_one_line(log, 3) == "one | two | three"


def test_only_the_end_of_a_huge_log_is_read(tmp_path: Path) -> None:
    log = tmp_path / "huge.log"
    with log.open("wb") as file:
        file.truncate(1 << 40)  # sparse: reading all of it would take hours
        file.seek(0, 2)
        file.write(b"\nlast \xff line\n")
    lines, whole = read_tail(log, 1)
    assert lines == ["last � line"]
    assert not whole


def test_a_line_longer_than_what_is_read_is_cut(tmp_path: Path) -> None:
    log = tmp_path / "long.log"
    log.write_text("x" * (READ_BYTES + 10))
    lines, whole = read_tail(log, 5)
    assert lines == ["x" * READ_BYTES]
    assert not whole


def test_missing_and_empty_logs(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_tail(tmp_path / "none.log", 3)
    assert tail_in_one_line(tmp_path / "none.log", 3) == ""
    (tmp_path / "empty.log").touch()
    assert read_tail(tmp_path / "empty.log", 3) == ([], True)

"""Reads the last lines of a log. Only its last 64 KiB are read, because a log may be larger than memory."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import BinaryIO, NamedTuple

from results.shared_filesystem.packed_folder import open_file
from results.shared_filesystem.whole_files import NotAFile

READ_BYTES = 64 * 2**10


class Tail(NamedTuple):
    lines: list[str]
    whole: bool
    """True if ``lines`` is the whole content of the file."""


def read_tail(path: Path, lines: int, *, skip_blank: bool = False) -> Tail:
    """The last ``lines`` lines of a text file, decoded as UTF-8 with a mark for every invalid byte; with ``skip_blank``
    the last ones that are not blank. The file may be packed with its folder.

    If the last 64 KiB begin inside the first line, its beginning is missing. Raises `OSError`.
    """
    with _open(path) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - READ_BYTES))
        text = file.read(READ_BYTES).decode(errors="replace")
    last_lines = [line for line in text.splitlines() if line.strip() or not skip_blank]
    return Tail(last_lines[-lines:], whole=size <= READ_BYTES and len(last_lines) <= lines)


def _open(path: Path) -> BinaryIO:
    """The log, which must be a regular file: a rank may have put anything in its place. Raises `OSError`."""
    try:
        return open_file(path)
    except NotAFile as error:
        raise OSError(errno.EINVAL, str(error)) from None


def tail_in_one_line(path: Path, lines: int) -> str:
    """The last lines that are not blank, joined by `` | ``, for a message; ``""`` if there are none or the file cannot
    be read."""
    try:
        return " | ".join(line.strip() for line in read_tail(path, lines, skip_blank=True).lines)
    except OSError:
        return ""

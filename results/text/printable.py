"""Text that cannot command a terminal: without escape sequences, with a mark for what does not print."""

from __future__ import annotations

import logging
import re

_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, movements, modes
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # titles, links, clipboard
    r"|\x1b[ -/]*[0-~]"
)
"""Escape sequences of terminals (ECMA-48). One that does not end is no sequence: only its first characters match."""


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

"""Makes text safe to print: removes escape sequences and replaces characters that are not printable."""

from __future__ import annotations

import logging
import re

_SEQUENCE = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"  # colours, movements, modes
    r"|(?:\x1b[\]PX^_]|[\x90\x98\x9d-\x9f])[^\x07\x1b\x9c]*(?:\x07|\x1b\\|\x9c)"  # titles, links, clipboard
    r"|\x1b[ -/]*[0-~]"
)
"""Escape sequences of terminals (ECMA-48). Of an unterminated sequence only the first characters match."""


def printable(text: str, *, keep: str = "") -> str:
    """``text`` without escape sequences, and with a replacement mark for every other character that is not printable,
    except those in ``keep``."""
    if text.isprintable():
        return text
    return "".join(
        char if char.isprintable() or char in keep else "\N{REPLACEMENT CHARACTER}" for char in _SEQUENCE.sub("", text)
    )


def one_line(text: str) -> str:
    """``text`` in one printable line, with single spaces."""
    return printable(" ".join(text.split()))


class OneLineFormatter(logging.Formatter):
    """Formats log records as single lines without control characters."""

    def format(self, record: logging.LogRecord) -> str:
        return one_line(super().format(record))

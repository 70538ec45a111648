"""Reads the answer of a node: a line of its log, and the file that it has written into the shared folder."""

from __future__ import annotations

import contextlib
import json
import time
from pathlib import Path
from typing import Any

from launchers.doctor.on_node import MARK
from results.shared_filesystem.whole_files import open_regular

LATE_S = 10.0
"""Seconds after the end of a job for which its files may still come, through a shared file system."""
_POLL_S = 0.25
_MOST_BYTES = 2**20


def parse_answer(line: str, token: str) -> dict[str, Any] | None:
    """What a node has printed for this token in one line; None for another line."""
    if not line.startswith(f"{MARK} {{"):
        return None
    with contextlib.suppress(ValueError):
        facts = json.loads(line.removeprefix(MARK))
        if isinstance(facts, dict) and facts.get("token") == token:
            return facts
    return None


def answer_seen(folder: Path, facts: dict[str, Any], token: str) -> bool:
    """Whether the file that a node says it has written is here, with its content; waits some seconds for it."""
    name = facts["shared"]["written"]
    if not isinstance(name, str) or "/" in name:
        return False
    until = time.monotonic() + LATE_S
    while read_or_empty(folder / name) != token:
        if time.monotonic() > until:
            return False
        time.sleep(_POLL_S)
    return True


def read_or_empty(path: Path) -> str:
    """The text of a file; empty where there is none."""
    try:
        with open_regular(path) as file:
            return file.read(_MOST_BYTES).decode(errors="replace")
    except (OSError, ValueError):
        return ""

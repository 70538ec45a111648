"""What docs/json.md says about the JSON documents of commands, and how a command's document is read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sweep.__main__ import main

PAGE = (Path(__file__).parents[2] / "docs" / "json.md").read_text()


def documented(command: str) -> set[str]:
    """Names in the first cells of the table of a command."""
    section = PAGE.partition(f"\n## {command}\n")[2].partition("\n## ")[0]
    return set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| (`.*?) \|", section, re.MULTILINE))))


def said_of(command: str) -> set[str]:
    """Every name in the section of a command."""
    return set(re.findall(r"`(\w+)`", PAGE.partition(f"\n## {command}\n")[2].partition("\n## ")[0]))


def printed(words: list[str], capsys: pytest.CaptureFixture[str], code: int = 0) -> dict[str, Any]:
    """The document that a command prints: all of its standard output."""
    capsys.readouterr()
    assert main([*words, "--json"]) == code
    document = json.loads(capsys.readouterr().out, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert isinstance(document, dict)
    return document


def numbers(document: object) -> Iterator[float]:
    """Every number of a document."""
    if isinstance(document, dict):
        document = list(document.values())
    if isinstance(document, list):
        for one in document:
            yield from numbers(one)
    elif isinstance(document, int | float) and not isinstance(document, bool):
        yield document

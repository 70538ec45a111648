"""The report's user page keeps up with its figures and options."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from analysis.figures import registry

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "report.md").read_text()


def test_every_figure_has_its_question_and_no_other_is_promised() -> None:
    table = PAGE.split("## What each figure answers")[1].split("\n## ")[0]
    named = {
        name
        for row in table.splitlines()
        if row.startswith("| `")
        for name in re.findall(r"`(\w+)`", row.split("|")[1])
    }
    assert named == {spec.name for spec in registry.FIGURES}


@pytest.mark.slow
@pytest.mark.parametrize("command", ["report", "compare"])
def test_every_option_is_described(command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", f"analysis.{command}", "--help"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=150,
    )
    options = set(re.findall(r"--[a-z][a-z-]+", done.stdout)) - {"--help"}
    assert len(options) >= 5
    assert {option for option in options if f"`{option}" not in PAGE} == set()

"""Runs the commands of a page whose outputs it shows.

What an earlier command of the page writes with ``--out`` and what the reader saves are there. Commands that take long,
need a GPU, Slurm or an absent file are left out.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
import tempfile
from itertools import pairwise
from pathlib import Path

from docs.tools.write_examples.lines import Finding, compared
from docs.tools.write_examples.shown import PROGRAM, examples, saved_files
from tests.docs.pages import ROOT, code_lines, write_conf

CHEAP = ("--help", "advise", "card", "explain", "export", "model", "plan", "predict", "search --replay", "status")
"""Commands that print the same each time on a CPU, in seconds."""


def look_through(path: Path) -> list[Finding]:
    """Runs the commands of a page whose outputs it shows, in a folder with the files of the page alone."""
    page = path.read_text()
    findings: list[Finding] = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_conf(page, folder)
        for name, text in saved_files(page).items():
            (folder / name).write_text(text)
        for example in examples(page):
            try:
                if reason := _prepared(example.command, page, path.parent, folder):
                    says = f"left out: {example.command or 'an output'} ({reason})"
                    findings.append(Finding(line=example.line, says=says, is_fault=False))
                else:
                    findings += compared(example, _printed(example.command, folder))
            except subprocess.CalledProcessError as error:
                says = f"{shlex.join(error.cmd)} fails: {error.stderr.strip()}"
                findings.append(Finding(line=example.line, says=says))
    return findings


def _prepared(command: str, page: str, beside: Path, folder: Path) -> str:
    """Puts the files that a command reads into the folder; why it is not run, if so."""
    if not command:
        return "the page does not show its command"
    if not command.startswith(tuple(PROGRAM + cheap for cheap in CHEAP)):
        return "not among the commands that take seconds on a CPU"
    if "axes.engine=" in command:
        return "depends on the engines that are installed"
    words = shlex.split(command)
    for before, name in pairwise(words):
        name = name.partition("=")[2] or name
        is_file = before != "--out" and re.fullmatch(r"[\w./-]+", name) and re.search(r"/|\.[a-z]+$", name)
        if is_file and (reason := _brought(name, page, beside, folder)) is not None:
            return reason
    return ""


def _brought(name: str, page: str, beside: Path, folder: Path) -> str | None:
    """Puts a file or a folder that a command names into the folder; says so where there is none."""
    if (folder / name).exists():
        return None
    for line in code_lines(page):
        if line.startswith(PROGRAM) and f"--out {name}" in line:
            _printed(line, folder)
            return None
    if "/" in name and (source := next((base / name for base in (beside, ROOT) if (base / name).exists()), None)):
        if source.is_file():  # its folder is linked: a sweep's files are read from their own folder alone
            name, source = str(Path(name).parent), source.parent
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(source)
        return None
    return f"needs {name}, which does not exist"


def _printed(command: str, folder: Path) -> list[str]:
    """The lines that a command prints, and those of the text that it writes."""
    words = shlex.split(command)
    paths = [str(ROOT), str(ROOT / "sweep" / "python")]
    done = subprocess.run(
        [sys.executable, *words[1:]],
        cwd=folder,
        env={**os.environ, "COLUMNS": "1000", "PYTHONPATH": os.pathsep.join(paths), "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
        check=True,
    )
    text = done.stdout + done.stderr
    if "--out" in words and (out := folder / words[words.index("--out") + 1]).suffix in (".csv", ".yaml"):
        text += out.read_text()
    return [line.rstrip() for line in text.splitlines()]

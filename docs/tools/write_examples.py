"""Brings the outputs that pages show below their commands up to date, by running the commands.

``python -m docs.tools.write_examples`` reports shown lines that differ from what the command prints now (exit status
1); with ``--write`` it puts the printed lines in their place. A shown line belongs to the printed line with the same
words: all but numbers and ids, however much space is between them. Shown lines keep their order; printed ones may be
left out, and so may last columns of them; ``...`` stands for any words. A shown line without its printed line is
reported, and left to a person.

An output is a plain block of code after a command, with a paragraph between them at most. Of several commands that
paragraph names the one: "`advise` prints". What an earlier command of the page writes with ``--out``, and a block that
the reader saves (``as `FILE`:``), are there. Commands that take long, need a GPU, Slurm or an absent file are left out.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from operator import itemgetter
from pathlib import Path

from tests.docs.pages import ROOT, WRITTEN_BY_HAND, code_lines, name_of, write_conf

CHEAP = ("--help", "advise", "card", "explain", "export", "model", "plan", "predict", "search --replay", "status")
"""Commands that print the same each time on a CPU, in seconds."""
PROGRAM = "python -m sweep "
NUMBER = r"(?:\b[0-9a-f]{8}\b|(?<![A-Za-z_0-9])\d+(?:[.,]\d+)*(?:e[-+]\d+)?)"
"""The id of a point, or a number that is no part of a name (``8B`` has one, ``fp8`` has none)."""
ELLIPSIS = re.compile(r"\.\.\.|…")
_TOKEN = re.compile(rf"(?P<space>\s+)|(?P<number>{NUMBER})|(?P<other>.)")
_SAVED = re.compile(r"as `([\w.]+)`:\n")
_PART = re.compile(
    r"^(?P<indent> *)```(?P<language>\w*)\n(?P<code>(?s:.*?))^ *```$|^(?! *```).*\S.*\n(?:(?! *```).*\S.*\n)*", re.M
)
"""A block of code or a paragraph; commands are a paragraph that is indented."""


@dataclass(frozen=True, kw_only=True)
class Example:
    """A command of a page and the block that shows what it prints."""

    line: int
    """That of the page on which the shown lines begin, from 1."""
    command: str
    """Empty: the page has none before the block, or does not say which of several."""
    shown: Sequence[str]
    indent: str = ""
    """Spaces before the block, which ``shown`` does not have."""


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A shown line that differs from what is printed, or a block that was left out."""

    line: int
    says: str
    new: str | None = None
    """The whole line to write; null: a person has to see."""
    is_fault: bool = True


def examples(page: str) -> Iterator[Example]:
    """Every output that a page shows."""
    asked: list[str] = []
    between: list[str] = []
    for part in _PART.finditer(page):
        if part["language"] is None:
            if found := [line for line in code_lines(part[0]) if re.match(r"(python|make|pip) ", line)]:
                asked, between = found, []
            else:
                between.append(part[0])
        elif part["language"]:
            asked, between = [f"a block of {part['language']}"], []
        elif between and _SAVED.search(between[-1]):
            asked = []
        else:
            named = {name for text in between for name in re.findall(r"`(\w+)` prints", text)}
            ones = [one for one in asked if not named or one.removeprefix(PROGRAM).split()[0] in named]
            shown = [line.removeprefix(part["indent"]) for line in part["code"].splitlines()]
            line = page.count("\n", 0, part.start("code")) + 1
            command = ones[0] if len(ones) == 1 and len(between) < 2 else ""
            yield Example(line=line, command=command, shown=shown, indent=part["indent"])
            asked = []


def saved_files(page: str) -> dict[str, str]:
    """Blocks that the reader saves, by the name of the file."""
    return dict(re.findall(_SAVED.pattern + r"\n```\n(.*?)^```$", page, re.DOTALL | re.MULTILINE))


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


def renewed(page: str, findings: Sequence[Finding]) -> str:
    """The page with the printed lines in the place of the shown ones that differ from them."""
    lines = page.splitlines(keepends=True)
    for finding in findings:
        if finding.new is not None:
            lines[finding.line - 1] = f"{finding.new}\n"
    return "".join(lines)


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
    if source := next((base / name for base in (beside, ROOT) if (base / name).exists()), None):
        if source.is_file():  # its folder is linked: a sweep's files are read from their own folder alone
            name, source = str(Path(name).parent), source.parent
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).symlink_to(source)
        return None
    for line in code_lines(page):
        if line.startswith(PROGRAM) and f"--out {name}" in line:
            _printed(line, folder)
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


def compared(example: Example, printed: Sequence[str]) -> list[Finding]:
    """What differs between the shown lines of a block and the printed ones."""
    wanted = [n for n, line in enumerate(example.shown) if ELLIPSIS.sub("", line).strip()]
    partners = _partners([example.shown[n] for n in wanted], printed)
    findings = []
    for n, new in zip(wanted, partners, strict=True):
        old = example.shown[n]
        if new is None:
            says = f"nothing that is printed has these words, in this order of lines: {old.strip()}"
            findings.append(Finding(line=example.line + n, says=says))
        elif new != old:
            findings.append(Finding(line=example.line + n, says=f"differs\n- {old}\n+ {new}", new=example.indent + new))
    return findings


def _partners(shown: Sequence[str], printed: Sequence[str]) -> Sequence[str | None]:
    """For every shown line the printed one with its words, or null: as many as possible, then those most alike."""
    best: list[tuple[float, tuple[str | None, ...]]] = [(0.0, ())] * (len(printed) + 1)
    """By the printed line to begin with: the best score of the shown lines so far, from the last one, and partners."""
    for line in reversed(shown):
        pattern, marks = _pattern(line), [*ELLIPSIS.findall(line), ""]
        with_line = [(best[-1][0], (None, *best[-1][1]))]
        for m in reversed(range(len(printed))):
            choices = [with_line[-1], (best[m][0], (None, *best[m][1]))]
            if found := pattern.match(printed[m]):
                new = "".join(piece + mark for piece, mark in zip(found.groups(), marks, strict=True))
                choices.append((best[m + 1][0] + 1000 + _alike(line, printed[m]), (new, *best[m + 1][1])))
            with_line.append(max(choices, key=itemgetter(0)))
        best = with_line[::-1]
    return best[0][1]


def _alike(one: str, other: str) -> float:
    """Which part of the words and numbers of two lines with the same words is equal."""
    ours, theirs = one.split(), other.split()
    return sum(a == b for a, b in zip(ours, theirs, strict=False)) / max(len(ours), len(theirs))


def _pattern(shown: str) -> re.Pattern[str]:
    """Matches lines with the words of a shown line; a group each for the parts between the places of ``...``."""
    pieces = [
        "".join(r"\s+" if one["space"] else NUMBER if one["number"] else re.escape(one[0]) for one in tokens)
        for tokens in map(_TOKEN.finditer, ELLIPSIS.split(shown.strip()))
    ]
    return re.compile(r"(\s*" + r").*(".join(pieces) + r")(?:\s\s.*)?$")


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.tools.write_examples", description=__doc__.splitlines()[0])
    parser.add_argument("pages", nargs="*", type=Path, help="only these pages")
    parser.add_argument("--write", action="store_true", help="write the lines that differ anew")
    options = parser.parse_args()
    is_stale = False
    for path in [path.resolve() for path in options.pages] or WRITTEN_BY_HAND:
        findings = look_through(path)
        for finding in findings:
            print(f"{name_of(path)}:{finding.line}: {finding.says}")
        if options.write:
            path.write_text(renewed(path.read_text(), findings))
        is_stale |= any(one.is_fault and not (options.write and one.new) for one in findings)
    return int(is_stale)


if __name__ == "__main__":
    sys.exit(main())

"""The printed line of every shown line, and what differs.

A shown line belongs to the printed line with the same words: all but numbers and ids, however much space is between
them. Shown lines keep their order; printed ones may be left out, and so may last columns of them; ``...`` stands for
any words. A shown line without its printed line is left to a person.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from operator import itemgetter

from docs.tools.write_examples.shown import Example

NUMBER = r"(?:\b[0-9a-f]{8}\b|(?<![A-Za-z_0-9])\d+(?:[.,]\d+)*(?:e[-+]\d+)?)"
"""The id of a point, or a number that is no part of a name (``8B`` has one, ``fp8`` has none)."""
ELLIPSIS = re.compile(r"\.\.\.|…")
_TOKEN = re.compile(rf"(?P<space>\s+)|(?P<number>{NUMBER})|(?P<other>.)")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """A shown line that differs from what is printed, or a block that was left out."""

    line: int
    says: str
    new: str | None = None
    """The whole line to write; null: a person has to see."""
    is_fault: bool = True


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


def renewed(page: str, findings: Sequence[Finding]) -> str:
    """The page with the printed lines in the place of the shown ones that differ from them."""
    lines = page.splitlines(keepends=True)
    for finding in findings:
        if finding.new is not None:
            lines[finding.line - 1] = f"{finding.new}\n"
    return "".join(lines)

"""Lines of a script: comments and long expressions are broken into several."""

from __future__ import annotations

import re
import textwrap
from itertools import pairwise

WIDTH = 120
_STEP = "  "
_PARTS = re.compile(r'"(?:[^"\\]|\\.)*"|`(?:[^`\\]|\\.)*`|[\[\](){},]')
"""Texts, which are skipped, and the signs at which a line may be broken."""
_OPERATORS = re.compile(_PARTS.pattern + r"| (?:&&|\|\||[-+*?:]) ")


def wrapped(script: str) -> str:
    """The script with lines of at most `WIDTH` characters where they can be broken."""
    return "\n".join(part for line in script.split("\n") for part in _broken(line))


def _broken(line: str) -> list[str]:
    if len(line) <= WIDTH:
        return [line]
    indent = line[: len(line) - len(line.lstrip())]
    if line.lstrip().startswith("/** "):
        words = line.strip().removeprefix("/** ").removesuffix(" */")
        inner = textwrap.wrap(words, WIDTH - len(indent) - 3, break_long_words=False)
        return [f"{indent}/**", *(f"{indent} * {one}" for one in inner), f"{indent} */"]
    group = _widest(line)
    if group is None:
        return _at_operators(line, indent)
    start, end, commas = group
    bounds = [start, *commas, end]
    parts = [line[a + 1 : b].strip() for a, b in pairwise(bounds)]
    if not parts[-1]:
        parts.pop()
    inner = [one for part in parts for one in _broken(f"{indent}{_STEP}{part},")]
    if line[start] == "(":
        inner[-1] = inner[-1].removesuffix(",")
    return [*_broken(line[: start + 1]), *inner, *_broken(f"{indent}{line[end:]}")]


def _at_operators(line: str, indent: str) -> list[str]:
    """The line broken before operators that are in no brackets."""
    depth, places = 0, [0]
    for match in _OPERATORS.finditer(line):
        depth += {"(": 1, "[": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(match.group(), 0)
        if depth == 0 and match.group()[0] == " ":
            places.append(match.start())
    lines: list[str] = []
    for start, end in pairwise([*places, len(line)]):
        if lines and len(lines[-1]) + end - start <= WIDTH:
            lines[-1] += line[start:end]
        else:
            lines.append(f"{indent}{_STEP}{line[start:end].strip()}" if lines else line[:end])
    return lines


def _widest(line: str) -> tuple[int, int, list[int]] | None:
    """(start, end, commas) of the longest outermost pair of brackets; None if there is none to break."""
    open_: list[int] = []
    commas: list[int] = []
    found: list[tuple[int, int, list[int]]] = []
    for match in _PARTS.finditer(line):
        sign, at = match.group(), match.start()
        if sign in "([{":
            if not open_:
                commas = []
            open_.append(at)
        elif sign in ")]}" and open_:
            start = open_.pop()
            if not open_:
                found.append((start, at, commas))
        elif sign == "," and len(open_) == 1:
            commas.append(at)
    found = [one for one in found if one[1] - one[0] > WIDTH // 3]
    return max(found, key=lambda one: one[1] - one[0], default=None)

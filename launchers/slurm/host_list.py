"""Expands Slurm's short form of node names, ``node[01-04,17],gpu3``, without ``scontrol``, which images lack."""

from __future__ import annotations

import itertools
import re

MOST_NODES = 65_536
"""Maximum number of nodes of a cluster in Slurm. A list of more names is taken for damaged."""
_PART = re.compile(r"(?:[^,\[\]]|\[[0-9,-]+\])+")
_RANGE = re.compile(r"([0-9]+)(?:-([0-9]+))?")


def hostnames(nodes: str) -> list[str]:
    """The names in a list of nodes; empty for a text that is no such list."""
    if _PART.sub("", nodes).strip(",") or not nodes:
        return []
    names: list[str] = []
    for part in _PART.findall(nodes):
        # Texts and numbers in brackets take turns.
        pieces = [_numbers(piece) if at % 2 else [piece] for at, piece in enumerate(re.split(r"\[|\]", part))]
        names += ["".join(words) for words in itertools.islice(itertools.product(*pieces), MOST_NODES + 1)]
        if len(names) > MOST_NODES:
            return []
    return names


def _numbers(text: str) -> list[str]:
    """``01-03,17`` as ``01``, ``02``, ``03`` and ``17``; empty for other text, or for too many numbers."""
    numbers: list[str] = []
    for part in text.split(","):
        match = _RANGE.fullmatch(part)
        if match is None:
            return []
        first, last = int(match[1]), int(match[2] or match[1])
        if last - first >= MOST_NODES:
            return []
        numbers += [f"{number:0{len(match[1])}d}" for number in range(first, last + 1)]
    return numbers

"""The outputs that a page shows, and the files that its reader saves.

An output is a plain block of code after a command, with a paragraph between them at most. Of several commands that
paragraph names the one: "`advise` prints".
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from tests.docs.pages import code_lines

PROGRAM = "python -m sweep "
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

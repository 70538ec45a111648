"""Reads the options of a YAML file with their meanings from its comments: behind an option or on the lines above it.

Only what the files of ``sweep/conf`` need is supported: nested mappings, and values that fit on one line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_OPTION = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?: +(?P<value>.*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    name: str
    """Name with those of the enclosing mappings: ``plan.deadline.base_s``."""
    default: str
    """Value as in the file."""
    meaning: str


@dataclass(slots=True)
class OptionSection:
    """Options between two blank lines."""

    heading: str = ""
    """The comment after the blank line."""
    options: list[Option] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FileOptions:
    intro: str
    """The comment on the file's first lines."""
    sections: tuple[OptionSection, ...]

    def by_name(self) -> dict[str, Option]:
        return {option.name: option for section in self.sections for option in section.options}


def read_options(path: Path) -> FileOptions:
    """The options of one file in order, without Hydra's ``defaults`` list."""
    sections = [OptionSection()]
    intro = ""
    comment: list[str] = []
    above: list[tuple[int, str]] = []
    for number, line in enumerate([*path.read_text().splitlines(), ""]):
        stripped = line.strip()
        if stripped.startswith("#"):
            comment.append(stripped.removeprefix("#").strip())
            continue
        if number == len(comment) and comment:  # only comments so far
            intro, comment = " ".join(comment), []
        if not stripped:
            sections.append(OptionSection())
            continue
        match = _OPTION.fullmatch(line)
        if match is None:  # an entry of a list, or a text over several lines
            comment = []
            continue
        section = sections[-1]
        if not section.options and comment and not match["indent"]:
            section.heading, comment = " ".join(comment), []
        above = [(indent, key) for indent, key in above if indent < len(match["indent"])]
        above.append((len(match["indent"]), match["key"]))
        value, _, behind = (match["value"] or "").partition("# ")
        if value.strip():
            meaning = " ".join([*comment, behind.strip()]).strip()
            name = ".".join(key for _, key in above)
            section.options.append(Option(name=name, default=value.strip(), meaning=meaning))
        comment = []
    return FileOptions(intro, tuple(section for section in sections if section.options))

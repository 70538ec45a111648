"""Options of a YAML file with their meanings, which stand in its comments: behind an option or on the lines above it.

Only what the files of ``sweep/conf`` use is understood: nested mappings, and values that fit on one line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

_OPTION = re.compile(r"(?P<indent> *)(?P<key>[A-Za-z_]\w*):(?: +(?P<value>.*))?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    name: str
    """With the names of the mappings around it: ``plan.deadline.base_s``."""
    default: str
    """As the file has it."""
    meaning: str


@dataclass(slots=True)
class Section:
    """Options between two blank lines."""

    heading: str = ""
    """The comment after the blank line."""
    options: list[Option] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class FileOptions:
    intro: str
    """The comment on the file's first lines."""
    sections: tuple[Section, ...]

    def by_name(self) -> dict[str, Option]:
        return {option.name: option for section in self.sections for option in section.options}


def read_options(path: Path) -> FileOptions:
    """The options of one file in its order; a ``defaults`` list (Hydra's) is not among them."""
    sections = [Section()]
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
            sections.append(Section())
            continue
        found = _OPTION.fullmatch(line)
        if found is None:  # an entry of a list, or a text over several lines
            comment = []
            continue
        section = sections[-1]
        if not section.options and comment and not found["indent"]:
            section.heading, comment = " ".join(comment), []
        above = [(indent, key) for indent, key in above if indent < len(found["indent"])]
        above.append((len(found["indent"]), found["key"]))
        value, _, behind = (found["value"] or "").partition("# ")
        if value.strip():
            meaning = " ".join([*comment, behind.strip()]).strip()
            name = ".".join(key for _, key in above)
            section.options.append(Option(name=name, default=value.strip(), meaning=meaning))
        comment = []
    return FileOptions(intro, tuple(section for section in sections if section.options))

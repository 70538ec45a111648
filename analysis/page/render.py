"""The report's page: one HTML file that holds its rows and scripts and loads nothing from a server.

Figures are files beside it; the gallery at its end loads them when it is opened.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
GENERATOR = "ultrasweep analysis.report"


class Sentence(NamedTuple):
    """A sentence in two parts: the conclusion, which the page sets in bold, and its basis."""

    concluded: str
    rest: str = ""
    mark: Literal["good", "doubt", "bad"] = "good"


@dataclass(frozen=True, slots=True)
class DrawnFigure:
    """A figure of one cohort: its files, or the reason why it was not drawn."""

    name: str
    section: str
    title: str
    caption: str
    files: tuple[str, ...] = ()
    """Names of its files under ``figures/``."""
    missing: str | None = None

    @property
    def shown(self) -> str | None:
        """File for the preview in a browser: the PNG, otherwise the SVG."""
        pictures = [file for kind in (".png", ".svg") for file in self.files if file.endswith(kind)]
        return pictures[0] if pictures else None


@dataclass(frozen=True, slots=True)
class PageTable:
    """Table for reading: cells as texts, and the total number of rows."""

    header: list[str]
    rows: list[list[str]]
    total: int
    title: str = ""
    """Heading above the table; empty if the page has its own."""


@dataclass(frozen=True, slots=True)
class SideBySide:
    """Results of several training engines on the same layouts (`analysis.page.engines_page`)."""

    sentences: list[str]
    winners: PageTable
    layouts: PageTable
    files: tuple[str, ...]
    """Names of the figure's files under ``figures/``."""


@dataclass(frozen=True, slots=True)
class Section:
    """Content on a cohort that Python writes into the page. Scripts draw answer, map, causes and cost from the rows."""

    slug: str
    title: str
    meaning: str
    cautions: list[str]
    """Warnings that apply to all numbers of these rows."""
    headlines: list[Sentence]
    best: list[str]
    failed: list[str]
    facts: list[Sentence]
    trust: list[str]
    figures: list[DrawnFigure]
    winners: PageTable
    failures: PageTable

    @property
    def drawn(self) -> list[DrawnFigure]:
        return [figure for figure in self.figures if figure.missing is None]

    @property
    def missing(self) -> list[DrawnFigure]:
        return [figure for figure in self.figures if figure.missing is not None]


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    name: str
    """Short title, a word or two."""
    source: str
    made_at: str
    version: str
    run: list[str]
    warnings: list[str]
    sections: list[Section]
    rehearsal: list[str]
    claims: str | None
    """How many of the study's claims hold, for the link to their page; None without such a page."""
    tables: list[str]
    """Names of the files under ``tables/``."""
    engines: SideBySide | None = None
    """Comparison of engines; None if there is only one."""


@dataclass(frozen=True, slots=True)
class Parts:
    """Parts of the page other than its words. ``late`` and ``runs`` are deflated (`analysis.page.embed`)."""

    styles: Sequence[str]
    scripts: Sequence[str]
    late: Mapping[str, str]
    """Texts by the id of the element that holds them."""
    runs: Mapping[str, str]
    """Variables of ``explorer/runs.html``."""


def render(page: Page, parts: Parts) -> str:
    """The page as text; everything that comes from rows is escaped."""
    return (
        environment()
        .get_template("report.html")
        .render(
            page=page,
            styles=parts.styles,
            scripts=parts.scripts,
            late=parts.late,
            runs=parts.runs,
            generator=GENERATOR,
        )
    )


def environment() -> Environment:
    """Loads templates from ``templates/``; every inserted value is escaped."""
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def source(name: str) -> str:
    """Text of a file below ``templates/``."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def compact_style(name: str) -> str:
    """A style sheet below ``templates/`` without comments and the spaces between its signs; texts in quotes stay."""
    pieces = re.split(r'("[^"]*")', re.sub(r"/\*.*?\*/", "", source(name), flags=re.DOTALL))
    signs = re.compile(r"\s*([{};,>])\s*|(?<=:)\s+")
    return "".join(piece if place % 2 else signs.sub(r"\1", piece) for place, piece in enumerate(pieces)).strip()


def compact_script(name: str) -> str:
    """A script below ``templates/`` without comments that begin a line, empty lines and indentation. Texts in
    backticks over several lines are HTML, in which indentation means nothing."""
    comment = re.compile(r"^\s*(?://[^\n]*|/\*(?:(?!\*/).)*\*/)\s*$", re.MULTILINE | re.DOTALL)
    lines = comment.sub("", source(name)).split("\n")
    return "\n".join(filter(None, map(str.strip, lines)))


def style_sheet() -> str:
    return source("report.css")

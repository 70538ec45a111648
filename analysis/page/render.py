"""The report as one HTML file: figures embedded, no request to anywhere."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_TEMPLATES = Path(__file__).resolve().parent.parent / "templates"
GENERATOR = "ultrasweep analysis.report"


@dataclass(frozen=True, slots=True)
class DrawnFigure:
    """A figure of one cohort: its files, or the reason why it was not drawn."""

    name: str
    section: str
    title: str
    caption: str
    files: tuple[str, ...] = ()
    """Names of its files under ``figures/``."""
    embedded: str = ""
    """The picture as a data URI."""
    missing: str | None = None


@dataclass(frozen=True, slots=True)
class PageTable:
    """A table that is read: cells as texts, and how many rows there are in all."""

    header: list[str]
    rows: list[list[str]]
    total: int
    title: str = ""
    """Above the table; empty where the page has its own heading."""


@dataclass(frozen=True, slots=True)
class Section:
    """What the page says of one cohort."""

    slug: str
    title: str
    meaning: str
    cautions: list[str]
    """What must be known before any number of these rows is read."""
    best: list[str]
    failed: list[str]
    trust: list[str]
    figures: list[DrawnFigure]
    winners: PageTable
    ranked: PageTable
    failures: PageTable

    def figures_of(self, section: str) -> list[DrawnFigure]:
        """Those that were drawn."""
        return [figure for figure in self.figures if figure.section == section and figure.missing is None]

    @property
    def missing(self) -> list[DrawnFigure]:
        return [figure for figure in self.figures if figure.missing is not None]


@dataclass(frozen=True, slots=True)
class Page:
    title: str
    source: str
    made_at: str
    version: str
    run: list[str]
    warnings: list[str]
    sections: list[Section]
    rehearsal: list[str]
    claims: PageTable
    """The study's claims on each measured part; no rows when there is none."""
    tables: list[str]
    """Names of the files under ``tables/``."""
    explorer: str | None
    """Name of the explorer's page beside this one."""


def render(page: Page) -> str:
    """The page as text; everything that comes from rows is escaped."""
    return environment().get_template("report.html").render(page=page, style=style_sheet(), generator=GENERATOR)


def environment() -> Environment:
    """Where templates come from; everything put into one is escaped."""
    return Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def source(name: str) -> str:
    """The text of a file below ``templates/``."""
    return (_TEMPLATES / name).read_text(encoding="utf-8")


def style_sheet() -> str:
    return source("report.css")

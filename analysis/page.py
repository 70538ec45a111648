"""The report as one HTML file: figures embedded, no request to anywhere."""

from __future__ import annotations

import base64
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

_TEMPLATES = Path(__file__).resolve().parent / "templates"
GENERATOR = "ultrasweep analysis.report"


@dataclass(frozen=True, slots=True)
class DrawnFigure:
    """A figure of one cohort: its files, or the reason why it was not drawn."""

    name: str
    section: str
    title: str
    caption: str
    png: Path | None = None
    svg: Path | None = None
    missing: str | None = None

    @property
    def data_uri(self) -> str:
        assert self.png is not None
        return "data:image/png;base64," + base64.b64encode(self.png.read_bytes()).decode()


@dataclass(frozen=True, slots=True)
class PageTable:
    header: list[str]
    rows: list[list[str]]
    total: int


@dataclass(frozen=True, slots=True)
class Section:
    """What the page says of one cohort."""

    slug: str
    title: str
    meaning: str
    best: list[str]
    failed: list[str]
    trust: list[str]
    figures: list[DrawnFigure]
    winners: PageTable
    ranked: PageTable
    failures: PageTable

    def figures_of(self, section: str) -> list[DrawnFigure]:
        return [figure for figure in self.figures if figure.section == section]


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
    """Names of the CSV files under ``tables/``."""


def render(page: Page) -> str:
    """The page as text; everything that comes from rows is escaped."""
    environment = Environment(
        loader=FileSystemLoader(_TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = (_TEMPLATES / "report.css").read_text()
    return environment.get_template("report.html").render(page=page, style=style, generator=GENERATOR)

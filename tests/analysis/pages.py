"""Reading a report's page: its words, its links and its data."""

from __future__ import annotations

import html
import re
from html.parser import HTMLParser
from pathlib import Path

from analysis.options import Options
from tests.analysis import synthetic

POINTS = list(synthetic.experiments(synthetic.MODELS[:2], (1, 2), (1, 4)))
QUICK = Options(figures=("outcomes",))
"""For tests of the words alone."""


class Links(HTMLParser):
    """Every address that a page refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [value for name, value in attrs if name in ("href", "src") and value]


def links(page: Path) -> list[str]:
    parser = Links()
    parser.feed(page.read_text())
    return parser.found


def text_of(page: Path) -> str:
    """What is read on the page, in one line."""
    bare = re.sub(r"<(style|script)\b.*?</\1>|<[^>]+>", " ", page.read_text(), flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(bare))

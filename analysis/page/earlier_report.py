"""The files that belong to the report in a folder, by the list beside its page or by the links of an older page."""

from __future__ import annotations

import html
import re

from analysis.page.render import GENERATOR
from analysis.page.staging import Kind

_LINK = re.compile(r'(?:href|src)="((?:figures|tables)/[^"/]+)"')
_PAGES = ("claims.html", "report.json", "explorer.html")
"""Files beside the page; the oldest version wrote explorer.html."""


def linked(page: str) -> list[str]:
    """Files of a report without a list: the pages, and every figure and table that its page links to."""
    return [*_PAGES, *(html.unescape(name) for name in _LINK.findall(page))]


KIND = Kind("report", "index.html", GENERATOR, linked)

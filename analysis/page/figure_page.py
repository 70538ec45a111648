"""One figure as a page of its own: the picture as SVG, its caption and the table of its values, nothing to load."""

from __future__ import annotations

import re

import pandas as pd

from analysis.page import export
from analysis.page.render import GENERATOR, DrawnFigure, environment, style_sheet

MOST_ROWS = 200
"""Rows of the table that the page shows."""


def render(figure: DrawnFigure, of: str, svg: str, data: pd.DataFrame) -> str:
    """The page as text. ``of`` is the cohort's title; ``data`` is cut to `MOST_ROWS` rows, and the page says so."""
    table = None if data.empty else export.shown(data, MOST_ROWS)
    return (
        environment()
        .get_template("figure.html")
        .render(
            figure=figure,
            of=of,
            # The picture stands in HTML: an XML declaration and a document type would be errors there.
            svg=re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>", "", svg, count=2, flags=re.DOTALL).strip(),
            table=table,
            style=style_sheet(),
            generator=GENERATOR,
        )
    )

"""A standalone page for one figure: the picture as SVG, its caption and the table of its values, in one file."""

from __future__ import annotations

import re

import pandas as pd

from analysis.page import export
from analysis.page.render import GENERATOR, DrawnFigure, environment, style_sheet

MOST_ROWS = 200
"""Maximum number of rows of the page's table."""


def render(figure: DrawnFigure, of: str, svg: str, data: pd.DataFrame) -> str:
    """The page as text. ``of`` is the cohort's title; ``data`` is cut to `MOST_ROWS` rows, and the page says so."""
    table = None if data.empty else export.shown(data, MOST_ROWS)
    return (
        environment()
        .get_template("figure.html")
        .render(
            figure=figure,
            of=of,
            # An XML declaration or a document type inside HTML would be an error.
            svg=re.sub(r"<\?xml.*?\?>|<!DOCTYPE.*?>", "", svg, count=2, flags=re.DOTALL).strip(),
            table=table,
            style=style_sheet(),
            generator=GENERATOR,
        )
    )

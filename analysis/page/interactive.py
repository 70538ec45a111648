"""The report's figures by name, for notebooks and the Python prompt."""

from __future__ import annotations

import difflib

import pandas as pd
from matplotlib.figure import Figure

from analysis.drawing import style
from analysis.figures import registry
from results.errors import InvalidResults


def figure(name: str, frame: pd.DataFrame) -> Figure | str:
    """The figure ``name`` of `analysis.figures.registry`, drawn from a cohort's frame.

    Returns a sentence with the reason if the rows cannot make it. Raises `InvalidResults` if no figure has that name.
    """
    specs = {spec.name: spec for spec in registry.FIGURES}
    if name not in specs:
        close = difflib.get_close_matches(name, specs, n=1)
        raise InvalidResults(f"no figure called {name!r}{f'; did you mean {close[0]}?' if close else ''}")
    try:
        return specs[name].draw(frame)
    except style.NothingToDraw as reason:
        return f"{specs[name].title}: not drawn, {reason}."

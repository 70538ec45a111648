"""Texts of a drawn figure: which ones it shows, and that none is clipped or lies on another."""

from __future__ import annotations

import itertools
from unittest import mock

from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.text import Text


def visible_texts(figure: Figure) -> list[Text]:
    """Texts that a drawing really draws: a figure also holds tick labels outside the limits, which it does not."""
    drawn: list[Text] = []
    draw = Text.draw

    def recording(text: Text, renderer: RendererBase) -> None:
        drawn.append(text)
        draw(text, renderer)

    with mock.patch.object(Text, "draw", recording):
        figure.draw_without_rendering()
    return [text for text in dict.fromkeys(drawn) if text.get_visible() and text.get_text().strip()]


def assert_texts_fit(figure: Figure) -> None:
    texts = visible_texts(figure)
    boxes = [(text.get_text(), text.get_window_extent()) for text in texts]
    width, height = figure.bbox.width, figure.bbox.height
    for name, box in boxes:
        assert box.x0 >= -1 and box.y0 >= -1 and box.x1 <= width + 1 and box.y1 <= height + 1, f"{name!r} is clipped"
    for (one, a), (two, b) in itertools.combinations(boxes, 2):
        across, down = min(a.x1, b.x1) - max(a.x0, b.x0), min(a.y1, b.y1) - max(a.y0, b.y0)
        assert across < 2 or down < 2, f"{one!r} lies on {two!r}"


def words(figure: Figure) -> set[str]:
    return {text.get_text() for text in visible_texts(figure)}

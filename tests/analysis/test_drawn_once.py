"""One drawing gives both files: the pixels are those of Agg alone, and the SVG has every mark where they have it."""

from __future__ import annotations

import io
import random
import re
from typing import Any
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import FontProperties
from matplotlib.patches import Circle, Rectangle
from PIL import Image

from analysis.drawing import bar_series, bars, both, raster, style

_SVG = "{http://www.w3.org/2000/svg}"
_LINK = "{http://www.w3.org/1999/xlink}href"


def empty() -> Figure:
    figure = style.new_figure(4.0, 3.0)
    figure.set_layout_engine(None)
    return figure


def drawn(figure: Figure) -> tuple[np.ndarray, ElementTree.Element]:
    """Pixels and the parsed SVG."""
    style.lay_out(figure)
    made = style.pictures(figure, ("png", "svg"))
    return np.asarray(Image.open(io.BytesIO(made["png"])).convert("RGB")), ElementTree.fromstring(made["svg"])


def marks(svg: ElementTree.Element, kind: str) -> list[ElementTree.Element]:
    return list(svg.iter(_SVG + kind))


def everything() -> Figure:
    with style.in_style():
        figure = style.new_figure(6.0, 4.0)
        left, right = figure.subplots(1, 2)
        left.plot([1, 2, 3], [3, 1, 2], "--", marker="o", color="#0072B2", label="a line")
        left.scatter([1.5, 2.5], [1, 2], s=[10, 40], c=[0.2, 0.9], cmap="viridis", edgecolor="black")
        left.set(xlabel="steps & <tokens>", ylabel="turned", title="two\nlines")
        right.bar([0, 1, 2], [1, 2, 3], hatch="////", facecolor="#E69F00", edgecolor="white")
        right.scatter(range(50), np.linspace(0, 3, 50), marker="x", color="black", alpha=0.5)
        right.plot(range(50), np.linspace(3, 0, 50), rasterized=True)
        right.set_yscale("log")
        left.imshow(np.arange(4.0).reshape(2, 2), extent=(1, 2, 1, 2), aspect="auto")
        style.bottom_legend(figure, left.get_legend_handles_labels()[0])
    return figure


def test_pixels_are_those_of_agg() -> None:
    figure = everything()
    style.lay_out(figure)
    made = style.pictures(figure, ("png",))["png"]
    canvas = figure.canvas
    assert isinstance(canvas, raster.Canvas)
    with style.in_style():
        FigureCanvasAgg.draw(canvas)
        assert raster.png(np.asarray(canvas.buffer_rgba()), style.PNG_DPI) == made


def test_svg_is_whole() -> None:
    pixels, svg = drawn(everything())
    ids = [part.get("id") for part in svg.iter() if part.get("id")]
    assert len(ids) == len(set(ids))
    text = ElementTree.tostring(svg, encoding="unicode")
    assert set(re.findall(r"url\(#([^)]+)\)", text)) | {m[1:] for m in re.findall(r'href="(#[^"]+)"', text)} <= set(ids)
    words = [mark.text for mark in marks(svg, "text")]
    assert {"steps & <tokens>", "turned", "two", "lines", "a line"} <= set(words)
    assert len(marks(svg, "image")) == 2, "a picture, and a line that is given as pixels"
    assert len(marks(svg, "pattern")) == 1
    turned = next(mark for mark in marks(svg, "text") if mark.text == "turned")
    assert turned.get("transform", "").startswith("rotate(-90 ")
    assert (svg.get("width"), svg.get("height")) == ("432pt", "288pt")
    assert pixels.shape[:2] == (round(4 * style.PNG_DPI), round(6 * style.PNG_DPI))
    assert sum(link.get(_LINK, "")[:2] == "#m" for link in marks(svg, "use")) == 49 + 3, "0 has no logarithm"


@pytest.mark.slow
def test_marks_stand_where_the_pixels_have_them() -> None:
    chance = random.Random(5)
    for _ in range(20):
        figure = empty()
        left, low = chance.uniform(0.05, 0.6), chance.uniform(0.05, 0.6)
        wide, high = chance.uniform(0.1, 0.3), chance.uniform(0.1, 0.3)
        figure.add_artist(Rectangle((left, low), wide, high, facecolor="#D55E00", transform=figure.transFigure))
        pixels, svg = drawn(figure)
        [mark] = [path for group in marks(svg, "g") if group.get("fill") == "#d55e00" for path in group]
        corners = np.array(re.findall(r"[-\d.]+", mark.get("d", "")), float).reshape(-1, 2)
        assert corners.min(axis=0) == pytest.approx([288 * left, 216 * (1 - low - high)], abs=0.01)
        assert corners.max(axis=0) == pytest.approx([288 * (left + wide), 216 * (1 - low)], abs=0.01)
        rows, columns = np.nonzero(
            (pixels == pixels[int(390 * (1 - low - high / 2)), int(520 * (left + wide / 2))]).all(2)
        )
        scale = style.PNG_DPI / 72
        assert [columns.min(), rows.min()] == pytest.approx(corners.min(axis=0) * scale, abs=1.5)
        assert [columns.max() + 1, rows.max() + 1] == pytest.approx(corners.max(axis=0) * scale, abs=1.5)


@pytest.mark.parametrize(
    ("look", "attributes"),
    [
        ({"facecolor": "red", "alpha": 0.5}, {"fill": "#ff0000", "opacity": "0.5"}),
        ({"facecolor": (1, 0, 0, 0.25)}, {"fill": "#ff0000", "fill-opacity": "0.25"}),
        (
            {"fill": False, "edgecolor": "blue", "linewidth": 2.5},
            {"fill": "none", "stroke": "#0000ff", "stroke-width": "2.5"},
        ),
        (
            {"fill": False, "edgecolor": "blue", "linewidth": 1, "linestyle": (1, (2, 3))},
            {"stroke-dasharray": "2,3", "stroke-dashoffset": "1"},
        ),
        ({"facecolor": "white", "edgecolor": "blue", "capstyle": "projecting"}, {"stroke-linecap": "square"}),
    ],
)
def test_looks(look: dict[str, object], attributes: dict[str, str]) -> None:
    figure = empty()
    figure.add_artist(Circle((0.5, 0.5), 0.2, **look))
    _, svg = drawn(figure)
    assert any(attributes.items() <= group.attrib.items() for group in svg.iter(_SVG + "g"))


def test_collections_cycle_through_their_looks() -> None:
    figure = empty()
    ax = figure.add_axes((0, 0, 1, 1), frameon=False, xlim=(0, 5), ylim=(0, 1), xticks=[], yticks=[])
    ax.scatter([1, 2, 3, 4, np.nan], [0.5] * 5, c=["#112233", "#445566"] * 2 + ["#112233"], linewidths=0, clip_on=False)
    _, svg = drawn(figure)
    fills = [group.get("fill") for group in svg.iter(_SVG + "g") if group.get("fill", "").startswith(("#11", "#44"))]
    assert fills == ["#112233", "#445566", "#112233", "#445566"]
    assert not [group for group in svg.iter(_SVG + "g") if group.get("stroke")]


def test_what_cannot_be_seen_is_not_written() -> None:
    figure = empty()
    figure.patch.set_visible(False)
    figure.add_artist(Circle((0.5, 0.5), 0.2, facecolor="none", edgecolor="none"))
    _, svg = drawn(figure)
    assert not marks(svg, "path")


@pytest.mark.parametrize("words", ["one device", "dp2 · mbs 1×128", "Über gjpq", "tokens/s\nper GPU", "x"])
@pytest.mark.parametrize("weight", ["normal", "bold"])
def test_texts_measure_as_matplotlib_measures_them(words: str, weight: str) -> None:
    ours = empty().canvas
    assert isinstance(ours, raster.Canvas)
    with style.in_style(), matplotlib.rc_context({"savefig.dpi": 100}):
        font = FontProperties(size=8.5, weight=weight)
        renderer = ours.get_renderer()
        theirs = RendererAgg(10, 10, renderer.dpi)
        for line in words.splitlines():
            found = renderer.get_text_width_height_descent(line, font, False)
            assert found == pytest.approx(theirs.get_text_width_height_descent(line, font, False))
            assert renderer.get_text_width_height_descent(line, font, False) == found, "the second time, from memory"
        text = Figure(dpi=renderer.dpi).text(0.5, 0.5, words, fontproperties=font)
        known, measured = text.get_window_extent(renderer).bounds, text.get_window_extent(theirs).bounds
    assert known == pytest.approx(measured)


def test_bars_that_look_alike_are_one_path_with_the_same_pixels(monkeypatch: pytest.MonkeyPatch) -> None:
    def pixels() -> tuple[Any, int]:
        calls = []
        figure = style.new_figure(4, 2)
        ax = figure.subplots()
        for bottom, hatch in ((0.0, "//"), (1.0, "xx")):  # the second bars touch the first ones
            ax.bar(range(12), [1 + 0.1 * i for i in range(12)], bottom=bottom, hatch=hatch, edgecolor="white")
        style.lay_out(figure)
        draw_path = raster._Renderer.draw_path

        def counted(*args: Any) -> None:
            calls.append(args[1])
            draw_path(*args)

        with monkeypatch.context() as patch:
            patch.setattr(raster._Renderer, "draw_path", counted)
            drawn = both.draw(figure)[0].copy()
        return drawn, sum(gc.get_hatch() is not None for gc in calls)

    together, paths = pixels()
    monkeypatch.setattr(bars.Bars, "take", lambda *args: False)
    apart, separate = pixels()
    assert (paths, separate) == (2, 24)
    assert (together == apart).all()


@pytest.mark.parametrize("upright", [True, False])
def test_a_series_of_bars_is_one_artist_with_the_pixels_of_many(upright: bool) -> None:
    places, sizes = np.arange(9.0), np.array([0.0, 3.0, 1.2, 1.0, 2.0, 0.5, 4.0, 2.5, 1.5])
    look: dict[str, Any] = {"facecolor": "#0072B2", "edgecolor": "white", "linewidth": 0.5}

    def made(one: bool) -> tuple[Figure, int]:
        figure = style.new_figure(4, 3)
        ax = figure.subplots()
        for start, hatch in ((0.0, "//"), (1.0, None)):
            if one:
                add = bar_series.upright if upright else bar_series.lying
                add(ax, places, sizes, start, 0.7, hatch=hatch, **look)
            elif upright:
                ax.bar(places, sizes, bottom=start, width=0.7, hatch=hatch, **look)
            else:
                ax.barh(places, sizes, left=start, height=0.7, hatch=hatch, **look)
        style.lay_out(figure)
        return figure, len(ax.patches)

    with style.in_style():
        (series, few), (single, many) = made(True), made(False)
        assert (few, many) == (2, 18)
        one, each = (style.pictures(figure, ("png", "svg")) for figure in (series, single))
    assert one["png"] == each["png"]
    shapes, separate = (sorted(re.findall(rb"M [^M\"]*", made["svg"])) for made in (one, each))
    assert [shape.strip() for shape in shapes] == [shape.strip() for shape in separate]
    assert one["svg"].count(b"<path") < each["svg"].count(b"<path")


def test_a_long_series_of_bars_is_drawn_in_pieces_that_agg_moves_to_whole_pixels() -> None:
    ax = style.new_figure(4, 3).subplots()
    bar_series.upright(ax, np.arange(400.0), np.ones(400), 0.0, 0.7)
    paths = [series.get_path() for series in ax.patches]
    lengths = [np.asarray(path.vertices).shape[0] for path in paths]
    assert sum(lengths) == 400 * 5
    assert max(lengths) <= 1024
    assert ax.dataLim.bounds == pytest.approx((-0.35, 0, 399.7, 1))

"""PNG pictures of figures: a canvas that draws whole strings, and compact files with few colours."""

from __future__ import annotations

import io
import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg, RendererAgg, get_hinting_flag
from matplotlib.figure import Figure
from numpy.typing import NDArray
from PIL import Image

_LEVEL = 3
"""Compression level of zlib. Level 4 takes a third more time for a tenth fewer bytes (measured over the study's
figures)."""
_CHANNEL_BITS = 5
_MOST_COLOURS = 256
_FEW_PIXELS = 100_000
_BAND_PIXELS = 1 << 17


class Canvas(FigureCanvasAgg):  # type: ignore[misc]
    """Agg's canvas with texts drawn string by string.

    matplotlib 3.11 places and blends every glyph separately in Python: three times the time for a difference of less
    than a pixel.
    """

    _size: tuple[float, float, float] | None = None
    renderer: _Renderer

    def get_renderer(self) -> RendererAgg:
        width, height = self.figure.bbox.size
        size = (float(width), float(height), float(self.figure.dpi))
        if size != self._size:
            self.renderer, self._size = _Renderer(*size), size
        return self.renderer


class _Renderer(RendererAgg):  # type: ignore[misc]
    def draw_text(
        self,
        gc: Any,
        x: float,
        y: float,
        s: str,
        prop: Any,
        angle: float,
        ismath: Any = False,
        mtext: Any = None,
    ) -> None:
        if ismath:
            super().draw_text(gc, x, y, s, prop, angle, ismath, mtext)
            return
        text = self._text(s, prop)
        turned = math.radians(angle)
        left = round(x + text.right + text.descent * math.sin(turned))
        lower = round(y + text.up + text.descent * math.cos(turned))
        self._renderer.draw_text_image(text.pixels, left, lower + 1, angle, gc)

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> tuple[float, float, float]:
        if ismath:
            width, height, descent = super().get_text_width_height_descent(s, prop, ismath)
            return width, height, descent
        text = self._text(s, prop)
        return text.width, text.height, text.descent

    def _get_font_height_metrics(self, prop: Any) -> tuple[float | None, float | None, float | None]:
        """Ascent, descent and the gap between lines, cached; matplotlib reads them from the font's tables for every
        text."""
        key = (*_font_key(prop), self.dpi)
        if key not in _line_heights:
            _line_heights[key] = _line_height(self._prepare_font(prop), prop.get_size_in_points() * self.dpi / 72)
        return _line_heights[key]

    def _text(self, s: str, prop: Any) -> _Text:
        """Pixels and size of a text, cached: texts are measured before they are drawn, and figures share many texts."""
        key = (s, *_font_key(prop), self.dpi)
        known = _texts.get(key)
        if known is None:
            if len(_texts) >= _MOST_TEXTS:
                _texts.clear()
            font = self._prepare_font(prop)
            font.set_text(s, 0, flags=get_hinting_flag())
            font.draw_glyphs_to_bitmap(antialiased=True)
            sizes = (*font.get_width_height(), font.get_descent(), *font.get_bitmap_offset())
            known = _texts[key] = _Text(np.array(font.get_image()), *(size / 64 for size in sizes))
        return known


@dataclass(frozen=True, slots=True)
class _Text:
    """Pixels [height, width] of a text and its sizes in pixels; ``right`` and ``up`` are the offset of the first
    pixel."""

    pixels: NDArray[np.uint8]
    width: float
    height: float
    descent: float
    right: float
    up: float


_texts: dict[tuple[Any, ...], _Text] = {}
_MOST_TEXTS = 4096
"""Largest number of cached texts, about a kilobyte each."""
_line_heights: dict[tuple[Any, ...], tuple[float | None, float | None, float | None]] = {}


def _font_key(prop: Any) -> tuple[Any, ...]:
    return *prop.get_family(), prop.get_style(), prop.get_weight(), prop.get_size_in_points()


def _line_height(font: Any, size_px: float) -> tuple[float | None, float | None, float | None]:
    """Line metrics as in `matplotlib.text` for a font of ``size_px`` pixels; Nones if the font lacks them."""
    for table, gap, ascent, descent in (
        ("OS/2", "sTypoLineGap", "sTypoAscender", "sTypoDescender"),
        ("hhea", "lineGap", "ascent", "descent"),
    ):
        if (values := font.get_sfnt_table(table)) is not None:
            unit = size_px / font.get_sfnt_table("head")["unitsPerEm"]
            return values[ascent] * unit, -values[descent] * unit, values[gap] * unit
    return None, None, None


def new_canvas(figure: Figure) -> None:
    """Give the figure its canvas."""
    Canvas(figure)


def png(rgba: NDArray[np.uint8], dpi: float) -> bytes:
    """Pixels [height, width, 4] on an opaque ground as PNG; equal pixels give equal bytes.

    Five bits of each channel are kept, which the eye cannot distinguish from eight; black and white stay exact.
    Pictures with up to 256 such colours, most figures, have one byte per pixel instead of three.
    """
    pixels = np.ascontiguousarray(rgba).view("<u4")[..., 0]
    return _packed(_few_colours(pixels) or _many_colours(pixels), dpi=(dpi, dpi))


def cut_out(rgba: NDArray[np.uint8]) -> bytes:
    """PNG of pixels [height, width, 4] that are each opaque or transparent; small pictures (colour bars) keep every
    shade."""
    pixels = np.ascontiguousarray(rgba).view("<u4")[..., 0]
    height, width = pixels.shape
    if pixels.size > _FEW_PIXELS:
        pixels = _coarse(pixels)
    return _packed(Image.frombuffer("RGBA", (width, height), pixels.tobytes(), "raw", "RGBA", 0, 1))


def _bands(pixels: NDArray[np.uint32]) -> Iterator[slice]:
    """Rows of a picture in bands that fit a processor's cache; whole pictures of long figures take 50 MB."""
    height, width = pixels.shape
    rows = max(_BAND_PIXELS // max(width, 1), 1)
    for first in range(0, height, rows):
        yield slice(first, first + rows)


def _keys(pixels: NDArray[np.uint32]) -> NDArray[np.uint16]:
    """The colour of each pixel in 15 bits: red in the lowest, green and blue above."""
    return ((pixels >> 3 & 0x1F) | (pixels >> 6 & 0x3E0) | (pixels >> 9 & 0x7C00)).astype(np.uint16)


def _coarse(pixels: NDArray[np.uint32]) -> NDArray[np.uint32]:
    return np.asarray((pixels & 0xF8F8F8F8) | (pixels >> 5 & 0x07070707), np.uint32)


def _few_colours(pixels: NDArray[np.uint32]) -> Image.Image | None:
    """Picture with a palette in the order of the colours; None if there are too many."""
    height, width = pixels.shape
    seen = np.zeros(1 << 3 * _CHANNEL_BITS, bool)
    runs = []  # most neighbours in a row are equal
    for band in _bands(pixels):
        flat = pixels[band].reshape(-1)
        starts = np.flatnonzero(np.concatenate([[True], flat[1:] != flat[:-1]]))
        keys = _keys(flat[starts])
        seen[keys] = True
        if np.count_nonzero(seen) > _MOST_COLOURS:
            return None
        runs.append((keys, np.diff(starts, append=flat.size).astype(np.int32)))
    used = np.flatnonzero(seen)
    places = np.zeros(1 << 3 * _CHANNEL_BITS, np.uint8)
    places[used] = np.arange(len(used))
    indices = np.concatenate([np.repeat(places[keys], lengths) for keys, lengths in runs])
    image = Image.frombuffer("P", (width, height), indices, "raw", "P", 0, 1)
    channels = np.stack([used >> shift * _CHANNEL_BITS & 0x1F for shift in range(3)], axis=1)
    image.putpalette((channels << 3 | channels >> 2).astype(np.uint8).tobytes())
    return image


def _many_colours(pixels: NDArray[np.uint32]) -> Image.Image:
    height, width = pixels.shape
    image = Image.new("RGB", (width, height))
    for band in _bands(pixels):
        part = _coarse(pixels[band])
        image.paste(
            Image.frombuffer("RGBX", (width, len(part)), part, "raw", "RGBX", 0, 1).convert("RGB"), (0, band.start)
        )
    return image


def _packed(image: Image.Image, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, "PNG", compress_level=_LEVEL, **options)
    return file.getvalue()

"""Draws a figure once as pixels and as SVG: each call of an artist goes to both renderers.

Separate drawings for each format would place every tick and measure every text twice.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.backend_bases import RendererBase
from matplotlib.figure import Figure
from matplotlib.path import Path
from matplotlib.textpath import TextPath
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

from analysis.drawing import raster
from analysis.drawing.bars import Bars
from analysis.drawing.vector import Vector


def draw(figure: Figure) -> tuple[NDArray[np.uint8], bytes]:
    """Pixels [height, width, 4] and the SVG of a figure that is laid out."""
    canvas = figure.canvas
    assert isinstance(canvas, raster.Canvas)
    pixels = canvas.get_renderer()
    pixels.clear()
    width, height = figure.get_size_inches()
    vector = Vector(72 * width, 72 * height, figure.dpi)
    renderer = _Both(pixels, vector)
    figure.draw(renderer)
    renderer.finish()
    return np.asarray(canvas.buffer_rgba()), vector.text()


class _Both(RendererBase):
    def __init__(self, pixels: Any, vector: Vector) -> None:
        super().__init__()
        self._pixels, self._vector = pixels, vector
        self._bars = Bars(pixels)
        self._before: NDArray[np.uint8] | None = None
        """Pixels before the artists whose marks go into the SVG as a picture; None outside of such artists."""
        self.width, self.height, self.dpi = pixels.width, pixels.height, pixels.dpi

    def finish(self) -> None:
        """Draw what has been put off."""
        self._bars.draw()

    def open_group(self, s: str, gid: str | None = None) -> None:
        self._vector.open_group(s, gid)

    def close_group(self, s: str) -> None:
        self._vector.close_group()

    def draw_path(self, gc: Any, path: Path, transform: Any, rgbFace: Any = None) -> None:
        if not self._bars.take(gc, path, transform, rgbFace):
            self._bars.draw()
            self._pixels.draw_path(gc, path, transform, rgbFace)
        if self._before is None:
            self._vector.draw_path(gc, path, transform, rgbFace)

    def draw_markers(
        self, gc: Any, marker_path: Path, marker_trans: Any, path: Path, trans: Any, rgbFace: Any = None
    ) -> None:
        self._bars.draw()
        self._pixels.draw_markers(gc, marker_path, marker_trans, path, trans, rgbFace)
        if self._before is None:
            self._vector.draw_markers(gc, marker_path, marker_trans, path, trans, rgbFace)

    def draw_path_collection(
        self,
        gc: Any,
        master_transform: Any,
        paths: Any,
        all_transforms: Any,
        offsets: Any,
        offset_trans: Any,
        facecolors: Any,
        edgecolors: Any,
        linewidths: Any,
        linestyles: Any,
        antialiaseds: Any,
        urls: Any,
        offset_position: Any,
        **hatches: Any,
    ) -> None:
        look = (facecolors, edgecolors, linewidths, linestyles)
        placed = (gc, master_transform, paths, all_transforms, offsets, offset_trans)
        self._bars.draw()
        self._pixels.draw_path_collection(*placed, *look, antialiaseds, urls, offset_position, **hatches)
        if self._before is None:
            colours = hatches.get("hatchcolors")
            self._vector.draw_path_collection(*placed, *look, () if colours is None else colours)

    def draw_quad_mesh(
        self,
        gc: Any,
        master_transform: Any,
        meshWidth: int,
        meshHeight: int,
        coordinates: Any,
        offsets: Any,
        offsetTrans: Any,
        facecolors: Any,
        antialiased: Any,
        edgecolors: Any,
    ) -> None:
        placed, look = (offsets, offsetTrans, facecolors), (antialiased, edgecolors)
        self._bars.draw()
        self._pixels.draw_quad_mesh(gc, master_transform, meshWidth, meshHeight, coordinates, *placed, *look)
        if self._before is None:
            corners = coordinates[:-1, :-1], coordinates[:-1, 1:], coordinates[1:, 1:], coordinates[1:, :-1]
            cells = np.stack([*corners, corners[0]], axis=2).reshape(-1, 5, 2)
            paths = [Path(cell) for cell in cells]
            widths = [gc.get_linewidth()]
            self._vector.draw_path_collection(gc, master_transform, paths, (), *placed, edgecolors, widths, (), ())

    def draw_image(self, gc: Any, x: float, y: float, im: Any, transform: Any = None) -> None:
        self._bars.draw()
        self._pixels.draw_image(gc, x, y, im)
        if self._before is None:
            self._vector.draw_image(gc, x, y, raster.cut_out(im[::-1]), im.shape[1], im.shape[0])

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
        self._bars.draw()
        self._pixels.draw_text(gc, x, y, s, prop, angle, ismath, mtext)
        if ismath:
            self._draw_formula(gc, x, y, s, prop, angle)
        else:
            self._vector.draw_text(gc, x, y, s, prop, angle, mtext)

    def start_rasterizing(self) -> None:
        self._bars.draw()
        self._before = np.array(self._pixels.buffer_rgba())

    def stop_rasterizing(self) -> None:
        """Put the pixels that changed since `start_rasterizing` into the SVG as a picture on transparent ground."""
        assert self._before is not None
        self._bars.draw()
        after = np.asarray(self._pixels.buffer_rgba())
        changed = (after.view("<u4") != self._before.view("<u4"))[..., 0]
        self._before = None
        rows, columns = (np.flatnonzero(changed.any(axis=axis)) for axis in (1, 0))
        if not len(rows):
            return
        cut = slice(rows[0], rows[-1] + 1), slice(columns[0], columns[-1] + 1)
        picture = after[cut].copy()
        picture[~changed[cut]] = 0
        size = picture.shape[1], picture.shape[0]
        lower = len(after) - 1 - int(rows[-1])
        self._vector.draw_image(self.new_gc(), float(columns[0]), float(lower), raster.cut_out(picture), *size)

    def get_text_width_height_descent(self, s: str, prop: Any, ismath: Any) -> Any:
        return self._pixels.get_text_width_height_descent(s, prop, ismath)

    def get_canvas_width_height(self) -> tuple[float, float]:
        return self.width, self.height

    def points_to_pixels(self, points: Any) -> Any:
        return self._pixels.points_to_pixels(points)

    def option_image_nocomposite(self) -> bool:
        return True

    def _get_font_height_metrics(self, prop: Any) -> Any:
        return self._pixels._get_font_height_metrics(prop)

    def _draw_formula(self, gc: Any, x: float, y: float, s: str, prop: Any, angle: float) -> None:
        """Draw a formula into the SVG as a shape."""
        shape = TextPath((0, 0), s, size=self.points_to_pixels(prop.get_size_in_points()), prop=prop)
        filled = self.new_gc()
        filled.copy_properties(gc)
        filled.set_linewidth(0)
        place = Affine2D().rotate_deg(angle).translate(x, self.height - y)
        self._vector.draw_path(filled, shape, place, gc.get_rgb())

"""SVG writer for drawing calls in pixels: texts stay texts, and marks that look alike share one group.

matplotlib's SVG writer needs a separate drawing in points, and repeats the style at every mark.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Sequence
from html import escape
from typing import Any

import numpy as np
from matplotlib import _path, font_manager, rcParams
from matplotlib.colors import to_hex
from matplotlib.path import Path
from matplotlib.transforms import Affine2D
from numpy.typing import NDArray

_DECIMALS = 2
"""Decimals of a coordinate in points: a two-hundredth of a point is finer than any printer."""
_HATCH_PT = 72
_hatch_texts: dict[str, str] = {}
_GROUPS = frozenset({"figure", "axes", "legend"})
"""Artists that become groups in the SVG, to be selected in a drawing editor."""
_ANCHORS = {"left": "start", "center": "middle", "right": "end"}


class Vector:
    """An SVG of ``width`` x ``height`` points, drawn by matplotlib's renderer calls in pixels, y upwards."""

    def __init__(self, width: float, height: float, dpi: float) -> None:
        self._width, self._height, self._scale = width, height, 72 / dpi
        self._parts: list[str] = []
        self._shared: dict[str, str] = {}
        """Definitions (clip paths, markers, hatches) with their ids; each is written once."""
        self._groups: list[bool] = []
        self._group_counts: dict[str, int] = {}
        self._styles: dict[tuple[Any, ...], str] = {}
        self._run: str | None = None
        """Attributes of the open group of marks that look alike."""

    def text(self) -> bytes:
        """The whole file."""
        self._end_run()
        size = f"{_number(self._width)} {_number(self._height)}"
        wide, high = size.split()
        return "\n".join(
            [
                '<?xml version="1.0" encoding="utf-8"?>',
                f'<svg xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink" version="1.1" '
                f'width="{wide}pt" height="{high}pt" viewBox="0 0 {size}" stroke-linejoin="round" fill-rule="nonzero">',
                *(["<defs>", *self._shared, "</defs>"] if self._shared else []),
                *self._parts,
                "</svg>\n",
            ]
        ).encode()

    def open_group(self, kind: str, name: str | None) -> None:
        kept = kind in _GROUPS
        self._groups.append(kept)
        if kept:
            self._end_run()
            self._group_counts[kind] = self._group_counts.get(kind, 0) + 1
            self._parts.append(f'<g id="{escape(name or f"{kind}_{self._group_counts[kind]}")}">')

    def close_group(self) -> None:
        if self._groups.pop():
            self._end_run()
            self._parts.append("</g>")

    def draw_path(self, gc: Any, path: Path, transform: Any, face: Any) -> None:
        style = self._style(gc, face)
        if style is None:
            return
        open_line = face is None and gc.get_hatch() is None
        if shape := self._shape(path, transform, open_line and path.should_simplify, open_line):
            self._mark(gc, style, f'<path d="{shape}"/>')

    def draw_markers(self, gc: Any, marker: Path, marker_transform: Any, path: Path, transform: Any, face: Any) -> None:
        places = [corners[-2:] for corners, _ in path.iter_segments(transform, simplify=False) if len(corners)]
        style = self._style(gc, face)
        if places and style is not None:
            self._marks(gc, style, self._shape(marker, marker_transform, False, False, placed=False), np.array(places))

    def draw_path_collection(
        self,
        gc: Any,
        master: Any,
        paths: Sequence[Path],
        transforms: Sequence[NDArray[np.float64]],
        offsets: NDArray[np.float64],
        offset_transform: Any,
        faces: Sequence[Any],
        edges: Sequence[Any],
        widths: Sequence[float],
        dashes: Sequence[Any],
        hatch_colours: Sequence[Any],
    ) -> None:
        shapes = max(len(paths), len(transforms))
        if not len(paths) or not (len(faces) or len(edges) or len(hatch_colours)):
            return
        moved = np.asarray(offset_transform.transform(offsets)) if len(offsets) else np.zeros((1, 2))
        count = max(shapes, len(moved))
        shared = shapes < count
        known: list[str] = []
        for k in range(shapes):
            transform = Affine2D(transforms[k % len(transforms)]) + master if len(transforms) else master
            place = moved[k % len(moved)]
            turned = transform if shared else transform.frozen().translate(*place)
            known.append(self._shape(paths[k % len(paths)], turned, False, False, placed=not shared))
        looks: dict[tuple[int, ...], str | None] = {}
        kinds = [max(len(of), 1) for of in (faces, edges, widths, dashes, hatch_colours)]
        each = gc.__class__()
        each.copy_properties(gc)
        run: list[int] = []
        before: tuple[str, int] | None = None
        for k in range(count):
            if not np.isfinite(moved[k % len(moved)]).all():
                continue
            which = tuple(k % n for n in kinds)
            if which not in looks:
                looks[which] = self._look(each, which, faces, edges, widths, dashes, hatch_colours)
            style = looks[which]
            if style is None:
                continue
            if not shared:
                if known[k % shapes]:
                    self._mark(gc, style, f'<path d="{known[k % shapes]}"/>')
                continue
            if (style, k % shapes) != before and before is not None:
                self._marks(gc, before[0], known[before[1]], moved[np.array(run) % len(moved)])
                run = []
            before = style, k % shapes
            run.append(k)
        if before is not None:
            self._marks(gc, before[0], known[before[1]], moved[np.array(run) % len(moved)])

    def draw_image(self, gc: Any, x: float, y: float, picture: bytes, width: int, height: int) -> None:
        """Draw a PNG of ``width`` x ``height`` pixels, its lower left corner at ``x``, ``y``."""
        wide, high = width * self._scale, height * self._scale
        place = f'x="{_number(x * self._scale)}" y="{_number(self._height - y * self._scale - high)}"'
        data = base64.b64encode(picture).decode()
        mark = (
            f'<image {place} width="{_number(wide)}" height="{_number(high)}" preserveAspectRatio="none" '
            f'style="image-rendering:pixelated" xlink:href="data:image/png;base64,{data}"/>'
        )
        self._mark(gc, "", mark)

    def draw_text(self, gc: Any, x: float, y: float, text: str, font: Any, angle: float, artist: Any) -> None:
        """Draw a text that begins on its baseline at ``x``, ``y``, in pixels downwards; ``artist`` must be a text of
        one line."""
        x, y = x * self._scale, y * self._scale
        turned, anchor = "", "start"
        if artist is not None and angle == 0:
            # A viewer with another font keeps the text aligned at its left, middle or right.
            x = float(artist.get_transform().transform(artist.get_unitless_position())[0]) * self._scale
            anchor = _ANCHORS[artist.get_horizontalalignment()]
        place = f'x="{_number(x)}" y="{_number(y)}"'
        if angle:
            turned = f' transform="rotate({_number(-angle)} {_number(x)} {_number(y)})"'
        rgb = gc.get_rgb()
        colour = to_hex(rgb)
        alpha = gc.get_alpha() if gc.get_forced_alpha() else rgb[3]
        style = f'{_font(font)} fill="{colour}"'
        if alpha != 1:
            style += f' opacity="{_number(alpha)}"'
        if anchor != "start":
            style += f' text-anchor="{anchor}"'
        self._mark(gc, style, f"<text {place}{turned}>{escape(text, quote=False)}</text>")

    def _marks(self, gc: Any, style: str, shape: str, places: NDArray[np.float64]) -> None:
        """Draw the shape at every place, in pixels."""
        if not shape:
            return
        places = places[np.isfinite(places).all(axis=1)] * self._scale
        if len(places) == 1:
            x, y = places[0]
            move = f'transform="translate({_number(x)} {_number(self._height - y)})"'
            self._mark(gc, style, f'<path d="{shape}" {move}/>')
            return
        name = self._named("m", f'<path id="{{}}" d="{shape}"/>')
        marks = [
            f'<use xlink:href="#{name}" x="{_number(x)}" y="{_number(y)}"/>'
            for x, y in zip(places[:, 0].tolist(), (self._height - places[:, 1]).tolist(), strict=True)
        ]
        if marks:
            self._mark(gc, style, "\n".join(marks))

    def _mark(self, gc: Any, style: str, mark: str) -> None:
        """Write a mark, into the open group if it has the same look."""
        look = f"{style}{self._clip(gc)}".strip()
        if look != self._run:
            self._end_run()
            self._parts.append(f"<g {look}>" if look else "<g>")
            self._run = look
        self._parts.append(mark)

    def _end_run(self) -> None:
        if self._run is not None:
            self._parts.append("</g>")
            self._run = None

    def _shape(self, path: Path, transform: Any, simplify: bool, clipped: bool, *, placed: bool = True) -> str:
        """The path in points downwards; ``placed`` on the page, otherwise around the origin."""
        down = Affine2D().scale(self._scale, -self._scale).translate(0, self._height if placed else 0)
        clip = (0.0, 0.0, self._width, self._height) if clipped else None
        return _path_text(path, transform + down, clip, simplify)

    def _look(
        self,
        gc: Any,
        which: tuple[int, ...],
        faces: Sequence[Any],
        edges: Sequence[Any],
        widths: Sequence[float],
        dashes: Sequence[Any],
        hatch_colours: Sequence[Any],
    ) -> str | None:
        """The style of one mark of a collection; ``which`` holds its index in each list."""
        face, edge, width, dash, hatch = which
        if not len(edges) or edges[edge][3] == 0:
            gc.set_linewidth(0.0)
        else:
            gc.set_linewidth(widths[width] if len(widths) else 1.0)
            gc.set_foreground(tuple(edges[edge]), isRGBA=True)
            if len(dashes):
                gc.set_dashes(*dashes[dash])
        if len(hatch_colours):
            gc.set_hatch_color(tuple(hatch_colours[hatch]))
        colour = tuple(faces[face]) if len(faces) else None
        return self._style(gc, None if colour is not None and len(colour) == 4 and colour[3] == 0 else colour)

    def _style(self, gc: Any, face: Any) -> str | None:
        """Fill and stroke as attributes; None if the mark is invisible."""
        width = gc.get_linewidth()
        offset, dashes = gc.get_dashes()
        key = (
            None if face is None else tuple(face),
            gc.get_hatch() and (gc.get_hatch(), tuple(gc.get_hatch_color()), gc.get_hatch_linewidth()),
            gc.get_forced_alpha() and gc.get_alpha(),
            width and (width, tuple(gc.get_rgb()), gc.get_joinstyle(), gc.get_capstyle()),
            None if dashes is None else (offset, *dashes),
        )
        if key not in self._styles:
            self._styles[key] = self._new_style(gc, key)
        return self._styles[key] or None

    def _new_style(self, gc: Any, key: tuple[Any, ...]) -> str:
        face, hatch, alpha, stroke, dashes = key
        if alpha is not False and alpha is not None and alpha == 0:
            return ""
        attributes: dict[str, str] = {}
        if hatch:
            attributes["fill"] = f"url(#{self._hatch(gc, face, hatch)})"
        elif face is not None:
            attributes["fill"] = to_hex(face[:3])
        elif stroke:
            attributes["fill"] = "none"
        else:
            return ""
        forced = alpha is not False and alpha is not None
        if forced and alpha != 1:
            attributes["opacity"] = _number(alpha)
        if face is not None and len(face) == 4 and face[3] != 1 and not forced:
            attributes["fill-opacity"] = _number(face[3])
        if stroke:
            width, rgb, join, cap = stroke
            attributes["stroke"] = to_hex(rgb[:3])
            attributes["stroke-width"] = _number(width)
            if rgb[3] != 1 and not forced:
                attributes["stroke-opacity"] = _number(rgb[3])
            if join != "round":
                attributes["stroke-linejoin"] = join
            if cap != "butt":
                attributes["stroke-linecap"] = {"projecting": "square"}.get(cap, cap)
            if dashes is not None:
                attributes["stroke-dasharray"] = ",".join(_number(length) for length in dashes[1:])
                if dashes[0]:
                    attributes["stroke-dashoffset"] = _number(dashes[0])
        return " ".join(f'{name}="{value}"' for name, value in attributes.items())

    def _hatch(self, gc: Any, face: Any, hatch: tuple[Any, ...]) -> str:
        """Id of a hatch pattern; patterns of one hatch in several colours share its lines."""
        kind, colour, width = hatch
        flip = Affine2D().scale(_HATCH_PT, -_HATCH_PT).translate(0, _HATCH_PT)
        if kind not in _hatch_texts:  # figures share hatches, whose paths are long
            _hatch_texts[kind] = _path_text(gc.get_hatch_path(), flip)
        lines = self._named("l", f'<path id="{{}}" d="{_hatch_texts[kind]}"/>')
        size = f'width="{_HATCH_PT}" height="{_HATCH_PT}"'
        ground = "" if face is None else f'<rect {size} fill="{to_hex(face[:3])}"/>'
        ink = to_hex(colour[:3])
        opacity = "" if len(colour) < 4 or colour[3] == 1 else f' stroke-opacity="{_number(colour[3])}"'
        return self._named(
            "h",
            f'<pattern id="{{}}" patternUnits="userSpaceOnUse" {size}>{ground}<use xlink:href="#{lines}" fill="{ink}" '
            f'stroke="{ink}" stroke-width="{_number(width)}" stroke-linejoin="miter"{opacity}/></pattern>',
        )

    def _clip(self, gc: Any) -> str:
        box = gc.get_clip_rectangle()
        path, transform = gc.get_clip_path()
        if path is not None:
            shape = f'<path d="{self._shape(path, transform, False, False)}"/>'
        elif box is not None:
            left, low, wide, high = (side * self._scale for side in box.bounds)
            corner = f'x="{_number(left)}" y="{_number(self._height - low - high)}"'
            shape = f'<rect {corner} width="{_number(wide)}" height="{_number(high)}"/>'
        else:
            return ""
        name = self._named("p", f'<clipPath id="{{}}">{shape}</clipPath>')
        return f' clip-path="url(#{name})"'

    def _named(self, kind: str, definition: str) -> str:
        """Id of ``definition``, which is written once; {} in it marks the place of the id."""
        name = kind + hashlib.sha256(definition.encode()).hexdigest()[:10]
        self._shared.setdefault(definition.replace("{}", name, 1), name)
        return name


def _path_text(path: Path, transform: Any, clip: Any = None, simplify: bool = False) -> str:
    """The d attribute of a path."""
    codes = [b"M", b"L", b"Q", b"C", b"z"]
    text: bytes = _path.convert_to_string(path, transform, clip, simplify, None, _DECIMALS, codes, False)  # type: ignore[attr-defined]
    return text.decode("ascii").replace("\n", "").replace(" z", "z").rstrip()


def _number(value: float) -> str:
    return f"{value:.{_DECIMALS}f}".rstrip("0").rstrip(".") if value % 1 else f"{value:.0f}"


def _font(font: Any) -> str:
    """Family, size and weight of matplotlib's font properties as attributes."""
    family = font.get_family()
    names = [name for entry in family for name in (*rcParams.get(f"font.{entry}", ()), entry)]
    generic = font_manager.font_family_aliases
    quoted = ", ".join(name if name in generic else f"'{name}'" for name in dict.fromkeys(names))
    weight = font_manager.weight_dict.get(font.get_weight(), font.get_weight())
    parts = [f'font-family="{quoted}"', f'font-size="{_number(font.get_size_in_points())}px"']
    if weight != 400:
        parts.append(f'font-weight="{weight}"')
    if font.get_style() != "normal":
        parts.append(f'font-style="{font.get_style()}"')
    return " ".join(parts)

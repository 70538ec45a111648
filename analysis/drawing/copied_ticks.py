"""Axes whose ticks are copies of their first one: matplotlib builds five artists for each, a twentieth of a report."""

from __future__ import annotations

import copy
from typing import Any

from matplotlib.axes import Axes
from matplotlib.axis import Axis, Tick, XAxis, YAxis
from matplotlib.figure import Figure

_LINES = ("tick1line", "tick2line", "gridline")
_TEXTS = ("label1", "label2")


class FigureOfCopiedTicks(Figure):
    """A figure whose subplots have such axes."""

    def add_subplot(self, *args: Any, **kwargs: Any) -> Axes:
        axes: Axes = super().add_subplot(*args, **({"axes_class": _Axes} | kwargs))
        return axes


class _Axes(Axes):
    def _init_axis(self) -> None:
        self.xaxis, self.yaxis = _XAxis(self, clear=False), _YAxis(self, clear=False)
        for names, axis in ((("bottom", "top"), self.xaxis), (("left", "right"), self.yaxis)):
            for name in names:
                self.spines[name].register_axis(axis)


class _CopiesTicks(Axis):
    def get_major_ticks(self, numticks: int | None = None) -> list[Tick]:
        return self._ticks(self.majorTicks, len(self.get_majorticklocs()) if numticks is None else numticks)

    def get_minor_ticks(self, numticks: int | None = None) -> list[Tick]:
        return self._ticks(self.minorTicks, len(self.get_minorticklocs()) if numticks is None else numticks)

    def _ticks(self, ticks: list[Tick], count: int) -> list[Tick]:
        while len(ticks) < count:
            ticks.append(_copy_of(ticks[0]))
        return ticks[:count]


class _XAxis(_CopiesTicks, XAxis):
    pass


class _YAxis(_CopiesTicks, YAxis):
    pass


def _copy_of(tick: Tick) -> Tick:
    """A tick that looks the same and can be placed and labelled by itself."""
    copied = copy.copy(tick)
    for name in (*_LINES, *_TEXTS):
        setattr(copied, name, copy.copy(getattr(tick, name)))
    for name in _TEXTS:
        label = getattr(copied, name)
        label.set_fontproperties(label.get_fontproperties())  # copies them; setters would change those of both
    return copied

"""Ticks that are copies of the first one look as those that matplotlib makes, and none is made twice."""

from __future__ import annotations

from unittest import mock

import numpy as np
import pytest
from matplotlib.axis import XTick, YTick
from matplotlib.figure import Figure

from analysis.drawing import copied_ticks, style


def fill(figure: Figure) -> None:
    left, right = figure.subplots(1, 2)
    left.plot([1, 20, 300], [3, 1, 2])
    left.set(xscale="log", xlabel="turned labels")
    left.tick_params(axis="x", rotation=40, labelsize=7, colors="#D55E00")
    left.grid(axis="y")
    left.grid(axis="x", which="both")
    left.tick_params(axis="x", which="minor", length=6)
    right.set_xticks([0, 1, 2, 3], ["a", "b", "c", "d"])
    right.get_xticklabels()[1].set_fontweight("bold")
    beside = right.twinx()
    beside.plot([0, 1, 2, 3], [1e6, 2e6, 3e6, 4e6], "o")


def test_copied_ticks_are_drawn_as_matplotlibs(monkeypatch: pytest.MonkeyPatch) -> None:
    made = []
    for kind in (copied_ticks.FigureOfCopiedTicks, Figure):
        monkeypatch.setattr("analysis.drawing.style.FigureOfCopiedTicks", kind)
        with style.in_style():
            figure = style.new_figure(6.0, 4.0)
            fill(figure)
        style.lay_out(figure)
        made.append(style.pictures(figure, ("png", "svg")))
    assert made[0] == made[1]


def test_an_axis_makes_one_tick_of_each_kind() -> None:
    with style.in_style():
        figure = style.new_figure(6.0, 4.0)
        ax = figure.subplots()
        ax.set(xticks=np.arange(30), yticks=np.arange(20))
        with mock.patch.object(XTick, "__init__") as x, mock.patch.object(YTick, "__init__") as y:
            ax.set(xticks=np.arange(60), yticks=np.arange(40))
        assert x.call_count == y.call_count == 0
        labels = ax.get_xticklabels()
        labels[0].set_fontsize(20)
        assert labels[1].get_fontsize() != 20

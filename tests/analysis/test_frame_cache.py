"""What is computed from a frame is computed once while the frame lives, whatever else is asked meanwhile."""

from __future__ import annotations

import gc
import weakref
from pathlib import Path

import pandas as pd
import pytest

from analysis.options import Options
from analysis.page import draw_figures
from analysis.report import build
from analysis.rows.frame_cache import cache_per_frame
from results.statistics import noise
from tests.analysis import synthetic


def test_several_frames_and_choices_are_remembered() -> None:
    calls: list[tuple[int, str]] = []

    @cache_per_frame
    def doubled(frame: pd.DataFrame, name: str) -> pd.DataFrame:
        calls.append((len(frame), name))
        return frame[[name]] * 2

    frames = [pd.DataFrame({"a": range(n), "b": range(n)}) for n in (1, 2, 3)]
    for _ in range(3):
        for frame in frames:
            for name in ("a", "b"):
                assert doubled(frame, name)[name].tolist() == [2 * n for n in range(len(frame))]
    assert sorted(calls) == [(n, name) for n in (1, 2, 3) for name in ("a", "b")]
    changed = doubled(frames[2], "a")
    changed.loc[0, "a"] = 99
    assert doubled(frames[2], "a")["a"].tolist() == [0, 2, 4]


class Made:
    def __init__(self, rows: int) -> None:
        self.rows = rows


@pytest.mark.slow
def test_results_of_a_frame_that_is_gone_are_not_kept() -> None:
    @cache_per_frame
    def made(frame: pd.DataFrame) -> Made:
        return Made(len(frame))

    frame = pd.DataFrame({"a": [1]})
    result = weakref.ref(made(frame))
    del frame
    assert made(pd.DataFrame({"a": [1, 2]})).rows == 2
    gc.collect()
    assert result() is None


@pytest.mark.slow(seconds=3)
def test_a_report_ranks_its_rows_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Figures, claims and sentences start from the same table; the study's labels group our rows as workloads do."""
    points = list(synthetic.experiments(synthetic.MODELS[:1], (1, 2, 4), (1, 4)))
    folder = synthetic.make_sweep(tmp_path / "sweep", synthetic.attempts(points))
    ranked: list[int] = []
    real = noise.of_layouts

    def counted(runs: pd.DataFrame, group: list[str], value: str) -> pd.DataFrame:
        ranked.append(len(runs))
        return real(runs, group, value)

    monkeypatch.setattr(noise, "of_layouts", counted)
    monkeypatch.setattr(draw_figures, "_cores", lambda: 1)
    build(folder, tmp_path / "report", Options(figures=("best_configurations", "best_by_published_mfu", "pareto")))
    assert len(ranked) == 1

"""Cards through their commands: those of a shipped sweep are planned again, and a card of a real run is verified."""

from __future__ import annotations

import dataclasses
import shlex
import sys
from pathlib import Path

import pytest

from launchers import local
from results.tables.store import read_attempts
from sweep.__main__ import main
from sweep.cards.card import Band, read_cards, to_yaml
from sweep.cards.make import canonical
from sweep.predicting.measured_tables import RECORDED
from tests.sweep.helpers import plan_of


@pytest.mark.slow
def test_the_command_of_a_card_plans_its_experiment(tmp_path: Path) -> None:
    """Cards of a shipped sweep, as ``card --all`` writes them."""
    path = tmp_path / "cards.yaml"
    assert main(["card", "--all", "--results", str(RECORDED / "h200x2_schedules"), "--out", str(path)]) == 0
    cards = read_cards(path)
    assert len(cards) > 10
    for card in cards[::3]:
        words = shlex.split(card.command)
        assert words[:4] == ["python", "-m", "sweep", "run"]
        plan = plan_of(words[4:])
        assert [point.experiment for point in plan.points] == [
            canonical(card.experiment).replace(engine_version=plan.points[0].experiment.engine_version)
        ]


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    "pilot",
    ["tests.launchers.scripted", pytest.param("launchers.pilot", marks=pytest.mark.exhaustive(seconds=40))],
    ids=["ranks that only sleep", "ranks that train"],
)
def test_written_verified_and_failed_on_purpose(
    pilot: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """On CPU: a run, its card, the card again, a card of a machine ten times as fast, and a slower setting."""
    monkeypatch.setattr(local, "PILOT", (sys.executable, "-m", pilot))
    monkeypatch.chdir(tmp_path)
    steps = ["measure.warmup_steps=1", "measure.timed_steps=3"]
    point = ["grid.axes.global_batch_size=4", "grid.axes.seq_len=64", "grid.axes.precision=fp32"]
    where = ["model=tiny", "cluster=cpu", "launcher=local"]
    assert main(["run", "--plain", "+grid=one_point", *where, *point, *steps, "name=first"]) == 0
    id = read_attempts(tmp_path / "results" / "first").to_pylist()[0]["experiment_id"]
    assert main(["card", id, "--out", "mine.yaml"]) == 0
    capsys.readouterr()
    card = read_cards(Path("mine.yaml"))[0]
    assert list(card.verified.values()) == [None]
    wide = {
        name: Band(value=band.value, low=band.value / 30, high=band.value * 30) for name, band in card.expected.items()
    }
    Path("mine.yaml").write_text(to_yaml([dataclasses.replace(card, expected=wide)]))
    assert main(["verify", "mine.yaml", "--plain", "--write", "launcher=local"]) == 0
    assert f"pass: {id}" in capsys.readouterr().out
    assert all(told is not None for told in read_cards(Path("mine.yaml"))[0].verified.values())

    tight = {"step_time_s": Band(value=card.expected["step_time_s"].value / 1e3, low=0.0, high=1e-6)}
    Path("fast.yaml").write_text(to_yaml([dataclasses.replace(card, expected=tight)]))
    assert main(["verify", "fast.yaml", "--plain", "launcher=local", "grid.axes.recompute=full"]) == 1
    told = capsys.readouterr().out
    assert f"FAIL: {id}" in told and "outside 0.0 ms to 0.0 ms" in told
    assert "why: other configuration: recompute=full, the card recompute=none" in told

"""``verify --bisect``: a toy repository whose commits say how fast their code is, and a runner that reads it."""

from __future__ import annotations

import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from results.errors import UltrasweepError
from results.tables.store import read_attempts
from sweep.cards.bisect import first_slower, run_code
from sweep.cards.card import Card
from sweep.cards.make import make_card
from tests.sweep.cards.test_cards import EXPERIMENT, stored


def git(where: Path, *arguments: str) -> str:
    who = ["-c", "user.name=x", "-c", "user.email=x@y"]
    return subprocess.run(
        ["git", "-C", str(where), *who, *arguments], check=True, capture_output=True, text=True
    ).stdout.strip()


def toy(where: Path, times: list[float | None]) -> list[str]:
    """One commit a step time; None: that code cannot run. The ids of the commits."""
    where.mkdir()
    git(where, "init", "--quiet")
    commits = []
    for index, time in enumerate(times):
        (where / "speed").write_text(f"{time} {index}")
        git(where, "add", "speed")
        git(where, "commit", "--quiet", "-m", f"change {index}")
        commits.append(git(where, "rev-parse", "HEAD"))
    return commits


@pytest.fixture
def card(tmp_path: Path) -> Card:
    return make_card(stored(tmp_path / "own", {}))


class Runner:
    """Reads the speed from the code in the folder, and counts."""

    def __init__(self, row: Mapping[str, Any]) -> None:
        self.row, self.runs = row, 0

    def __call__(self, root: Path, card: Card) -> Mapping[str, Any] | None:
        self.runs += 1
        word = (root / "speed").read_text().split()[0]
        if word == "None":
            return None
        time = float(word)
        rate = EXPERIMENT.tokens_per_step / time / EXPERIMENT.world_size
        return {**self.row, "step_time_s": time, "tokens_per_s_per_gpu": rate}


@pytest.fixture
def runner(tmp_path: Path, card: Card) -> Runner:
    return Runner(read_attempts(tmp_path / "own").to_pylist()[0])


@pytest.mark.slow
@pytest.mark.parametrize("at", [1, 4, 7])
def test_the_first_slower_commit_is_named(at: int, tmp_path: Path, card: Card, runner: Runner) -> None:
    commits = toy(tmp_path / "code", [2.0] * at + [3.0] * (8 - at))
    told = first_slower(tmp_path / "code", f"{commits[0]}..HEAD", card, runner)
    assert told.endswith(f"change {at}") and commits[at].startswith(told.split()[0])
    assert runner.runs <= 2 + 3  # both ends, then log2(7)
    assert git(tmp_path / "code", "worktree", "list").count("\n") == 0
    assert "bisect" not in git(tmp_path / "code", "status")


@pytest.mark.slow
def test_code_that_cannot_run_is_skipped(tmp_path: Path, card: Card, runner: Runner) -> None:
    commits = toy(tmp_path / "code", [2.0, 2.0, None, 2.0, 3.0, 3.0])
    assert first_slower(tmp_path / "code", f"{commits[0]}..{commits[5]}", card, runner).endswith("change 4")
    others = toy(tmp_path / "skipped", [2.0, None, None, 3.0])
    with pytest.raises(UltrasweepError, match="the remaining commits cannot run the card"):
        first_slower(tmp_path / "skipped", f"{others[0]}..{others[3]}", card, runner)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("times", "range_", "message"),
    [
        ([3.0, 3.0], "HEAD~1..HEAD", "GOOD fails the card"),
        ([2.0, 2.0], "HEAD~1..HEAD", "BAD passes the card"),
        ([2.0, None], "HEAD~1..HEAD", "BAD cannot run the card"),
        ([2.0, 3.0], "HEAD", "expected GOOD..BAD"),
        ([2.0, 3.0], "HEAD~1...HEAD", "expected GOOD..BAD"),
        ([2.0, 3.0], "nothing..HEAD", "git rev-parse"),
    ],
)
def test_nothing_to_find(
    times: list[float | None], range_: str, message: str, tmp_path: Path, card: Card, runner: Runner
) -> None:
    toy(tmp_path / "code", times)
    with pytest.raises(UltrasweepError, match=message):
        first_slower(tmp_path / "code", range_, card, runner)
    assert git(tmp_path / "code", "worktree", "list").count("\n") == 0


@pytest.mark.slow
def test_the_code_of_the_folder_is_what_runs(tmp_path: Path, card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another ``sweep`` stands first on the path of this process, and this program is installed: neither is taken."""
    for name in ("asked", "other"):
        (tmp_path / name / "sweep").mkdir(parents=True)
        (tmp_path / name / "sweep" / "__main__.py").write_text(
            f"import sys; open({str(tmp_path / 'ran')!r}, 'a').write(' '.join(['{name}', *sys.argv[-2:]]))"
        )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "other"))
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    assert run_code(tmp_path / "asked", card, [], tmp_path / "results", [tmp_path]) is None  # it writes no row
    assert (tmp_path / "ran").read_text() == f"asked --conf {tmp_path}", "the user's folders are read there, too"

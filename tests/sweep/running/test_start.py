"""Every command that can submit to Slurm: with ``launcher.dry=true`` it shows the batch files and does nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

import launchers.slurm.submit
from results.errors import UltrasweepError
from sweep.__main__ import main
from sweep.cards.card import to_yaml
from sweep.cards.make import make_card
from sweep.composing.conffiles import ConfFolders
from sweep.inspecting.lookup import Record
from sweep.running.run import enqueue, prepare
from tests.sweep.engine_configs.layouts import layout
from tests.sweep.helpers import store_attempt

ROOT = Path(__file__).resolve().parents[3]
DRY = ("launcher=slurm", "launcher.dry=true")
COMMANDS = {
    "run": ("+grid=tiny", "--where", "world_size <= 2"),
    "search": ("+grid=tiny", "--where", "world_size <= 2", "search.batch=2"),
    "probe": ("cluster=h100_efa", "--nodes", "2"),
    "verify": ("card.yaml",),
}
"""Arguments of each command that can submit."""


def write_card(folder: Path) -> None:
    from results.tables.store import read_attempts

    experiment = layout("llama8b", dp=4, zero_stage=2, micro_batch_size=2, global_batch_size=32)
    measured = {"step_time_s": 2.0, "step_time_std_s": 0.04, "cluster": "h200", "warmup_steps": 3, "timed_steps": 5}
    store_attempt(folder / "own", experiment, **measured)
    attempts = tuple(read_attempts(folder / "own").to_pylist())
    record = Record(id=experiment.id, experiment=experiment, ledger=(), attempts=attempts)
    (folder / "card.yaml").write_text(to_yaml([make_card(record)]))


@pytest.fixture(autouse=True)
def _no_submission(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(launchers.slurm.submit, "run_slurm", lambda *_, **__: pytest.fail("submitted"))


@pytest.mark.slow
@pytest.mark.parametrize("command", COMMANDS)
def test_a_dry_run_shows_batch_files_and_writes_nothing(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_card(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    assert main([command, *COMMANDS[command], *DRY]) == 0
    out = capsys.readouterr().out
    assert "nothing is written, nothing is submitted" in out
    assert "#SBATCH --nodes=" in out and "srun" in out
    assert sorted(tmp_path.rglob("*")) == before


def test_no_other_code_starts_a_launcher() -> None:
    """The only module that imports a launcher asks nothing itself: whatever it starts was queued by `enqueue`."""
    imports = re.compile(r"import .*\b(run_slurm|run_local)\b")
    starting = [path.relative_to(ROOT) for path in ROOT.glob("sweep/**/*.py") if imports.search(path.read_text())]
    assert starting == [Path("sweep/running/start.py")]


def test_a_command_that_forgets_to_ask_cannot_queue(tmp_path: Path) -> None:
    prepared = prepare(["+grid=tiny", "model=tiny", *DRY, f"results_dir={tmp_path}/results"], ConfFolders(), ())
    with pytest.raises(UltrasweepError, match=r"launcher.dry=true queues and submits nothing"):
        enqueue(prepared)
    assert not (tmp_path / "results").exists()


def test_bisecting_cannot_be_dry(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_card(tmp_path)
    assert main(["verify", "card.yaml", "--bisect", "HEAD~1..HEAD", *DRY]) == 2
    assert capsys.readouterr().err.startswith("ultrasweep: --bisect runs the card with several commits")

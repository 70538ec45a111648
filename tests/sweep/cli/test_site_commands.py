"""The command ``doctor``: this machine, its dry run, and its mistakes; `tests/slurm/test_doctor.py` asks real nodes."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from launchers.doctor.checks import NAMES
from sweep.__main__ import main

pytestmark = pytest.mark.usefixtures("machine_without_gpus")


@pytest.mark.slow
def test_this_machine_is_checked_and_nothing_is_left(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "launcher=local", f"results_dir={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 0
    assert [line.split("  ")[0] for line in lines[:-1]] == ["pass"] * len(NAMES)
    assert [line for line in lines if "none needed" in line]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_gpus_that_the_cluster_file_says_are_missing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "launcher=local", "cluster=h200", f"results_dir={tmp_path}"])
    lines = capsys.readouterr().out.splitlines()
    assert code == 1
    number = next(number for number, line in enumerate(lines) if line.startswith("fail") and "GPUs" in line)
    assert "remedy: " in lines[number + 1]
    assert str(tmp_path) in lines[-1]


def test_a_dry_run_shows_the_batch_file_and_writes_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [
        "launcher=slurm",
        "cluster=h200",
        "launcher.dry=true",
        "launcher.partition=main",
        "launcher.python=python3",
    ]
    words += ['launcher.setup=["module load cuda"]', "launcher.prefix=[apptainer,exec,--nv,image.sif]"]
    assert main(["doctor", *words, "--nodes", "2", f"results_dir={tmp_path}"]) == 0
    text = capsys.readouterr().out
    assert subprocess.run(["bash", "-n"], input=text, text=True, check=False).returncode == 0
    lines = text.splitlines()
    for line in ("#SBATCH --partition=main", "#SBATCH --nodes=2", "#SBATCH --gpus-per-node=8", "#SBATCH --time=10"):
        assert line in lines
    assert lines.index("set -eE") < lines.index("module load cuda")
    srun = next(line for line in lines if line.startswith("srun "))
    assert " apptainer exec --nv image.sif python3 - " in srun
    assert srun.endswith("/launchers/doctor/on_node.py")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["launcher=slurm"], "launcher=slurm needs cluster=NAME"),
        (["launcher=rehearse"], "launcher=rehearse needs no node"),
        (["launcher=local", "--nodes", "2"], "--nodes 2 needs launcher=slurm"),
        (["+grid=tiny"], "+grid=tiny has no effect here"),
        (["launcher=local", "cluster=h300"], "no cluster called 'h300'"),
        (["launcher=slurm", "cluster=h200", "launcher.time_min=3"], "time_min=3"),
        (["launcher=local", "--wait", "0"], "--wait"),
    ],
)
def test_a_mistake_is_one_line(words: list[str], text: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", *words]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert text in said

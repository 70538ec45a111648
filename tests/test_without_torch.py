"""Planning, reading results and submitting to Slurm need no torch; what does says in one line how to install it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from results.errors import UltrasweepError
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.sampling import sampled
from workloads.rules.installed_packages import require_torch

ROOT = Path(__file__).parent.parent
SCHEDULES = ROOT / "results" / "recorded" / "h200x2_schedules"
BLOCKER = "import sys\nfor name in ('torch', 'triton', 'torchao', 'torchtitan'):\n    sys.modules[name] = None\n"
"""Python runs it at its start, also in processes that a command starts: it is named sitecustomize.py."""
RESULTS = ("--results", str(SCHEDULES))
WORKS = (
    ("sweep", "plan", "+grid=tiny", "--out", "plan.parquet"),
    ("sweep", "plan", "+grid=engines_2gpu", "--json"),
    ("sweep", "plan", "+grid=one_point", "launcher=rehearse"),
    ("sweep", "advise", "model=llama1b", "cluster=h200", "gpus=2"),
    ("sweep", "explain", "b1fce478", *RESULTS),
    ("sweep", "explain", "b1fce478", *RESULTS, "--memory"),
    ("sweep", "diff", "b1fce478", "061615f2", *RESULTS),
    ("sweep", "export", "b1fce478", "--to", "torchtitan", *RESULTS),
    ("sweep", "card", "b1fce478", *RESULTS),
    ("sweep", "status", str(SCHEDULES)),
    ("sweep", "grade", str(SCHEDULES)),
    ("sweep", "predict", str(SCHEDULES / "attempts.parquet"), "--out", "predicted.csv"),
    ("sweep", "run", "+grid=one_point", "launcher=slurm", "launcher.dry=true"),
    ("analysis.compare", str(SCHEDULES), str(SCHEDULES), "--format", "html"),
)
NEEDS = (
    (("run", "+grid=tiny", "launcher=local"), "launcher=local"),
    (("run", "+grid=one_point", "launcher=rehearse"), "launcher=rehearse"),
    (("search", "+grid=tiny", "launcher=local"), "launcher=local"),
    (("probe", "launcher=local"), "launcher=local"),
    (("parity", "model=tiny", "--right", "tp=2"), "parity"),
)


@pytest.fixture
def blocked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment without torch, and the working folder of commands."""
    (tmp_path / "blocker").mkdir()
    (tmp_path / "blocker" / "sitecustomize.py").write_text(BLOCKER)
    (tmp_path / "work").mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "blocker"), str(ROOT)]))
    return tmp_path / "work"


def run(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, *words], cwd=folder, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_torch_is_blocked(blocked: Path) -> None:
    done = run(blocked, "-c", "import torch")
    assert "ModuleNotFoundError" in done.stderr


@pytest.mark.slow(seconds=40)
@pytest.mark.parametrize(
    "words", sampled([(words,) for words in WORKS], 6, seconds=3), ids=lambda words: " ".join(words[1:3])
)
def test_commands_that_need_no_torch(words: tuple[str, ...], blocked: Path) -> None:
    done = run(blocked, "-m", *words)
    assert done.returncode == 0, done.stderr
    assert done.stdout and "No module" not in done.stderr


@pytest.mark.slow
def test_a_login_node_submits_without_torch(blocked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cluster = FakeSlurm(tmp_path / "bin")
    monkeypatch.setenv("PATH", f"{cluster.folder}:{os.environ['PATH']}")
    done = run(blocked, "-m", "sweep", "run", "+grid=one_point", "launcher=slurm", "--detach")
    assert (done.returncode, done.stderr) == (0, ""), done.stdout
    assert len(cluster.jobs) == 1
    document = json.loads(run(blocked, "-m", "sweep", "status", "results", "--json").stdout)
    assert [sweep["waiting"] for sweep in document["sweeps"]] == [1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("words", "what"), sampled(NEEDS, 2, seconds=3), ids=lambda value: value[0] if isinstance(value, tuple) else ""
)
def test_commands_that_need_torch_say_so(words: tuple[str, ...], what: str, blocked: Path) -> None:
    done = run(blocked, "-m", "sweep", *words)
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr == (
        f"ultrasweep: {what} needs torch, which is not installed here: pip install 'ultrasweep[engine]'\n"
    )
    assert not (blocked / "results").exists(), "nothing is queued"


def test_torch_that_is_there_is_not_refused() -> None:
    require_torch("this")


def test_a_missing_torch_is_a_mistake_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(UltrasweepError, match=r"^node n1 needs torch, which is not installed here: pip install"):
        require_torch("node n1")

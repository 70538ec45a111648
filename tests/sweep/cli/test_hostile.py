"""Names, files and folders that somebody else has made: one clear line each, nothing executed, nothing lost."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from launchers.state.code_snapshot import take_snapshot, write_snapshot
from launchers.state.sweep_dir import SweepDir, entry_names
from results.tables.store import read_attempts
from sweep.__main__ import main
from tests.sweep.helpers import plan_of, store_attempt

ROOT = Path(__file__).resolve().parents[3]
EVIL = """a "quoted" 'name' $(touch pwned) `touch pwned`; touch pwned #SBATCH --uid=0 [bold]é"""
"""Everything that a shell, sbatch or a console might obey, but for what no file name or batch file may hold."""
MODEL = "num_layers: 2\nhidden_size: 64\nnum_heads: 4\nnum_kv_heads: 4\nffn_hidden_size: 128\nvocab_size: 256\n"


@pytest.fixture(autouse=True)
def _somewhere_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "none"))
    binaries = tmp_path / "bin"  # a Slurm that does not answer, instead of the machine's own
    binaries.mkdir()
    for name in ("squeue", "scontrol", "sacct", "scancel", "sbatch"):
        (binaries / name).write_text("#!/bin/sh\necho down >&2\nexit 1\n")
        (binaries / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{binaries}:{os.environ['PATH']}")


@pytest.fixture
def evil_conf(tmp_path: Path) -> Path:
    """A folder and a model whose names are commands."""
    conf = tmp_path / f"conf {EVIL}"
    (conf / "grid").mkdir(parents=True)
    (conf / "model").mkdir()
    (conf / "model" / f"{EVIL}.yaml").write_text(MODEL)
    axes = {"model": [EVIL], "global_batch_size": 4, "seq_len": 64, "tp": [1, 2]}
    (conf / "grid" / "evil.yaml").write_text(json.dumps({"cluster": "cpu", "axes": axes}))
    return conf


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    captured = capsys.readouterr()
    assert captured.err.count("\n") == 1 and captured.err.startswith("ultrasweep: ")
    assert "Traceback" not in captured.err
    return captured.err


def in_quotes(name: str) -> str:
    """As Hydra's grammar takes a text."""
    quoted = name.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{quoted}'"


@pytest.mark.slow
def test_names_that_are_commands_are_only_names(
    evil_conf: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["+grid=evil", "--conf", str(evil_conf), f"name={in_quotes(EVIL)}"]
    assert main(["plan", *words]) == 0
    capsys.readouterr()
    assert main(["run", *words, "launcher=slurm", "launcher.dry=true"]) == 0
    text = capsys.readouterr().out
    (tmp_path / "results" / EVIL).mkdir(parents=True)
    write_snapshot(SweepDir(tmp_path / "results" / EVIL), take_snapshot())  # the job compares the copy of the code
    batch = tmp_path / "batch.sh"
    batch.write_text("#!/bin/bash\n" + text.partition("#!/bin/bash\n")[2])
    # Every line for sbatch is one of ours, and each is one word to it.
    directives = [line for line in batch.read_text().splitlines() if line.startswith("#SBATCH")]
    parsed = [shlex.split(line, comments=False) for line in directives]
    assert all(len(words) == 2 and not words[1].startswith("--uid") for words in parsed)
    # And the shell gives srun exactly the sweep's folder.
    srun = tmp_path / "bin" / "srun"
    srun.write_text('#!/bin/sh\nfor word in "$@"; do printf "%s\\n" "$word"; done\n')
    srun.chmod(0o755)
    done = subprocess.run(["bash", str(batch)], capture_output=True, text=True, cwd=tmp_path, check=True)
    words = done.stdout.splitlines()
    assert words[-2] == str(tmp_path / "results" / EVIL)
    assert done.stderr == ""
    assert not list(tmp_path.rglob("pwned"))


def test_a_sweep_with_such_a_name_can_be_used(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = SweepDir.create(Path("results") / EVIL, {})
    sweep.add_points([])
    for command in (["status"], ["status", str(sweep.path)], ["retry", str(sweep.path)]):
        assert main(command) == 0
    assert EVIL in capsys.readouterr().out
    assert main(["logs", "x", "--results", str(sweep.path)]) == 2
    assert "no attempt" in one_line(capsys)
    assert not list(tmp_path.rglob("pwned"))


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ["run", "+grid=tiny", "name='a\nb'"],
        ["run", "+grid=tiny", "results_dir='a\nb'"],
        ["run", "+grid=a\nb"],
        ["run", "+grid=tiny", "model='a\x1b[31mb'"],
        ["run", "+grid=tiny", "launcher=slurm", "name='a%j'"],
        ["run", "+grid=tiny", "launcher=slurm", "name='a\\\\nb'"],
        ["status", "a\nb\x1b[31m"],
        ["logs", "a\x1b[31m\nb", "--results", "sweeps"],
        ["retry", "sweeps/s", "a\nb\x07"],
    ],
)
def test_line_breaks_and_control_characters_end_in_one_plain_line(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    SweepDir.create(tmp_path / "sweeps" / "s", {})
    assert main(words) == 2
    assert one_line(capsys)[:-1].isprintable()
    assert not Path("results").exists()


def test_garbage_files_are_neither_run_nor_fatal(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = SweepDir.create(Path("results/s"), {"devices_per_node": "many"})
    garbage = {
        sweep.todo: ["000000-a.json", "no number.json"],
        sweep.claimed: ["000001-b@gone.json", "000002-c.json"],
        sweep.done: ["000003-d@ok.json", "000004-e@no such outcome.json"],
        sweep.history: ["000001-b@x.json"],
        sweep.pilots: ["p.state.json", "q.json"],
        sweep.path / "submissions": ["slurm-20260101-000000-abcdef.json", "other.json"],
        sweep.path / "nodes": ["node001.json"],
    }
    for folder, names in garbage.items():
        folder.mkdir(exist_ok=True)
        for number, name in enumerate(names):
            (folder / name).write_bytes((b"\xff\xfe garbage{", b'{"a": [1]}')[number % 2])
    before = sorted(str(path) for path in sweep.path.rglob("*"))
    assert main(["status"]) == 0
    assert "2 of 6 points have ended" in capsys.readouterr().out
    assert main(["logs", "b"]) == 2
    one_line(capsys)
    assert main(["retry", "results/s", "--outcome", "hang"]) == 0
    assert set(before) <= {str(path) for path in sweep.path.rglob("*")}


@pytest.mark.slow
@pytest.mark.parametrize("marker", ["", "{", "[]", '{"format": 1}', '{"format": 1, "settings": 3}', '{"format": 99}'])
def test_a_damaged_marker(marker: str, capsys: pytest.CaptureFixture[str]) -> None:
    sweep = SweepDir.create(Path("results/tiny"), {})
    sweep.marker.write_text(marker)
    assert main(["run", "+grid=tiny", "launcher=local"]) == 2
    assert "results/tiny" in one_line(capsys)
    assert entry_names(sweep.todo) == []


@pytest.mark.slow
def test_a_part_cut_in_half_costs_its_rows_only(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    first, second = plan_of(["+grid=tiny"]).to_run[:2]
    folder = SweepDir.create(Path("results/s"), {}).path
    marker = (folder / "sweep.json").read_text()
    for point in (first, second):
        store_attempt(folder, point.experiment, cluster="cpu")
    (folder / "sweep.json").write_text(marker)
    cut = next(folder.glob(f"parts/attempts/{first.experiment.id}*"))
    cut.write_bytes(cut.read_bytes()[: cut.stat().st_size // 2])
    half = cut.read_bytes()
    assert main(["plan", "+grid=tiny", "name=s"]) == 0
    assert re.search(r"^cached +1 ", capsys.readouterr().out, re.MULTILINE)
    assert [record.message.count("\n") for record in caplog.records] == [0]
    assert cut.name in caplog.records[0].message
    assert main(["status"]) == 0
    assert read_attempts(folder)["experiment_id"].to_pylist() == [second.experiment.id]
    assert cut.read_bytes() == half  # left where it is, for whoever can mend it


WITHOUT_POWERS = """
import ctypes, sys
from sweep.__main__ import main
libc, header, sets = ctypes.CDLL(None), (ctypes.c_uint32 * 2)(0x20080522, 0), (ctypes.c_uint32 * 6)()
assert libc.capget(header, sets) == 0
for effective_or_permitted in (0, 1):
    sets[effective_or_permitted] &= ~0b1110  # root that must ask for permission, like anybody
assert libc.capset(header, sets) == 0
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow(seconds=4)
@pytest.mark.skipif(os.getuid() != 0, reason="only root can give a folder to somebody else")
def test_a_folder_of_somebody_else(tmp_path: Path) -> None:
    theirs = SweepDir.create(tmp_path / "theirs" / "tiny", {})
    secret = tmp_path / "secret"
    secret.mkdir()
    secret.chmod(0o700)
    for path in (theirs.path.parent, *theirs.path.parent.rglob("*"), secret):
        os.chown(path, 65534, 65534)

    def ask(*words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", WITHOUT_POWERS, *words],
            check=False,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    before = sorted(str(path) for path in tmp_path.rglob("*"))
    for words in (
        ["run", "+grid=tiny", "launcher=local", f"results_dir={theirs.path.parent}"],
        ["run", "+grid=tiny", "launcher=local", f"results_dir={theirs.path.parent}", "name=mine"],
        ["run", "+grid=tiny", "launcher=local", f"results_dir={secret}"],
        ["run", "+grid=tiny", "launcher=slurm", f"results_dir={theirs.path.parent}"],
        ["retry", str(theirs.path)],
        ["status", str(secret)],
    ):
        done = ask(*words)
        assert done.returncode == 2, (words, done.stdout, done.stderr)
        errors = [line for line in done.stderr.splitlines() if not line.startswith("planning: ")]  # if planning is slow
        assert len(errors) == 1 and errors[0].startswith("ultrasweep: "), done.stderr
    assert ask("status", str(theirs.path)).returncode == 0  # may look
    assert sorted(str(path) for path in tmp_path.rglob("*")) == before

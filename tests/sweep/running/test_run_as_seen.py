"""``run`` as somebody at a terminal sees it: a real command on a pseudo-terminal, real keys, scripted ranks."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import re
import shutil
import signal
import struct
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pyarrow.parquet as pq
import pytest

from launchers.state import pilot_state
from launchers.state.process_identity import provably_dead
from launchers.state.sweep_dir import SweepDir
from launchers.status.status import sweep_status
from results.shared_filesystem import packed_folder
from results.tables.store import read_attempts

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=3)]
ROOT = Path(__file__).resolve().parents[3]
MODEL = "num_layers: 2\nhidden_size: 64\nnum_heads: 4\nnum_kv_heads: 4\nffn_hidden_size: 128\nvocab_size: 256\n"
RUN = (
    "import sys\n"
    "from launchers import local\n"
    "local.PILOT = (sys.executable, '-m', 'tests.launchers.scripted')\n"
    "from sweep.__main__ import main\n"
    "words, status = sys.argv[1:], 0\n"
    "while words:\n"
    "    end = (words + ['then']).index('then')\n"
    "    status = max(status, main(words[:end]))\n"
    "    words = words[end + 1:]\n"
    "sys.exit(status)"
)
"""Runs its words as a command; the word ``then`` stands between two commands."""
STYLE = re.compile(r"\x1b\[[0-9;]*m")


def _take_terminal() -> None:
    os.setsid()
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


class Terminal:
    """A command on a terminal of its own."""

    opened: ClassVar[list[Terminal]] = []

    def __init__(self, folder: Path, *words: str, width: int = 80) -> None:
        self._ours, theirs = pty.openpty()
        fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, width, 0, 0))
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "SLURM_CONF": str(folder / "none"), "TERM": "xterm"}
        environment.pop("COLUMNS", None)
        self.process = subprocess.Popen(
            [sys.executable, "-c", RUN, *words],
            cwd=folder,
            env=environment,
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            preexec_fn=_take_terminal,  # noqa: PLW1509 - nothing else does what a terminal does at Ctrl-C
        )
        os.close(theirs)
        self._bytes = b""
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        Terminal.opened.append(self)

    def close(self) -> None:
        """End what a test that failed has left."""
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait()
        self._reader.join(2)
        os.close(self._ours)

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while chunk := os.read(self._ours, 65_536):
                self._bytes += chunk

    @property
    def raw(self) -> str:
        return self._bytes.decode(errors="replace")

    @property
    def told(self) -> str:
        """Without colours."""
        return STYLE.sub("", self.raw).replace("\r\n", "\n")

    def until(self, condition: Any, limit_s: float = 100.0) -> None:
        end = time.monotonic() + limit_s
        while not (condition in self.told if isinstance(condition, str) else condition()):
            assert time.monotonic() < end, f"waited for {condition} too long:\n{self.told}"
            assert self.process.poll() is None or isinstance(condition, str), self.told
            time.sleep(0.02)

    def press_ctrl_c(self) -> None:
        os.write(self._ours, b"\x03")

    def end(self, limit_s: float = 120.0) -> int:
        status = self.process.wait(limit_s)
        self._reader.join(2)
        return status


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    for name in ("grid", "model"):
        (tmp_path / "conf" / name).mkdir(parents=True)
    for name in ("ok", "slow", "killed", "forges"):
        (tmp_path / "conf" / "model" / f"{name}.yaml").write_text(MODEL)
    axes = {"model": ["ok"], "world_size": 2, "global_batch_size": 4, "seq_len": 32, "micro_batch_size": 1}
    grid = {"cluster": "cpu", "axes": axes, "derive": {"dp": "world_size"}}
    (tmp_path / "conf" / "grid" / "seen.yaml").write_text(json.dumps(grid))
    yield tmp_path
    for terminal in Terminal.opened:
        terminal.close()
    Terminal.opened.clear()


def words(*models: str, more: tuple[str, ...] = ()) -> list[str]:
    given = ["run", "+grid=seen", f"grid.axes.model=[{','.join(models)}]", "--conf", "conf", "measure=quick"]
    return [*given, *more]


def rows_of(folder: Path) -> list[dict[str, Any]]:
    rows = read_attempts(folder / "results" / "seen").to_pylist()
    return sorted(rows, key=lambda row: row["started_at"])


def slow_runs(folder: Path) -> bool:
    with contextlib.suppress(Exception):
        sweep = SweepDir.open(folder / "results" / "seen")
        running = [one for state in pilot_state.all_states(sweep) for one in state.running]
        return any("slow" in one.experiment_id and one.phase in ("warmup", "step") for one in running)
    return False


def until(condition: Any, limit_s: float = 100.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "waited too long"
        time.sleep(0.02)


def test_a_run_ends_with_what_it_found(folder: Path) -> None:
    seen = Terminal(folder, *words("ok", "killed"))
    assert seen.end() == 0, seen.told
    assert "2 attempts; points by outcome: crash 1, ok 1" in seen.told
    assert "fastest measured" in seen.told and "tokens/s/process" in seen.told
    assert "killed by SIGKILL in " in seen.told
    assert seen.told.rstrip().endswith("report: python -m analysis.report results/seen")
    assert "GPU" not in seen.told and "Traceback" not in seen.told
    frames = [line for line in seen.told.split("\n") if line.startswith(("  ok", "  crash"))]
    assert frames and all("process" in line or "crash" in line for line in frames)


def test_ctrl_c_stops_and_says_how_to_go_on(folder: Path) -> None:
    seen = Terminal(folder, *words("ok", "slow"))
    seen.until(lambda: slow_runs(folder))
    seen.press_ctrl_c()
    assert seen.end() == 130
    assert "stopping: the running point goes back to the queue (Ctrl-C again: stop at once)" in seen.told
    assert "interrupted, 1 point left; go on with: python -m sweep run +grid=seen" in seen.told
    [cancelled] = [row for row in rows_of(folder) if row["outcome"] == "cancelled"]
    assert cancelled["evidence"].startswith("stopped by the user after ")
    assert "waits again" not in cancelled["evidence"]
    again = Terminal(folder, *words("ok", "slow", more=("launcher.point_deadline_s=0.5",)))
    assert again.end() == 0
    told = subprocess.run(
        [sys.executable, "-m", "sweep", "status", "results/seen"],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert "timeout: " in told and "cancelled" not in told  # the point has ended since


def test_ctrl_c_twice_kills_at_once_and_loses_nothing(folder: Path) -> None:
    seen = Terminal(folder, *words("ok", "slow"))
    seen.until(lambda: slow_runs(folder))
    sweep = SweepDir.open(folder / "results" / "seen")
    [pilot] = pilot_state.all_states(sweep)
    os.kill(pilot.identity.pid, signal.SIGSTOP)  # a pilot that does not answer the first Ctrl-C
    seen.press_ctrl_c()
    seen.until("stopping: ")
    seen.press_ctrl_c()
    assert seen.end() == 130
    assert "killed; the next run records the points that were running" in seen.told
    assert "Traceback" not in seen.told
    until(lambda: provably_dead(pilot.identity))
    assert sweep_status(sweep).left == 1
    again = Terminal(folder, *words("ok", "slow", more=("launcher.point_deadline_s=0.5",)))
    assert again.end() == 0, again.told
    ended = [(row["model"], row["outcome"], row["will_retry"]) for row in rows_of(folder)]
    assert ended == [("ok", "ok", False), ("slow", "cancelled", True), ("slow", "timeout", False)]
    assert rows_of(folder)[1]["evidence"] == "killed by the user (Ctrl-C twice)"


def test_a_killed_command_is_not_told_as_the_users_wish(folder: Path) -> None:
    seen = Terminal(folder, *words("slow"))
    seen.until(lambda: slow_runs(folder))
    seen.process.kill()
    seen.end()
    sweep = SweepDir.open(folder / "results" / "seen")
    until(lambda: all(state.activity == "ended" for state in pilot_state.all_states(sweep)))
    [row] = rows_of(folder)
    assert row["outcome"] == "cancelled" and "by the user" not in row["evidence"]
    assert row["evidence"].startswith("the command that ran the sweep had gone")


def test_a_killed_pilot_is_replaced_and_said(folder: Path) -> None:
    seen = Terminal(folder, *words("slow", "ok", more=("launcher.point_deadline_s=3",)), width=200)
    seen.until(lambda: slow_runs(folder))
    [pilot] = pilot_state.all_states(SweepDir.open(folder / "results" / "seen"))
    os.kill(pilot.identity.pid, signal.SIGKILL)
    assert seen.end() == 0, seen.told
    assert "the pilot was killed by SIGKILL; starting another, which takes over its point" in seen.told
    assert sorted(row["outcome"] for row in rows_of(folder)) == ["node_failure", "ok", "timeout"]


def test_a_removed_folder_is_not_a_full_disk(folder: Path) -> None:
    seen = Terminal(folder, *words("slow"))
    seen.until(lambda: slow_runs(folder))
    (folder / "results" / "seen").rename(folder / "gone")
    shutil.rmtree(folder / "gone", ignore_errors=True)
    assert seen.end() == 2
    assert "results/seen was removed while its points ran; the run cannot continue" in " ".join(seen.told.split())
    assert "disk" not in seen.told and "Traceback" not in seen.told


@pytest.fixture
def small_disk(folder: Path) -> Iterator[Path]:
    """A disk of 8 MiB."""
    place = folder / "results"
    place.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if subprocess.run(mount, capture_output=True, check=False).returncode:
        pytest.skip("no disk can be mounted here")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


def test_a_full_disk_is_waited_for(folder: Path, small_disk: Path) -> None:
    seen = Terminal(folder, *words("slow", more=("launcher.point_deadline_s=2",)))
    seen.until(lambda: slow_runs(folder))
    filler = small_disk / "filler"
    with contextlib.suppress(OSError), filler.open("wb") as file:
        while True:
            file.write(b"x" * 4096)
            file.flush()
    seen.until("is on a full disk; writing is retried, nothing is lost")
    time.sleep(2.5)  # the point ends meanwhile
    filler.unlink()
    assert seen.end() == 0, seen.told
    assert "Traceback" not in seen.told
    assert sorted(row["outcome"] for row in rows_of(folder)) in (["timeout"], ["crash", "timeout"])


def test_logs_cannot_command_the_terminal(folder: Path) -> None:
    """A rank that writes escape sequences, seen through a plain run, a live one and every command that quotes it."""
    quoting = ["explain", "forges", "then", "logs", "forges", "then", "status", "results/seen"]
    run = words("forges")
    for command in ([*run, "--plain"], run, quoting):
        if command[0] == "run":
            shutil.rmtree(folder / "results", ignore_errors=True)
        seen = Terminal(folder, *command, width=200)
        assert seen.end() == 0, seen.told
        assert seen.told.count("the forged last words") >= command.count("then") + 1, command
        for attack in ("\x07", "\x1b]", "\x1b[8m", "\x1b[2J"):
            assert attack not in seen.raw, (command, attack)
    attempts = packed_folder.folders(folder / "results" / "seen" / "attempts")
    [attempt] = [one for one in attempts if one.name.startswith("forges")]
    assert "\x1b]0;" in packed_folder.read_text(attempt / "rank_1.log")


def test_a_secret_of_the_environment_is_in_no_table_and_no_message(folder: Path) -> None:
    more = ("+launcher.environment.HF_TOKEN=hunter2", "+launcher.environment.NCCL_DEBUG=WARN", "--plain")
    seen = Terminal(folder, *words("ok", more=more))
    assert seen.end() == 0, seen.told
    assert "hunter2" not in seen.told
    [row] = rows_of(folder)
    assert "'+launcher.environment.HF_TOKEN=***'" in row["command"] and "NCCL_DEBUG=WARN" in row["command"]
    results = folder / "results" / "seen"
    tables = [pq.read_table(path) for path in results.rglob("*.parquet")]
    assert tables and all("hunter2" not in str(table.to_pylist()) for table in tables)
    holders = [path for path in results.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert [(path.parent.name, path.stat().st_mode & 0o077) for path in holders] == [("pilots", 0)]

"""Reports that cannot be written or are interrupted: one line says so, and what was there before stays."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest

from analysis import report
from analysis.page import staging as output
from tests.analysis import synthetic
from tests.analysis.pages import POINTS, QUICK

pytestmark = [pytest.mark.slow, pytest.mark.drawn(one_in=3)]

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return synthetic.make_sweep(tmp_path_factory.mktemp("results") / "s", synthetic.attempts(POINTS[:3]))


def test_somebody_elses_page_is_not_overwritten(
    sweep: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "index.html").write_text("<h1>mine</h1>")
    assert report.main([str(sweep), "--out", str(tmp_path)]) == 2
    assert "would be overwritten" in capsys.readouterr().err
    assert (tmp_path / "index.html").read_text() == "<h1>mine</h1>"


@pytest.mark.parametrize("words", [[""], [".", "--out", " "]])
def test_an_empty_path_is_not_this_folder(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert report.main(words) == 2
    assert "an empty path" in capsys.readouterr().err


def files_of(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_earlier_report_is_replaced_whole(sweep: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    report.build(sweep, out, replace(QUICK, tables=("csv", "md")))
    stale = list((out / "tables").glob("*.md"))
    assert stale
    report.build(sweep, out, QUICK)
    assert not any(path.exists() for path in stale)
    assert not list(out.glob(".*"))


def test_a_report_that_fails_leaves_the_earlier_one_and_nothing_else(
    sweep: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "deep" / "out"

    def full(*arguments: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr("analysis.page.export.write", full)
        with pytest.raises(output.UnwritableReport, match=r"out: No space left on device"):
            report.build(sweep, out, QUICK)
        assert not (tmp_path / "deep").exists()
    report.build(sweep, out, QUICK)
    before = files_of(out)
    monkeypatch.setattr("analysis.page.export.write", full)
    with pytest.raises(output.UnwritableReport):
        report.build(sweep, out, QUICK)
    assert files_of(out) == before


def command(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "analysis.report", *map(str, arguments)]


def test_a_file_that_cannot_grow_is_one_line(sweep: Path, tmp_path: Path) -> None:
    """As on a full disk, from within the processes that draw."""
    done = subprocess.run(
        command(sweep, "--out", tmp_path / "out"),
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, 20_000)),
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1] == f"error: cannot write a report into {tmp_path / 'out'}: File too large"
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_read_only_folder_is_one_line(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir(mode=0o500)
    with pytest.raises(output.UnwritableReport, match="Permission denied"):
        report.build(sweep, tmp_path / "out")


def test_out_that_is_a_file_is_one_line(sweep: Path, tmp_path: Path) -> None:
    (tmp_path / "out").write_text("")
    done = subprocess.run(
        command(sweep, "--out", tmp_path / "out"), cwd=ROOT, capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: cannot write a report into {tmp_path / 'out'}")
    assert "Traceback" not in done.stderr


WAITING = """
import signal, sys, time
from pathlib import Path
from analysis import report
from analysis.page import draw_figures

signal.signal(signal.SIGINT, signal.default_int_handler)  # as in a terminal, whatever the tests inherit

def drawn_and_waiting(*figure, drawn=draw_figures._drawn):
    found = drawn(*figure)
    while not Path(sys.argv[1]).exists():
        time.sleep(0.01)
    return found

draw_figures._drawn = drawn_and_waiting
sys.exit(report.main(sys.argv[2:]))
"""
"""A report whose processes each draw a figure and then wait for a file."""


def test_ctrl_c_is_one_line_and_leaves_the_earlier_report(sweep: Path, tmp_path: Path) -> None:
    out, go_on = tmp_path / "out", tmp_path / "go on"
    report.build(sweep, out, QUICK)
    before = files_of(out)
    words = [sys.executable, "-c", WAITING, str(go_on), str(sweep), "--out", str(out)]
    running = subprocess.Popen(words, cwd=ROOT, stderr=subprocess.PIPE, text=True, start_new_session=True)
    while not list(out.glob(".unfinished-*/figures/*")):
        assert running.poll() is None, running.communicate()
        time.sleep(0.02)
    os.killpg(running.pid, signal.SIGINT)  # as a terminal sends it: to every process
    go_on.touch()
    _, told = running.communicate(timeout=150)
    assert running.returncode == 130
    assert told.splitlines()[-1] == "error: interrupted; an earlier report is unchanged"
    assert "Traceback" not in told
    assert files_of(out) == before


def test_a_killed_report_leaves_no_process_behind(tmp_path: Path) -> None:
    sweep = synthetic.make_sweep(tmp_path / "s", synthetic.attempts(POINTS[:24]))
    words = command(sweep, "--out", tmp_path / "out")
    process = subprocess.Popen(words, cwd=ROOT, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    drawing: list[str] = []
    limit = time.monotonic() + 60
    while not drawing and time.monotonic() < limit:
        drawing = children.read_text().split()
        time.sleep(0.01)
    assert drawing
    process.kill()
    process.wait()
    limit = time.monotonic() + 10
    while (left := [pid for pid in drawing if _runs(pid)]) and time.monotonic() < limit:
        time.sleep(0.05)
    for pid in left:
        os.kill(int(pid), signal.SIGKILL)
    assert not left


def _runs(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False

"""The whole way on real processes and the real engine: a grid goes in, one point runs out of memory, one loses a rank,
one runs; every outcome is a row, and the report says so."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.report import main as write_report
from launchers.state import pilot_state
from launchers.state.sweep_dir import SweepDir
from results.tables.store import read_attempts, read_steps
from sweep.__main__ import main as run_sweep
from sweep.composing.conffiles import ConfFolders
from sweep.composing.machine import clusters_of_device, this_machine
from tests.launchers.processes import rank_pids

pytestmark = [pytest.mark.slow(seconds=25), pytest.mark.timeout(400)]

ROOT = Path(__file__).resolve().parents[1]
CLUSTER = """
defaults: [/device@device: cpu, _self_]
name: small_cpu
backend: cpu
devices_per_node: 4
device: {memory_bytes: 314572800}
intra_node: {bandwidth: 1.0e9, latency_s: 50.0e-6, source: a test}
inter_node: null
matmul_efficiency: null
"""
GRID = """
cluster: small_cpu
axes:
  model: tiny
  kind: [fits, too_large, loses_a_rank]
derive:
  tp: 1
  dp: 2 if kind == 'fits' else 1
  pp: 2 if kind == 'loses_a_rank' else 1
  seq_len: 8192 if kind == 'too_large' else 2048 if kind == 'loses_a_rank' else 128
  micro_batch_size: 8 if kind == 'too_large' else 1
  global_batch_size: 8
  precision: "'fp32'"
"""
STEPS_OF_REPLAYS = 2000
"""Timed steps that last for seconds on a GPU, since a pilot says once a second what its ranks do."""


@pytest.fixture
def conf(tmp_path: Path) -> Path:
    for name, text in (("cluster/small_cpu.yaml", CLUSTER), ("grid/faults.yaml", GRID)):
        path = tmp_path / "conf" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path / "conf"


def words_of(conf: Path, *words: str) -> list[str]:
    """The command line of the sweep."""
    folder = f"results_dir={conf.parent / 'results'}"
    begin = ["run", "--plain", "--conf", str(conf), "+grid=faults", "launcher=local"]
    return [*begin, *words, folder, "name=faults", "plan.run_predicted_oom=true"]


def sweep(conf: Path, *words: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "sweep", *words_of(conf, *words)]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def pid_of_training_rank(
    running: subprocess.Popen[str],
    attempts: Path,
    rank: int,
    point: str = "pp2",
    phases: tuple[str, ...] = ("warmup", "step"),
    limit_s: float = 200.0,
) -> int:
    """Process of ``rank`` of the point with ``point`` in its id, once it is in one of ``phases``. ``running``: the
    command of the sweep."""
    end = time.monotonic() + limit_s
    while time.monotonic() < end:
        if running.poll() is not None:
            raise AssertionError(f"{point} did not start training: {running.communicate()[0]}")
        for state in pilot_state.all_states(SweepDir(attempts.parent)) if attempts.is_dir() else ():
            for one in state.running:
                pid = rank_pids(attempts / one.attempt_id).get(rank)
                if point in one.experiment_id and one.phase in phases and pid is not None:
                    return pid
        time.sleep(0.02)
    raise AssertionError(f"{point} did not start training")


@pytest.mark.slow(seconds=25, always=True)
def test_every_outcome_is_a_row_and_the_report_tells(conf: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = conf.parent / "results" / "faults"
    running = sweep(conf)
    os.kill(pid_of_training_rank(running, folder / "attempts", rank=1), signal.SIGKILL)
    output, _ = running.communicate(timeout=120)
    assert "points by outcome" in output, output

    rows: pd.DataFrame = read_attempts(folder).to_pandas().set_index("experiment_id")
    by_kind = {
        "fits": rows[rows.dp == 2].iloc[0],
        "too_large": rows[rows.seq_len == 8192].iloc[0],
        "loses_a_rank": rows[rows.pp == 2].iloc[0],
    }
    assert len(rows) == 3
    assert {kind: row.outcome for kind, row in by_kind.items()} == {
        "fits": "ok",
        "too_large": "oom",
        "loses_a_rank": "crash",
    }
    lost = by_kind["loses_a_rank"]
    assert lost.failed_rank == 1
    assert "SIGKILL" in lost.evidence
    assert lost.phase in ("warmup", "step")
    assert by_kind["too_large"].phase == "warmup"
    good = by_kind["fits"]
    assert good.tokens_per_s_per_gpu == pytest.approx(8 * 128 / good.step_time_s / 2)
    assert good.traffic_source == "counted"
    assert {(sent["axis"], sent["link"]) for sent in good.traffic} == {("dp_replicate", "inside_node")}
    assert good.git_commit is None or len(good.git_commit) == 40
    steps = read_steps(folder).to_pandas()
    assert set(steps.attempt_id) == {good.attempt_id}
    assert len(steps) == 2 * (good.warmup_steps + good.timed_steps)

    assert run_sweep(words_of(conf)) == 0
    assert "nothing to run" in capsys.readouterr().out

    report = conf.parent / "report"
    assert write_report([str(folder), "--out", str(report)]) == 0
    page = (report / "index.html").read_text()
    assert "out of memory" in page
    assert "SIGKILL" in page


def first_attempt_of_a_hang(conf: Path, *words: str, phase: str = "step", steps: int = 100) -> Any:
    """The first row of a point of two ranks of which the second was stopped while it trained."""
    folder = conf.parent / "results" / "faults"
    limit = f"+launcher.phase_limits_s.{phase}=4"
    running = sweep(conf, "grid.axes.kind=fits", limit, f"measure.timed_steps={steps}", *words)
    # Timed steps: in the first step of all a rank may compile for a while before it waits for another.
    stopped = pid_of_training_rank(running, folder / "attempts", rank=1, point="dp2", phases=(phase,))
    os.kill(stopped, signal.SIGSTOP)
    end = time.monotonic() + 120
    while read_attempts(folder).num_rows == 0 and time.monotonic() < end:
        time.sleep(0.1)
    running.send_signal(signal.SIGINT)  # the second attempt, which would run undisturbed, is not waited for
    output, _ = running.communicate(timeout=120)
    first = read_attempts(folder).to_pandas().sort_values("started_at").iloc[0]
    assert first.outcome == "hang", output
    assert first.will_retry
    return first


def test_a_hang_says_which_collective_its_ranks_wait_in(conf: Path) -> None:
    first = first_attempt_of_a_hang(conf)
    # The rank that was stopped cannot say where it is; the one that waits for it can.
    assert re.search(r"no progress: .*; waiting: all_reduce #\d+ \[\d+\] on rank 0$", first.evidence), first.evidence


@pytest.mark.multi_gpu
def test_a_hang_says_which_collective_its_ranks_wait_in_on_gpus(conf: Path) -> None:
    fitting = clusters_of_device(ConfFolders(), this_machine().gpu_name or "")
    if not fitting:
        pytest.skip("no cluster file describes the devices of this machine")
    first = first_attempt_of_a_hang(conf, f"cluster={fitting[0]}", "+grid.axes.cuda_graph=none")
    print(first.evidence)
    assert re.search(r"no progress: .*; waiting: \w+ #\d+ \[\d+\].* on rank 0(;|$)", first.evidence), first.evidence


@pytest.mark.multi_gpu
def test_a_hang_inside_a_replay_is_named(conf: Path) -> None:
    """NCCL knows nothing of the replays of a captured step; the heartbeats do."""
    fitting = clusters_of_device(ConfFolders(), this_machine().gpu_name or "")
    if not fitting:
        pytest.skip("no cluster file describes the devices of this machine")
    words = f"cluster={fitting[0]}", "+grid.axes.cuda_graph=step", "measure.warmup_steps=3"
    first = first_attempt_of_a_hang(conf, *words, phase="replay", steps=STEPS_OF_REPLAYS)
    print(first.evidence)
    assert first.phase == "replay"  # a graph does not say which of its ranks waits for the other: both are named
    assert re.search(r"no progress: .*rank 1 in the replay of step \d+", first.evidence), first.evidence


@pytest.mark.multi_gpu
def test_ctrl_c_between_replays_loses_nothing(conf: Path) -> None:
    fitting = clusters_of_device(ConfFolders(), this_machine().gpu_name or "")
    if not fitting:
        pytest.skip("no cluster file describes the devices of this machine")
    folder = conf.parent / "results" / "faults"
    steps = f"measure.timed_steps={STEPS_OF_REPLAYS}", "measure.warmup_steps=3"
    words = "grid.axes.kind=fits", f"cluster={fitting[0]}", "+grid.axes.cuda_graph=step", *steps
    running = sweep(conf, *words)
    ranks = [
        pid_of_training_rank(running, folder / "attempts", rank, point="dp2", phases=("replay",)) for rank in (0, 1)
    ]
    running.send_signal(signal.SIGINT)
    output, _ = running.communicate(timeout=60)
    assert running.returncode == 130, output
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks), "a rank is left on its device"
    (first,) = read_attempts(folder).to_pylist()
    assert (first["outcome"], first["phase"], first["will_retry"]) == ("cancelled", "replay", True)

    running = sweep(conf, *words)
    output, _ = running.communicate(timeout=120)
    rows = read_attempts(folder).to_pandas().sort_values("started_at")
    assert rows.outcome.tolist() == ["cancelled", "ok"], output
    assert rows.cuda_graph_run.iloc[-1] == "step" and rows.timed_steps.iloc[-1] == STEPS_OF_REPLAYS

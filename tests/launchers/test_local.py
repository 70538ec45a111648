"""Whole runs on this machine with a scripted workload: every way in which a point can end, and the rows that it
gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from launchers import local
from launchers.local import run_local
from launchers.state import pilot_state
from launchers.state.pilot_config import PilotConfig, pilot_config_to_dict, pilot_environment
from launchers.state.process_identity import alive
from launchers.state.sweep_dir import SweepDir
from launchers.status.retry import retry
from launchers.status.status import sweep_status
from results.errors import UltrasweepError
from results.shared_filesystem import packed_folder
from results.tables import store
from tests.launchers.local_runs import SCRIPTED, phase_of, rows_of, start_pilot, until
from tests.launchers.processes import rank_pids
from tests.launchers.scripted import points, settings
from workloads.contract.protocol import write_json

pytestmark = pytest.mark.drawn(one_in=3)


@pytest.fixture(autouse=True)
def scripted_pilot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(local, "PILOT", SCRIPTED)


@pytest.fixture
def sweep(tmp_path: Path) -> SweepDir:
    return SweepDir.create(tmp_path / "a sweep", {})


@pytest.mark.slow
def test_faults_become_rows_and_the_points_after_them_run(sweep: SweepDir) -> None:
    behaviours = ["ok", "oom", "raises", "killed", "hangs", "silent", "teardown", "ok"]
    sweep.add_points(points(*behaviours))
    summary = run_local(sweep, settings(), live=False, command="sweep run")
    assert summary.outcomes == {"ok": 3, "oom": 1, "crash": 3, "hang": 1}
    assert (summary.left, summary.exit_code) == (0, 0)

    rows = {(row["model"], row["seed"]): row for row in rows_of(sweep) if row["outcome"] != "hang"}
    assert (rows["oom", 1]["phase"], rows["oom", 1]["phase_step"], rows["oom", 1]["failed_rank"]) == ("step", 1, 1)
    assert "Tried to allocate 30.00 GiB" in rows["oom", 1]["evidence"]
    assert "(then rank 0 failed too)" in rows["oom", 1]["evidence"]
    assert "ZeroDivisionError" in rows["raises", 2]["evidence"]
    killed = rows["killed", 3]
    assert (killed["outcome"], killed["failed_rank"], killed["phase"]) == ("crash", 1, "step")
    assert killed["evidence"].startswith("rank 1 killed by SIGKILL in step 1")
    assert "rank 1 ended with exit status 0" in rows["silent", 5]["evidence"]
    assert rows["teardown", 6]["teardown_hung"]
    assert rows["teardown", 6]["step_time_s"] == pytest.approx(0.02)
    assert all(row["will_retry"] is False for row in rows.values())

    hangs = [row for row in rows_of(sweep) if row["outcome"] == "hang"]
    assert [(row["attempt_number"], row["will_retry"]) for row in hangs] == [(1, True), (2, False)]
    assert all(row["phase"] == "step" and row["phase_step"] == 1 for row in hangs)
    assert "no progress: rank 0 in step 1" in hangs[0]["evidence"]
    assert "_misbehave (scripted.py:" in hangs[0]["evidence"]  # where it hung, from its own Python stack
    beats = json.loads(packed_folder.read_text(sweep.path / hangs[0]["log_dir"] / "heartbeats.json"))
    assert [(beat["rank"], beat["phase"], beat["step"]) for beat in beats] == [(0, "step", 1), (1, "step", 1)]

    last = rows["ok", 7]
    assert last["outcome"] == "ok"
    assert last["gap_s"] is not None and last["gap_s"] > 0
    assert last["log_dir"] and "measured everything" in packed_folder.read_text(
        sweep.path / last["log_dir"] / "rank_0.log"
    )
    assert not list((sweep.path / "parts").rglob("*.parquet"))  # compacted
    assert store.read_steps(sweep.path).num_rows == 3 * 2 * 3


@pytest.mark.slow
def test_a_measured_row_is_complete(sweep: SweepDir) -> None:
    sweep.add_points(points("ok", "ok", "wrong", zero_stage=1))
    run_local(sweep, settings(), live=False, command="sweep run +grid=x")
    first, second, third = rows_of(sweep)
    assert first["step_time_s"] == pytest.approx(0.02)  # rank 1 is the slower one
    assert first["tokens_per_s_per_gpu"] == pytest.approx(4 * 32 / 0.02 / 2)
    assert first["peak_allocated_bytes"] == 3 * 2**30 and first["peak_rank"] == 1
    assert first["peak_allocated_by_stage_bytes"] == [3 * 2**30]
    assert first["losses"] == pytest.approx([5.5, 5.4, 5.3])
    assert first["command"] == "sweep run +grid=x" and first["ultrasweep_version"]
    for column in ("spawn_s", "rendezvous_s", "build_s", "warmup_s", "timed_s", "teardown_s"):
        assert first[column] >= 0, column
    assert first["spawn_s"] + first["rendezvous_s"] + first["build_s"] + first["warmup_s"] + first["timed_s"] + first[
        "teardown_s"
    ] == pytest.approx(first["duration_s"], abs=0.2)
    assert first["mfu_palm"] is None and first["peak_flops"] is None  # a CPU of unknown peak: never a guess
    assert first["loss_reference_id"] is None
    assert second["loss_reference_id"] is None  # another seed: another reference
    assert third["seed"] == 2


@pytest.mark.slow
def test_losses_of_layouts_are_compared(sweep: SweepDir) -> None:
    base = points("ok")[0]
    layouts = [
        base,
        base.__class__(index=1, grid="test", deadline_s=30.0, experiment=base.experiment.replace(tp=2, dp_replicate=1)),
        base.__class__(
            index=2, grid="test", deadline_s=30.0, experiment=points("wrong")[0].experiment.replace(recompute="full")
        ),
    ]
    sweep.add_points(layouts)
    run_local(sweep, settings(), live=False)
    first, same, wrong = rows_of(sweep)
    assert same["loss_reference_id"] == first["attempt_id"] and same["loss_agrees"] is True
    assert wrong["loss_reference_id"] == first["attempt_id"] and wrong["loss_agrees"] is False
    assert wrong["loss_max_difference"] == pytest.approx(0.2 / 5.3, rel=1e-6)


@pytest.mark.slow
def test_a_collective_timeout_is_a_hang_of_the_missing_rank(sweep: SweepDir) -> None:
    sweep.add_points(points("first_hangs"))
    run_local(sweep, settings(phase_limits_s={"step": 20.0}), live=False)
    row = rows_of(sweep)[0]
    assert (row["outcome"], row["failed_rank"]) == ("hang", 1)
    assert "timed out on rank 0; rank 1 did not join it" in row["evidence"]


@pytest.mark.slow
def test_infrastructure_failures_are_retried_a_limited_number_of_times(sweep: SweepDir) -> None:
    sweep.add_points(points("disk"))
    run_local(sweep, settings(max_attempts=2), live=False)
    assert [(row["attempt_number"], row["outcome"], row["will_retry"]) for row in rows_of(sweep)] == [
        (1, "crash", True),
        (2, "crash", False),
    ]


@pytest.mark.slow
def test_the_deadline_ends_a_point_that_goes_on(sweep: SweepDir) -> None:
    sweep.add_points(points("slow", deadline_s=1.0))
    run_local(sweep, settings(phase_limits_s={}), live=False)
    row = rows_of(sweep)[0]
    assert (row["outcome"], row["phase"], row["phase_step"]) == ("timeout", "warmup", 0)  # a step of it takes 30 s


@pytest.mark.slow
def test_nothing_of_a_point_is_left_behind(sweep: SweepDir) -> None:
    sweep.add_points(points("litters"))
    run_local(sweep, settings(), live=False)
    [folder] = packed_folder.folders(sweep.attempts)
    names = [name for name in packed_folder.sizes(folder) if name.startswith("litter_")]
    pids = [int(packed_folder.read_text(folder / name)) for name in names]
    assert len(pids) == 4
    assert not any(alive(pid) for pid in pids)


@pytest.mark.slow
def test_a_second_run_of_a_finished_sweep_runs_nothing_and_retry_brings_points_back(sweep: SweepDir) -> None:
    sweep.add_points(points("ok", "raises"))
    assert run_local(sweep, settings(), live=False).attempts == 2
    assert sweep.add_points(points("ok", "raises")) == 0
    assert run_local(sweep, settings(), live=False).attempts == 0
    with pytest.raises(UltrasweepError, match="neither a point of"):
        retry(sweep, ["crashed"])
    assert retry(sweep, ["crash"]) == 1
    assert sweep_status(sweep).todo == 1
    assert run_local(sweep, settings(), live=False).attempts == 1
    assert [row["attempt_number"] for row in rows_of(sweep)] == [1, 1, 2]


def test_points_too_wide_for_this_machine_wait_and_are_reported(sweep: SweepDir) -> None:
    sweep.add_points(points("ok", dp=4))
    summary = run_local(sweep, settings(), live=False)
    assert (summary.left, summary.too_wide, summary.exit_code) == (1, 1, 1)
    assert "1 of the points need more than the 2 devices" in summary.message


@pytest.mark.slow
def test_ctrl_c_puts_the_running_point_back_and_the_next_run_resumes(sweep: SweepDir) -> None:
    sweep.add_points(points("ok", "slow", "ok", deadline_s=60.0))
    code = (
        "import sys; from pathlib import Path\n"
        "from launchers import local; from launchers.state.sweep_dir import SweepDir\n"
        "from tests.launchers.scripted import settings\n"
        f"local.PILOT = {SCRIPTED!r}\n"
        "summary = local.run_local(SweepDir.open(Path(sys.argv[1])), settings(phase_limits_s={}), live=False)\n"
        "sys.exit(summary.exit_code)"
    )
    process = subprocess.Popen([sys.executable, "-c", code, str(sweep.path)], stdout=subprocess.PIPE, text=True)

    def slow_runs() -> bool:
        running = [one for state in pilot_state.all_states(sweep) for one in state.running]
        return any("slow" in run.experiment_id and run.phase == "warmup" for run in running)

    until(slow_runs)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 130
    assert "stopping: the running point goes back to the queue" in output
    assert "cancelled" in output
    cancelled = rows_of(sweep)[-1]
    assert (cancelled["outcome"], cancelled["phase"], cancelled["will_retry"]) == ("cancelled", "warmup", True)
    assert (sweep_status(sweep).todo, sweep_status(sweep).claimed, sweep_status(sweep).pilots) == (2, 0, ())

    summary = run_local(sweep, settings(phase_limits_s={}, point_deadline_s=6.0), live=False)
    assert summary.outcomes == {"ok": 2, "timeout": 1}
    assert [row["attempt_number"] for row in rows_of(sweep) if row["model"] == "slow"] == [1, 2]


@pytest.mark.slow
def test_the_pilot_stops_when_whoever_started_it_is_killed(sweep: SweepDir) -> None:
    sweep.add_points(points("slow", deadline_s=60.0))
    reader, writer = os.pipe()
    config = PilotConfig(settings=settings(phase_limits_s={}), command=None, wall_time_s=None, stop_with_parent=True)
    write_json(pilot_state.config_path(sweep, "p"), pilot_config_to_dict(config))
    pilot = subprocess.Popen([*SCRIPTED, str(sweep.path), "p"], env=pilot_environment(), stdin=reader)
    os.close(reader)
    until(lambda: sweep_status(sweep).claimed == 1)
    os.close(writer)
    assert pilot.wait(10) == 3
    [row] = rows_of(sweep)
    assert (row["outcome"], row["will_retry"]) == ("cancelled", True)
    assert row["evidence"].startswith("the command that ran the sweep had gone (killed, or its terminal closed)")


@pytest.mark.slow
def test_sigterm_releases_everything_as_preempted(sweep: SweepDir) -> None:
    sweep.add_points(points("slow", deadline_s=60.0))
    pilot = start_pilot(sweep, "p", settings(phase_limits_s={}))
    until(lambda: any(one.phase == "warmup" for s in pilot_state.all_states(sweep) for one in s.running))
    pilot.terminate()
    assert pilot.wait(10) == 3
    assert [(row["outcome"], row["will_retry"]) for row in rows_of(sweep)] == [("preempted", True)]
    assert sweep_status(sweep).todo == 1


@pytest.mark.slow
def test_a_pilot_claims_no_point_that_exceeds_its_wall_time(sweep: SweepDir) -> None:
    long, short = points("ok", "ok", deadline_s=1000.0)
    short = short.__class__(index=1, grid="test", experiment=short.experiment, deadline_s=5.0)
    sweep.add_points([long, short])
    assert start_pilot(sweep, "p", settings(), wall_time_s=60.0).wait(15) == 0
    assert [row["seed"] for row in rows_of(sweep)] == [1]
    assert sweep_status(sweep).todo == 1


@pytest.mark.slow
def test_two_pilots_at_once_run_each_point_exactly_once(sweep: SweepDir) -> None:
    sweep.add_points(points(*["ok"] * 14))
    pilots = [start_pilot(sweep, name, settings()) for name in ("p1", "p2")]
    assert [pilot.wait(40) for pilot in pilots] == [0, 0]
    rows = rows_of(sweep)
    assert sorted(row["seed"] for row in rows) == list(range(14))
    assert {record.pilot_id for record in sweep_status(sweep).attempts} == {"p1", "p2"}
    assert sweep_status(sweep).done == {"ok": 14}


@pytest.mark.slow
def test_a_killed_pilot_leaves_no_rank_and_its_point_is_taken_over(sweep: SweepDir) -> None:
    sweep.add_points(points("slow", "ok", deadline_s=60.0))
    pilot = start_pilot(sweep, "p1", settings(phase_limits_s={}))
    until(lambda: phase_of(sweep) == "warmup")
    pids = rank_pids(sweep.attempts).values()
    assert len(pids) == 2
    pilot.kill()
    pilot.wait()
    until(lambda: not any(alive(pid) for pid in pids))
    assert sweep_status(sweep).claimed == 1

    summary = run_local(sweep, settings(phase_limits_s={}, point_deadline_s=6.0), live=False)
    assert summary.outcomes == {"ok": 1, "timeout": 1}
    slow = [row for row in rows_of(sweep) if row["model"] == "slow"]
    assert [(row["outcome"], row["attempt_number"]) for row in slow] == [("node_failure", 1), ("timeout", 2)]
    assert (slow[0]["phase"], slow[0]["phase_step"]) == ("warmup", 0)
    assert "pilot p1 died while it ran this point" in slow[0]["evidence"]


@pytest.mark.slow
def test_a_run_survives_the_death_of_its_pilot(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep.add_points(points("ok", "ok"))
    dies_once = (
        "import os, sys\n"
        f"flag = {str(sweep.path / 'died')!r}\n"
        "if not os.path.exists(flag):\n"
        "    open(flag, 'w').close(); os.kill(os.getpid(), 9)\n"
        "from launchers.pilot import command; from tests.launchers.scripted import run_rank\n"
        "sys.exit(command.main(run_rank=run_rank))"
    )
    monkeypatch.setattr(local, "PILOT", (sys.executable, "-c", dies_once))
    assert run_local(sweep, settings(), live=False).outcomes == {"ok": 2}
    (sweep.path / "died").unlink()
    sweep.add_points([p.__class__(index=9, grid="", experiment=p.experiment, deadline_s=9.0) for p in points("late")])
    monkeypatch.setattr(local, "PILOT", (sys.executable, "-c", "import os; os.kill(os.getpid(), 9)"))
    with pytest.raises(local.PilotFailed, match="killed by SIGKILL 3 times in a row"):
        run_local(sweep, settings(), live=False)


@pytest.mark.slow
def test_rehearsed_stages_are_shared_between_points(sweep: SweepDir) -> None:
    """Two points that differ only in the number of replicas' micro-batches have the same stages, which run once."""
    base = points("ok", method="rehearsed", dp=1, pp=2)[0]
    bigger = base.experiment.replace(global_batch_size=64)
    sweep.add_points([base, base.__class__(**{**_fields(base), "index": 1, "experiment": bigger})])
    summary = run_local(sweep, settings(method="rehearsed", launcher="rehearse", num_devices=1), live=False)
    assert summary.outcomes == {"ok": 2}
    first, second = rows_of(sweep)
    assert first["method"] == "rehearsed"
    assert first["peak_allocated_by_stage_bytes"] == [2 * 2**30, 3 * 2**30]
    assert first["losses"] is None and first["step_time_s"] != pytest.approx(0.02)
    names = [packed_folder.sizes(sweep.path / row["log_dir"]) for row in (first, second)]
    logs = [sum(name.endswith(".log") for name in of) for of in names]
    assert logs[0] == 2


@pytest.mark.slow
def test_results_that_no_row_can_be_made_of_cost_one_row_not_the_sweep(sweep: SweepDir) -> None:
    sweep.add_points(points("odd", "ok"))
    assert run_local(sweep, settings(), live=False).outcomes == {"crash": 1, "ok": 1}
    assert "error of the launcher" in rows_of(sweep)[0]["evidence"]


def _fields(point: Any) -> dict[str, Any]:
    return {name: getattr(point, name) for name in point.__dataclass_fields__}


@pytest.mark.slow
def test_a_pilots_config_is_for_its_user_alone(sweep: SweepDir) -> None:
    sweep.add_points(points("ok"))
    run_local(sweep, settings(environment={"HF_TOKEN": "hunter2"}), live=False)
    holders = [path for path in sweep.path.rglob("*") if path.is_file() and b"hunter2" in path.read_bytes()]
    assert [path.parent.name for path in holders] == ["pilots"]
    assert holders[0].stat().st_mode & 0o077 == 0

"""``status`` and ``logs`` of a sweep that runs on Slurm: what is shown, and that it fits a narrow terminal."""

from __future__ import annotations

import dataclasses
import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from launchers.attempt.packing import pack_attempt
from launchers.slurm.client import Job
from launchers.state import history, node_exclusions, pilot_state
from launchers.state.history import AttemptRecord
from launchers.state.pilot_state import PilotState, Running
from launchers.state.process_identity import ProcessIdentity
from launchers.state.submissions import log_dir, new_submission, update
from launchers.state.sweep_dir import Point, SweepDir, entry_names, read_point, split_name
from launchers.status.status import sweep_status
from launchers.status.view import render_status
from sweep.__main__ import main
from sweep.composing.conffiles import ConfFolders
from sweep.inspecting import status
from sweep.running.run import enqueue, prepare

WORDS = [
    "+grid=playbook",
    "launcher=slurm",
    "grid.axes.model=[llama8.86b]",
    "grid.axes.nodes=[1,2]",
    "name=study",
]
ELSEWHERE = ProcessIdentity(host="node001", boot_id="b", pid_namespace=1, pid=7, start_ticks=1)
"""A process of which this machine knows nothing."""


def record_of(point: Point, number: int, outcome: str, seconds: float, **changes: Any) -> AttemptRecord:
    fields: dict[str, Any] = {
        "attempt_id": f"{point.experiment.id}.a1.{number:06x}",
        "attempt_number": 1,
        "pilot_id": "slurm-20260101-000000-abcdef.5.0",
        "experiment_id": point.experiment.id,
        "world_size": point.experiment.world_size,
        "outcome": outcome,
        "phase": "step",
        "phase_step": 1,
        "failed_rank": None,
        "evidence": None if outcome == "ok" else f"why {outcome} happened\nand more",
        "infrastructure": False,
        "will_retry": False,
        "started_at": 1e9 + 100 * number,
        "ended_at": 1e9 + 100 * number + seconds,
        "nodes": ["node001"],
    }
    return AttemptRecord(**{**fields, **changes})


class Study:
    """A sweep in the middle of its work: two shapes, three jobs, some outcomes."""

    def __init__(self) -> None:
        self.sweep = enqueue(prepare(WORDS, ConfFolders(), ["pp <= 2"])).sweep
        self.submission = update(
            self.sweep,
            new_submission(self.sweep, nodes=1, count=3, time_min=60),
            token="slurm-20260101-000000-abcdef",
            stage="submitted",
            job_id="1234",
        )
        outcomes = {0: ("ok", 40.0), 1: ("ok", 400.0), 2: ("oom", 12.0), 3: ("hang", 300.0)}
        for number, (outcome, seconds) in outcomes.items():
            point = self.take()
            history.write_record(self.sweep, point.stem, record_of(point, number, outcome, seconds))
            name = next(name for name in entry_names(self.sweep.claimed) if split_name(name)[0] == point.stem)
            (self.sweep.claimed / name).rename(self.sweep.done / f"{point.stem}@{outcome}.json")
        self.running = [self.take(), self.take()]
        self.state("5", "0", self.running)

    def take(self) -> Point:
        name = entry_names(self.sweep.todo)[0]
        point = read_point(self.sweep.todo / name)
        (self.sweep.todo / name).rename(self.sweep.claimed / f"{point.stem}@slurm-20260101-000000-abcdef.5.0.json")
        return point

    def state(self, task: str, restarts: str, points: list[Point], **changes: Any) -> PilotState:
        now = time.time()
        state = PilotState(
            pilot_id=f"{self.submission.token}.{task}.{restarts}",
            identity=ELSEWHERE,
            count=3,
            time=now,
            started_at=now - 100 + int(restarts),
            activity="running",
            running=tuple(
                Running(
                    stem=point.stem,
                    attempt_id=f"{point.experiment.id}.a1.ffffff",
                    experiment_id=point.experiment.id,
                    world_size=point.experiment.world_size,
                    started_at=now - 30,
                    deadline_s=400.0,
                    nodes=tuple(f"node{n:03}" for n in range(1, 4)),
                    phase="step",
                    step=2,
                )
                for point in points
            ),
            job=f"1234_{task}",
            nodes=("node001", "node002", "node003"),
        )
        state = dataclasses.replace(state, **changes)
        pilot_state.write_state(self.sweep, state)
        return state

    def job(self, task: int, state: str, reason: str = "None") -> Job:
        return Job(
            token=self.submission.token,
            index=task,
            name=f"1234_{task}",
            array_id="1234",
            state=state,
            reason=reason,
            nodes="node[001-003]" if state == "RUNNING" else "",
        )


@pytest.fixture
def study(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Study:
    monkeypatch.chdir(tmp_path)
    return Study()


@pytest.fixture
def slurm_says(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[Job] | None], None]:
    def say(jobs: list[Job] | None) -> None:
        monkeypatch.setattr(status, "jobs_of", lambda sweep: jobs)

    return say


def shown(study: Study, width: int = 160) -> str:
    console = Console(record=True, width=width, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    status.print_status(study.sweep.path, console)
    return console.export_text()


@pytest.mark.slow
def test_everything_is_told(study: Study, slurm_says: Callable[[list[Job] | None], None]) -> None:
    slurm_says([study.job(5, "RUNNING"), study.job(6, "PENDING", "Priority"), study.job(7, "RUNNING")])
    node_exclusions.exclude(study.sweep, "node017", "device memory stays taken", "p")
    text = shown(study)
    for part in (
        "Slurm: 2 running, 1 pending (1 Priority)",
        "1 node, 8 devices",
        "2 nodes, 16 devices",
        "ok 2",
        "node[001-003]",
        "runs 2",
        "1234_7",
        "has not written its state yet",
        "step 2",
        "node001 + 2",
        "slowest points",
        "7 min",
        "excluded: node017 until",
        "device memory stays taken",
        "hang: ",
        "why hang happened and more",
    ):
        assert part in text, part
    status = sweep_status(study.sweep)
    by_hand = {shape.devices: shape for shape in status.shapes}
    assert set(by_hand) == {8, 16}
    assert by_hand[8].total + by_hand[16].total == status.total
    assert sum(shape.running for shape in status.shapes) == 2
    assert sum(sum(shape.done.values()) for shape in status.shapes) == 4
    assert status.device_hours == pytest.approx(sum(shape.device_hours for shape in status.shapes))
    assert status.expected_left_s is not None and status.expected_left_s > 0


@pytest.mark.slow
@pytest.mark.parametrize("width", [80, 160])
def test_it_fits_the_terminal(study: Study, width: int, slurm_says: Callable[[list[Job] | None], None]) -> None:
    slurm_says([study.job(task, "RUNNING") for task in range(30)])
    text = shown(study, width)
    free = ("hang", "oom", str(study.sweep.path))  # evidence and paths are as long as they are
    assert max(len(line) for line in text.splitlines() if not line.startswith(free)) <= width
    assert "... and 18 more pilots" in text


@pytest.mark.slow
def test_a_job_that_slurm_does_not_show_has_no_pilot(
    study: Study, slurm_says: Callable[[list[Job] | None], None]
) -> None:
    study.state("6", "0", [])
    slurm_says([study.job(6, "RUNNING")])
    text = shown(study)
    assert "1234_6" in text and "1234_5" not in text
    slurm_says(None)
    text = shown(study)
    assert "Slurm does not answer" in text
    assert "1234_5" in text and "1234_6" in text


@pytest.mark.slow
def test_a_requeued_pilot_stands_for_the_one_before_it(study: Study) -> None:
    study.state("5", "1", [])
    assert [pilot.pilot_id[-3:] for pilot in sweep_status(study.sweep).pilots] == ["5.1"]


def test_without_submissions_slurm_is_not_asked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(status, "jobs_of", lambda sweep: pytest.fail("asked"))
    enqueue(prepare(["+grid=tiny", "launcher=local"], ConfFolders(), []))
    assert main(["status"]) == 0
    assert "Slurm" not in capsys.readouterr().out


def test_a_damaged_sweep_does_not_hide_the_others(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("damaged", "good"):
        SweepDir.create(tmp_path / name, {})
    (tmp_path / "damaged" / "sweep.json").write_text("{")
    assert main(["status", str(tmp_path)]) == 0
    said = capsys.readouterr().out.replace("\n", "")
    assert "not shown: " in said and "damaged/sweep.json cannot be read" in said and "good" in said
    assert main(["status", str(tmp_path / "damaged")]) == 2


@pytest.mark.slow
def test_odd_records_are_counted_named_and_left_out(
    study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = study.sweep
    good = next(sweep.history.iterdir())
    fields = json.loads(good.read_text())
    odd = (
        {"world_size": "eight"},
        {"world_size": -1},
        {"ended_at": float("inf")},
        {"started_at": 1e18},
        {"nodes": "node001"},
        {"pilot_id": "../../theirs"},
        {"evidence": "\ud800"},
        {"outcome": None},
    )
    for number, changed in enumerate(odd):
        (sweep.history / f"{number:06d}-a@b{number}.json").write_text(json.dumps({**fields, **changed}))
    (tmp_path / "theirs.json").write_text(good.read_text())
    (sweep.history / "000009-a@link.json").symlink_to(tmp_path / "theirs.json")
    os.mkfifo(sweep.history / "000010-a@pipe.json")
    state = json.loads((state_file := next(sweep.pilots.glob("*.state.json"))).read_text())
    for number, changed in enumerate(({"started_at": "now"}, {"running": [{}]}, {"nodes": 3}, {"count": None})):
        state_file.with_name(f"p{number}.state.json").write_text(json.dumps({**state, **changed}))
    node_exclusions.exclude(sweep, "node009", "slow", "p", for_s=1e300)
    (sweep.path / "submissions" / "slurm-20260101-000000-ffffff.json").write_text('{"count": "many"}')
    before = sweep_status(sweep)
    assert len(before.attempts) == 4 and len(before.pilots) == 1
    assert main(["status", str(sweep.path)]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert (
        f"{len(odd) + 1} records of attempts cannot be read and are left out (queue/history/000000-a@b0.json: " in said
    )
    assert "world_size='eight' is not of type int, and 8 more)" in said
    assert "1 record of submissions cannot be read (submissions/slurm-20260101-000000-ffffff.json: " in said
    assert main(["retry", str(sweep.path), "--outcome", "hang"]) == 0
    assert main(["status", str(sweep.path.parent)]) == 0


@pytest.mark.slow
def test_the_live_view_shows_shapes_and_does_not_grow_without_end(study: Study) -> None:
    for task in range(40):
        study.state(str(task), "0", study.running)
    console = Console(record=True, width=100, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(render_status(sweep_status(study.sweep), console.width))
    text = console.export_text()
    assert "2 nodes, 16 devices" in text
    assert "... and 72 more points" in text
    assert len(text.splitlines()) < 30


@pytest.mark.slow
def test_points_of_an_earlier_plan_are_known_from_their_own_files(study: Study) -> None:
    before = sweep_status(study.sweep).shapes
    (study.sweep.path / "ledger.parquet").write_bytes(b"PAR1 cut in half")
    after = sweep_status(study.sweep).shapes
    assert [(one.devices, one.total) for one in after] == [(one.devices, one.total) for one in before]


# logs


def attempt_folder(study: Study, number: int, ranks: int = 3, **about: Any) -> Path:
    point = study.running[0]
    folder = study.sweep.attempts / f"{point.experiment.id}.a{number}.{number:06x}"
    folder.mkdir(parents=True)
    pilot_id = f"{study.submission.token}.5.0"
    fields = {"number": number, "started_at": 1e9 + number, "pilot_id": pilot_id, "nodes": ["node001"], **about}
    (folder / "attempt.json").write_text(json.dumps(fields))
    for rank in range(ranks):
        (folder / f"rank_{rank}.log").write_text("".join(f"attempt {number} rank {rank} line {i}\n" for i in range(50)))
    return folder


@pytest.mark.slow
def test_logs_of_the_newest_attempt(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    attempt_folder(study, 1)
    folder = attempt_folder(study, 2, ranks=12)
    (folder / "rank_1.log").write_text("")
    (folder / "rank_3.log").write_text("before\x1b[31m\x07 red\n")
    output = log_dir(study.sweep.path, study.submission.token)
    output.mkdir(parents=True)
    (output / "1234_5_0_log.out").write_text("the pilot's words\n")
    (output / "1234_50_0_log.out").write_text("another pilot's\n")
    record = record_of(study.running[0], 9, "crash", 5.0, attempt_id=folder.name, failed_rank=3)
    history.write_record(study.sweep, study.running[0].stem, record)
    id = study.running[0].experiment.id
    assert main(["logs", id]) == 0
    told = capsys.readouterr().out
    assert told.startswith(f"{folder.name}: crash in step after 5 s, started 2001-09-0")
    assert "why crash happened" in told
    assert told.index("rank 3:") < told.index("rank 0:")
    assert "attempt 2 rank 0 line 49" in told and "line 29\n" not in told and "(last 20 lines)" in told
    assert "attempt 1" not in told
    assert "rank 1:" not in told  # wrote nothing
    assert "and 4 more in " in told
    assert "before red" in told and "\x1b" not in told and "\x07" not in told
    assert "the pilot's words" in told and "another pilot's" not in told

    assert main(["logs", id.rsplit("-", 1)[1], "--rank", "5", "--lines", "2", "--results", "results/study"]) == 0
    told = capsys.readouterr().out
    assert [line for line in told.splitlines() if line.startswith("attempt")] == [
        "attempt 2 rank 5 line 48",
        "attempt 2 rank 5 line 49",
    ]
    assert "pilot" not in told


@pytest.mark.slow
def test_logs_of_a_packed_attempt(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    folder, id = attempt_folder(study, 2, ranks=12), study.running[0].experiment.id
    (folder / "rank_1.log").write_text("")
    assert main(["logs", id]) == 0
    loose = capsys.readouterr().out
    pack_attempt(folder)
    assert not folder.exists()
    assert main(["logs", id]) == 0
    assert capsys.readouterr().out == loose.replace(str(folder.name), f"{folder.name}.zip").replace(".zip:", ":", 1)
    folder.with_name(f"{folder.name}.zip").write_bytes(b"PK")
    assert main(["logs", id]) == 2
    assert ".zip is damaged" in capsys.readouterr().err


@pytest.mark.slow
def test_logs_of_an_odd_attempt(study: Study, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = attempt_folder(study, 1, started_at=1e300, nodes=[1], pilot_id=3)
    (tmp_path / "secret").write_text("secret")
    for rank, plant in enumerate((lambda path: path.symlink_to(tmp_path / "secret"), os.mkfifo)):
        (folder / f"rank_{rank}.log").unlink()
        plant(folder / f"rank_{rank}.log")
    (folder.parent / f"{study.running[0].experiment.id}.a2.ffffff").symlink_to(tmp_path)
    (tmp_path / "rank_0.log").write_text("secret")
    assert main(["logs", study.running[0].experiment.id]) == 0
    said = capsys.readouterr().out
    assert "secret" not in said and "attempt 1 rank 2 line 49" in said and "started ?" in said


@pytest.mark.slow
def test_logs_that_are_not_there(study: Study, capsys: pytest.CaptureFixture[str]) -> None:
    attempt_folder(study, 1, ranks=2)
    waiting = read_point(study.sweep.todo / entry_names(study.sweep.todo)[0]).experiment.id
    for words, message in (
        (["logs", "nothing"], "no attempt in results has an id that contains 'nothing'"),
        (["logs", waiting], "waits in the queue and has not run yet"),
        (["logs", study.running[0].experiment.id, "--rank", "7"], "no log of rank 7; it has logs of ranks 0 to 1"),
    ):
        assert main(words) == 2
        assert message in capsys.readouterr().err

"""The view of a running sweep in a terminal and in a log."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from rich.console import Console

from launchers.state.history import describe
from launchers.state.pilot_state import PilotState, Running
from launchers.state.process_identity import own_identity
from launchers.status.status import SweepStatus
from launchers.status.view import PlainView, render_status
from tests.launchers.scripted import attempt_record


def status(**changes: Any) -> SweepStatus:
    running = Running(
        stem="s",
        attempt_id="a",
        experiment_id="llama-dp8",
        world_size=8,
        started_at=0.0,
        deadline_s=600.0,
        phase="step",
        step=4,
    )
    state = PilotState(
        pilot_id="p", identity=own_identity(), count=1, time=0.0, started_at=0.0, activity="running", running=(running,)
    )
    fields: dict[str, Any] = {
        "name": "study",
        "total": 10,
        "todo": 6,
        "claimed": 1,
        "done": {"ok": 2, "oom": 1},
        "pilots": (state,),
        "attempts": (attempt_record(1, "ok", tokens_per_s_per_gpu=11324.0), attempt_record(2, "oom")),
        "device_hours": 1.0,
        "expected_left_s": 4000.0,
    }
    return SweepStatus(**{**fields, **changes})


def test_the_live_view_shows_running_remaining_and_failed_points() -> None:
    console = Console(record=True, width=160, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(render_status(status(), console.width))
    text = console.export_text()
    for part in (
        "3/10 points",
        "ok 2",
        "oom 1",
        "7 left, about 67 min",
        "runs        in step 4, ",
        "of at most 600 s, 8 ranks  llama-dp8",
        "11,324 tokens/s/GPU",
    ):
        assert part in text, part


def test_the_plain_view_prints_each_attempt_once(capsys: pytest.CaptureFixture[str]) -> None:
    view = PlainView({"a1"})
    view.show(status())
    view.show(status())
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 1
    assert lines[0].startswith("[3/10] oom")


def test_each_end_raises_the_count_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Attempts are recorded before their points move, and a search adds points: neither shows in the numbers."""
    records = tuple(attempt_record(number, "ok") for number in range(1, 5))
    view = PlainView(set(), finished=0)
    for seen, done in ((1, 0), (1, 1), (3, 1), (4, 4)):
        view.show(status(attempts=records[:seen], done={"ok": done}))
    lines = capsys.readouterr().out.splitlines()
    assert [line.partition(" ")[0] for line in lines] == [f"[{number}/10]" for number in range(1, 5)]


LONG = "llama8b-dp4z3-tp2-pp2-1f1b-mbs2-gbs64-s4096-rcselective-1f3c9a0e"


def drawn(width: int, **changes: Any) -> str:
    console = Console(record=True, width=width, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(render_status(status(**changes), width))
    return console.export_text()


def test_at_80_columns_ids_give_way_to_numbers() -> None:
    ok = attempt_record(
        1, "ok", experiment_id=LONG, tokens_per_s_per_gpu=11324.0, peak_allocated_bytes=61 * 2**30, backend="cuda"
    )
    hang = attempt_record(
        2, "hang", experiment_id=LONG, evidence="no progress: rank 3 in step 2 for 31 s", will_retry=True
    )
    text = drawn(80, attempts=(ok, hang))
    assert all(len(line) <= 80 for line in text.splitlines())
    [line] = [line for line in text.splitlines() if line.startswith("  ok")]
    for part in ("11,324 tokens/s/GPU", "61.00 GiB", "45.0 s", "llama8b", "…1f3c9a0e"):
        assert part in line, part
    assert "no progress: rank 3 in step 2 for 31 s" in text
    assert text.count("tried again") == 1 and "waits again" not in text
    assert LONG in drawn(200, attempts=(ok,))


def test_processes_are_not_called_gpus() -> None:
    record = attempt_record(1, "ok", tokens_per_s_per_gpu=950.0, backend="cpu")
    assert "950 tokens/s/process" in drawn(120, attempts=(record,))
    assert "950 tokens/s/process" in describe(record)
    assert "GPU" not in drawn(120, attempts=(record,))


def rehearsal(phase: str, part: str = "stage 1 of 2", step: int | None = None) -> SweepStatus:
    shown = status()
    (pilot,) = shown.pilots
    (running,) = pilot.running
    at = dataclasses.replace(running, phase=phase, part=part, step=step)
    return dataclasses.replace(shown, pilots=(dataclasses.replace(pilot, running=(at,)),), attempts=())


def test_a_slow_rehearsal_says_where_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    now = [0.0]
    view = PlainView(set(), clock=lambda: now[0])
    seen = []
    for at, shown in (
        (1.0, rehearsal("build")),  # a fast one prints only its result
        (6.0, rehearsal("build")),
        (9.0, rehearsal("warmup", step=0)),
        (12.0, rehearsal("warmup", step=0)),
        (30.0, rehearsal("warmup", step=0)),
        (43.0, rehearsal("warmup", step=0)),  # it still does the same
        (49.0, rehearsal("build", "stage 2 of 2")),
        (99.0, status(attempts=())),  # a measured point
    ):
        now[0] = at
        view.show(shown)
        seen.append(capsys.readouterr().out)
    assert [bool(text) for text in seen] == [False, True, False, True, False, True, True, False]
    assert seen[1].startswith("[3/10] stage 1 of 2, in build after ") and seen[1].endswith(" s  llama-dp8\n")
    assert "stage 1 of 2, in warmup step 0" in seen[5] and "stage 2 of 2, in build" in seen[6]


def test_the_live_view_names_the_stage_of_a_rehearsal() -> None:
    assert "runs        stage 1 of 2 in build, " in drawn(160, pilots=rehearsal("build").pilots)


def test_logs_in_evidence_cannot_command_the_terminal(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = attempt_record(9, "crash", evidence="\x1b]0;owned\x07\x1b[2Jraised")
    view = PlainView(set())
    view.show(status(attempts=(hostile,)))
    view.print_line("a\x1b[31mb")
    told = capsys.readouterr().out
    assert "raised" in told and "ab" in told and "\x1b" not in told and "\x07" not in told

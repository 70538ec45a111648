"""What a running sweep looks like in a terminal and in a log."""

from __future__ import annotations

from typing import Any

import pytest
from rich.console import Console

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


def test_the_live_view_tells_what_runs_what_is_left_and_what_failed() -> None:
    console = Console(record=True, width=160, force_terminal=True, file=open("/dev/null", "w"))  # noqa: SIM115, PTH123
    console.print(render_status(status()))
    text = console.export_text()
    for part in (
        "3/10 points",
        "ok 2",
        "oom 1",
        "7 left, about 67 min",
        "runs llama-dp8 on 8: in step 4",
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

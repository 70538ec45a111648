"""Distinguishing dead processes and pilots from living ones."""

from __future__ import annotations

import dataclasses

import pytest

from launchers.state import pilot_state
from launchers.state.pilot_state import Liveness, PilotState, Running, write_state
from launchers.state.process_identity import ProcessIdentity, own_identity, provably_dead
from launchers.state.sweep_dir import SweepDir


def state(identity: ProcessIdentity, count: int = 1, activity: pilot_state.Activity = "running") -> PilotState:
    return PilotState(pilot_id="p", identity=identity, count=count, time=0.0, started_at=0.0, activity=activity)


def test_a_process_is_distinguished_from_another_with_its_pid() -> None:
    me = own_identity()
    assert not provably_dead(me)
    assert provably_dead(dataclasses.replace(me, start_ticks=me.start_ticks + 1))
    assert provably_dead(dataclasses.replace(me, pid=2**22 + 1))
    assert provably_dead(dataclasses.replace(me, boot_id="before"))
    # Processes of another machine or namespace are invisible from here.
    assert not provably_dead(dataclasses.replace(me, pid=2**22 + 1, host="elsewhere"))
    assert not provably_dead(dataclasses.replace(me, pid=2**22 + 1, pid_namespace=1))


def test_a_pilot_elsewhere_is_judged_by_its_count_not_by_its_clock(
    sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = dataclasses.replace(own_identity(), host="elsewhere")
    now = [1000.0]
    monkeypatch.setattr(pilot_state.time, "monotonic", lambda: now[0])
    liveness = Liveness(sweep, lease_s=60.0)
    write_state(sweep, state(elsewhere, count=1))  # its own clock says 1970
    assert liveness.judge("p") == "unknown"
    now[0] += 59
    assert liveness.judge("p") == "unknown"
    write_state(sweep, state(elsewhere, count=2))
    assert liveness.judge("p") == "alive"
    now[0] += 61
    assert liveness.judge("p") == "dead"
    write_state(sweep, state(elsewhere, count=3))
    assert liveness.judge("p") == "alive"
    write_state(sweep, state(elsewhere, count=4, activity="ended"))
    assert liveness.judge("p") == "dead"


def test_a_pilot_without_a_state_is_dead_after_a_lease(sweep: SweepDir, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr(pilot_state.time, "monotonic", lambda: now[0])
    liveness = Liveness(sweep, lease_s=60.0)
    assert liveness.judge("gone") == "unknown"
    now[0] = 61.0
    assert liveness.judge("gone") == "dead"


def test_how_long_a_point_runs_is_measured_on_its_pilots_clock() -> None:
    """The pilot's clock says 1970, the reader's does not."""
    one = Running(stem="s", attempt_id="a", experiment_id="e", world_size=1, started_at=30.0, deadline_s=60.0)
    shown = dataclasses.replace(state(own_identity()), time=42.0, running=(one,))
    assert shown.elapsed_s(one) == 12.0

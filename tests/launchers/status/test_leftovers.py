"""Nothing of killed writers is left in the folder of a finished sweep."""

from __future__ import annotations

import os

import pytest

from launchers.state import history, pilot_state
from launchers.state.process_identity import own_identity
from launchers.state.sweep_dir import SweepDir
from launchers.status.leftovers import remove_leftovers
from launchers.status.status import sweep_status
from results.shared_filesystem import packed_folder
from results.tables import files, store
from results.tables.store import read_attempts
from tests.launchers.scripted import attempt_record, points
from tests.results.helpers import attempt

TEMPORARY = (
    "queue/todo/.000001-x.json.123.0a1b2c.tmp",
    "attempts/.x.a1.0.zip.0123456789abcdef.tmp",
    "attempts/x.a1.0/.rank_0.result.json.99.ffffff.tmp",
    "parts/steps/.x.parquet.5.abcdef.tmp",
    ".clock.0123456789abcdef0123456789abcdef",
    "queue/adding.lock.login1.77.0123456789abcdef0123456789abcdef/token",
    "code/.0123456789abcdef.01234567/a.py",
)
KEPT = (".notes.tmp", "queue/running.lock/token", "attempts/x.a1.0/rank_0.log", "code/0123456789abcdef/a.py")


def write(sweep: SweepDir, *names: str, age_s: float) -> None:
    for name in names:
        path = sweep.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
        for one in (path, path.parent):
            os.utime(one, (one.stat().st_mtime - age_s,) * 2)


def existing(sweep: SweepDir, names: tuple[str, ...]) -> list[str]:
    return [name for name in names if (sweep.path / name).exists()]


def test_temporaries_and_parts_are_gone_at_the_end(sweep: SweepDir, capsys: pytest.CaptureFixture[str]) -> None:
    write(sweep, *TEMPORARY, *KEPT, age_s=60.0)
    fresh = "pilots/.p.state.json.5.abcdef.tmp"
    write(sweep, fresh, age_s=0.0)
    store.write_attempt(sweep.path, attempt("x.a1.0"), [])
    remove_leftovers(sweep, sweep_status(sweep), print)
    assert existing(sweep, TEMPORARY) == [] and existing(sweep, (*KEPT, fresh)) == [*KEPT, fresh]
    assert not files.part_paths(sweep.path, "attempts") and read_attempts(sweep.path).num_rows == 1
    assert capsys.readouterr().out == ""


@pytest.mark.parametrize("left", ["point", "pilot"])
def test_nothing_is_removed_while_somebody_may_write(sweep: SweepDir, left: str) -> None:
    if left == "point":
        sweep.add_points(points("ok"))
    else:
        alive = pilot_state.PilotState(
            pilot_id="p", identity=own_identity(), count=1, time=0.0, started_at=0.0, activity="running"
        )
        pilot_state.write_state(sweep, alive)
    write(sweep, *TEMPORARY, age_s=60.0)
    remove_leftovers(sweep, sweep_status(sweep), print)
    assert existing(sweep, TEMPORARY) == list(TEMPORARY)


def test_recorded_attempts_are_packed_at_the_end(sweep: SweepDir) -> None:
    """What a killed pilot has not packed; a folder without a record belongs to nobody yet."""
    for name in ("a1", "a2"):
        write(sweep, *(f"attempts/{name}/{file}" for file in ("attempt.json", "rank_0.log")), age_s=0.0)
    history.write_record(sweep, "000000-x", attempt_record(1, "ok"))
    remove_leftovers(sweep, sweep_status(sweep), print)
    assert sorted(path.name for path in sweep.attempts.iterdir()) == ["a1.zip", "a2"]
    assert packed_folder.sizes(sweep.attempts / "a1") == {"attempt.json": 0, "rank_0.log": 0}

"""Commands on the login node while the sweep's file system fails: no job is submitted twice, and no command gives
up."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import Any

import pytest

from launchers.slurm import submitter_lease
from launchers.slurm.cancel import cancel
from launchers.slurm.client import jobs_of
from launchers.slurm.watch import watch
from launchers.state import submissions
from launchers.state.submissions import all_submissions
from launchers.state.sweep_dir import SweepDir
from results.shared_filesystem import patience
from tests.launchers.failing_calls import FailingFiles
from tests.launchers.slurm.fakeslurm import FakeSlurm
from tests.launchers.slurm.runs import finish_all, meanwhile, run

FailRead = Callable[[str, int], list[str]]


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(patience, "FIRST_WAIT_S", 1e-4)
    monkeypatch.setattr(patience, "LONGEST_WAIT_S", 1e-3)
    monkeypatch.setattr(submitter_lease, "_STALE_S", 2.0)


@pytest.fixture
def fail_read(monkeypatch: pytest.MonkeyPatch) -> FailRead:
    """Makes one read of the files with a name fail, given by its number; the list holds the path of each read so
    far."""

    def arm(name: str, number: int) -> list[str]:
        real, seen = os.open, list[str]()

        def opened(path: Any, flags: int, *more: Any, **options: Any) -> int:
            if str(path).endswith(f"/{name}") and not flags & os.O_CREAT:
                seen.append(str(path))
                if len(seen) == number:
                    raise OSError(errno.ESTALE, "Stale file handle", str(path))
            return real(path, flags, *more, **options)

        monkeypatch.setattr(os, "open", opened)
        return seen

    return arm


@pytest.mark.slow
def test_a_submission_that_cannot_be_read_now_is_not_taken_for_a_damaged_one(
    fake: FakeSlurm, sweep: SweepDir, fail_read: FailRead
) -> None:
    run(sweep, detach=True)
    [before] = all_submissions(sweep)
    seen = fail_read(f"{before.token}.json", 1)
    assert all_submissions(sweep) == [before]
    assert len(seen) == 2


@pytest.mark.slow
@pytest.mark.parametrize("number", [2, 4])
def test_a_failed_read_is_not_taken_for_a_cancel(
    number: int, fake: FakeSlurm, sweep: SweepDir, fail_read: FailRead
) -> None:
    """The sweep was cancelled once before this run, which checks for another cancel all the time."""
    run(sweep, detach=True)
    assert cancel(sweep) == 1
    seen = fail_read("cancelled.json", number)
    with meanwhile(lambda: len(fake.jobs) == 2 and len(seen) > number, lambda: finish_all(sweep)):
        summary = run(sweep)
    assert (summary.message, summary.left) == ("", 0)
    assert len(fake.jobs) == 2


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_commands_go_on_while_the_folder_of_submissions_fails(
    seed: int, fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FailingFiles(monkeypatch.setattr, sweep.path / "submissions", seed, rate=0.15)
    files.active = True
    run(sweep, detach=True)
    assert run(sweep, detach=True).detached
    assert len(jobs_of(sweep) or []) == len(fake.jobs) == 1, "a pilot was submitted a second time"
    looks = len(fake.calls("squeue"))
    with meanwhile(lambda: len(fake.calls("squeue")) > looks + 5, lambda: finish_all(sweep)):
        summary = watch(sweep, live=False)
    assert (summary.left, summary.exit_code) == (0, 0)
    assert len(files.failed) > 5
    files.active = False
    assert cancel(sweep) == 1


@pytest.mark.slow
def test_a_folder_that_stays_unreadable_is_one_error(
    fake: FakeSlurm, sweep: SweepDir, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(sweep, detach=True)
    monkeypatch.setattr(submissions, "_READ_LIMIT_S", 0.01)
    FailingFiles(monkeypatch.setattr, sweep.path / "submissions", 0, rate=1.0).active = True
    with pytest.raises(submissions.FilesUnreadable, match="submissions cannot be read: "):
        cancel(sweep)
    assert [job["state"] for job in fake.jobs] == ["PENDING"]

"""The line about the jobs of a sweep's pilots."""

from __future__ import annotations

import pytest

from launchers.slurm.client import Job
from launchers.slurm.job_summary import describe_jobs


def job(state: str, reason: str = "None") -> Job:
    return Job(token="t", index=0, name="1", array_id="1", state=state, reason=reason, nodes="")


@pytest.mark.parametrize(
    ("jobs", "line"),
    [
        (None, "Slurm does not answer"),
        ([], "Slurm: no pilot waits or runs"),
        ([job("COMPLETED"), job("FAILED")], "Slurm: no pilot waits or runs"),
        ([job("PENDING")], "Slurm: 1 pending"),
        (
            [job("RUNNING"), job("RUNNING"), job("PENDING", "Priority"), job("COMPLETED")],
            "Slurm: 2 running, 1 pending (1 Priority)",
        ),
    ],
)
def test_jobs_in_one_line(jobs: list[Job] | None, line: str) -> None:
    assert describe_jobs(jobs) == line

"""Compares a sweep's submissions with the output of squeue repeatedly, and counts the existing pilots.

One call of squeue proves little: a job that is not shown, or is shown as lost with its node, may reappear a moment
later under the same number. While Slurm does not answer, no state changes.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from launchers.slurm import sbatch
from launchers.slurm.client import Ending, Job, SlurmClient
from launchers.state import submissions
from launchers.state.submissions import Submission
from launchers.state.sweep_dir import SweepDir

GRACE_S = 5.0
"""Seconds without a living job after which a submission counts as ended."""
REQUEUE_GRACE_S = 30.0
"""Such seconds for a job that was lost with a node or preempted: Slurm may restart it under the same number."""
INTENT_LIMIT_S = sbatch.SBATCH_LIMIT_S + 30.0
"""Seconds after which the job of an sbatch whose caller was killed may still appear."""
_MAY_RETURN = frozenset({"NODE_FAIL", "PREEMPTED", "BOOT_FAIL", "LAUNCH_FAILED"})
_FINAL = frozenset({"CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "OUT_OF_MEMORY", "TIMEOUT"})
"""Final states of a job: there is no need to wait for a restart."""


class SubmissionTracker:
    """Writes the submissions' files. Only the process that holds the submitter's lease may use it."""

    def __init__(self, sweep: SweepDir, client: SlurmClient) -> None:
        self.live: Counter[int] = Counter()
        """Running and waiting pilots by shape (nodes)."""
        self.unsettled: Counter[int] = Counter()
        """Pilots by shape whose state is about to become clear: they are about to appear, are ending, or have just
        vanished. They are not replaced yet, and must not be relied on."""
        self._sweep = sweep
        self._client = client
        self._open: dict[str, Submission] = {}
        self._shapes: dict[str, int] = {}
        self._everything: dict[str, Submission] = {}
        self._expected: set[str] = set()
        self._present: set[str] = set()
        self._cancelled: set[str] = set()
        self._gone_since: dict[str, float] = {}
        self._ending_since: dict[str, float] = {}
        """Time at which each job was first seen ending, by job name."""
        self._shown: dict[str, Sequence[Job]] = {}
        """Jobs of each submission when squeue last showed any, by token."""

    def update(self) -> list[Job] | None:
        """Call squeue and update the submissions' files. Returns the sweep's jobs, or None when squeue does not answer.
        Raises `OSError` when a file cannot be written."""
        everything = submissions.all_submissions(self._sweep)
        self._shapes = {one.token: one.nodes for one in everything}
        self._everything = {one.token: one for one in everything}
        self._open = {one.token: one for one in everything if one.open}
        jobs = self._client.jobs({one.uid for one in everything}) if everything else []
        if jobs is None:
            return None
        jobs = [job for job in jobs if job.token in self._shapes]
        by_token: defaultdict[str, list[Job]] = defaultdict(list)
        for job in jobs:
            by_token[job.token].append(job)
        self._shown |= by_token
        ending = {job.name for job in jobs if job.ending}
        self._ending_since = {name: at for name, at in self._ending_since.items() if name in ending}
        for one in everything:  # Slurm may restart a job that it has shown as ended
            if not one.open and any(job.alive and not job.ending for job in by_token[one.token]):
                self._open[one.token] = self.change(one, stage="submitted", ended_at=None, message="")
        self.live, self.unsettled, self._expected, self._present = Counter(), Counter(), set(), set()
        self._cancelled = submissions.cancelled_among(self._sweep, everything)
        for submission in list(self._open.values()):
            live, unsettled = self._update_one(submission, by_token[submission.token])
            self.live[submission.nodes] += live
            self.unsettled[submission.nodes] += unsettled
            if live or unsettled:
                self._present.add(submission.token)
        return jobs

    def expected(self, token: str) -> bool:
        """Whether pilots of this submission may exist although squeue shows none."""
        return token in self._expected

    def present(self, token: str) -> bool:
        """Whether pilots of this submission run, wait or may appear in a moment."""
        return token in self._present

    def submission(self, token: str) -> Submission | None:
        """The recorded submission; None for an unknown token."""
        return self._everything.get(token)

    def shape(self, token: str) -> int | None:
        """Nodes of each of this submission's pilots; None for an unknown token."""
        return self._shapes.get(token)

    def change(self, submission: Submission, **fields: Any) -> Submission:
        """Write a submission's file with changed fields and return the changed submission. Raises `OSError`."""
        changed = submissions.update(self._sweep, submission, **fields)
        self._shapes[changed.token] = changed.nodes
        self._everything[changed.token] = changed
        return changed

    def ending(self, token: str) -> str:
        """Short description of how the jobs of a submission ended: ``job 12: 3 COMPLETED, 1 TIMEOUT``."""
        jobs = self._shown.get(token, ())
        states = Counter(job.state if not job.alive else "gone" for job in jobs)
        exits: Counter[str] = Counter()
        submission = self._open.get(token)
        number = jobs[0].array_id if jobs else submission.job_id if submission is not None else None
        if (not states or "gone" in states) and (known := self._endings(token)):
            last = {one.name: one for one in known}
            states = Counter(one.state for one in last.values())
            exits = Counter(one.exit_code for one in last.values() if one.exit_code not in ("", "0:0"))
            number = known[-1].array_id
        summary = ", ".join(f"{count} {state}" for state, count in states.most_common()) or "no trace of it in Slurm"
        codes = f" (exit {', '.join(exits)})" if exits else ""
        return f"job {number or 'unknown'}: {summary}{codes}"

    def _update_one(self, submission: Submission, jobs: Sequence[Job]) -> tuple[int, int]:
        """Update one submission's file. Returns the number of its living pilots, and of its `unsettled` ones."""
        token = submission.token
        if jobs and submission.stage != "submitted":  # now the id is known, even if the submitter was killed
            submission = self.change(submission, stage="submitted", job_id=jobs[0].array_id)
        now = time.monotonic()
        cancelled = token in self._cancelled
        alive = sum(job.alive and not job.ending for job in jobs)
        ending = 0 if cancelled else sum(self._may_return(job, now) for job in jobs if job.ending)
        if alive or ending:
            self._gone_since.pop(token, None)
            return alive, ending
        gone_s = now - self._gone_since.setdefault(token, now)
        if (
            submission.stage == "intent"
            and submissions.intent_age_s(self._sweep, submission) < INTENT_LIMIT_S
            and not self._endings(token)
        ):
            return self._expect(submission)
        grace_s = REQUEUE_GRACE_S if any(job.state in _MAY_RETURN for job in jobs) else GRACE_S
        over = cancelled or (len(jobs) == submission.count and all(job.state in _FINAL for job in jobs))
        if gone_s < grace_s and not over:
            return self._expect(submission)
        endings = self._endings(token) if submission.stage != "submitted" else None
        stage = "ended" if submission.stage == "submitted" or endings else "failed"
        number = endings[-1].array_id if endings else submission.job_id
        message = self.ending(token)
        self.change(submission, stage=stage, job_id=number, ended_at=time.time(), message=message)
        return 0, 0

    def _expect(self, submission: Submission) -> tuple[int, int]:
        self._expected.add(submission.token)
        return 0, submission.count

    def _may_return(self, job: Job, now: float) -> bool:
        """Whether a job that is ending may still be requeued under its number. After a while it counts as gone, because
        a node that does not answer can keep it for hours."""
        return now - self._ending_since.setdefault(job.name, now) < REQUEUE_GRACE_S

    def _endings(self, token: str) -> list[Ending]:
        submission = self._open.get(token)
        return (self._client.endings([submission]) if submission is not None else None) or []

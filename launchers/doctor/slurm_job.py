"""Asks compute nodes what they are like, through one Slurm job with the settings of the pilots, and waits for it."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from launchers.doctor.answers import LATE_S, answer_seen, parse_answer, read_or_empty
from launchers.doctor.checks import Answer
from launchers.doctor.on_node import CLOCK, MARK, REQUEST
from launchers.settings import LaunchSettings
from launchers.slurm import sbatch
from launchers.slurm.batch_file import PilotJob, submission_text
from launchers.slurm.client import Job, SlurmClient
from launchers.slurm.environment import cluster_in, several_clusters
from launchers.slurm.options import SlurmOptions, check_path
from launchers.slurm.polling import squeue_timer
from launchers.slurm.srun_log import log_path
from launchers.state import code_snapshot
from launchers.state.submissions import new_submission
from launchers.state.sweep_dir import SweepDir
from launchers.state.typed_paths import absolute_path
from results.errors import UltrasweepError
from results.shared_filesystem.whole_files import write_whole
from results.text.log_tail import tail_in_one_line
from results.text.numbers import format_duration, listed, plural

TIME_MIN = 10
"""Longest time limit of the job in minutes: a short job starts sooner."""
_SIGNAL_DELAY_S = 60
_POLL_S = 0.25
_SCRIPT = Path("launchers", "doctor", "on_node.py")
_OUTSIDE = f"{MARK}-outside"
_OUTSIDE_LINE = f'echo "{_OUTSIDE} scontrol=$(command -v scontrol || true)"'
"""Line of the job's script, which runs on the node and outside of an image."""
_LOG_LINES = 3
_NO_LOG = "0:53"
"""Exit code in ``scontrol show job`` where Slurm could not open the job's log."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """What came of the job."""

    answers: tuple[Answer, ...]
    job_id: str
    trouble: str = ""
    """Why fewer nodes than asked have answered; empty if all have."""
    remedy: str = ""


def job_of(folder: Path, settings: LaunchSettings, options: SlurmOptions, nodes: int) -> tuple[PilotJob, SlurmOptions]:
    """The doctor's job and its options: those of the pilots, with a short time limit. Nothing is written."""
    sweep = SweepDir(absolute_path(folder))
    check_path(sweep.path)
    short = dataclasses.replace(
        options,
        time_min=min(options.time_min, TIME_MIN),
        signal_delay_s=min(options.signal_delay_s, _SIGNAL_DELAY_S),
        setup=(*options.setup, _OUTSIDE_LINE),
        requeue=False,
    )
    submission = new_submission(
        sweep, nodes=nodes, count=1, time_min=short.time_min, cluster=cluster_in(os.environ) or None
    )
    snapshot = code_snapshot.take_snapshot()
    code = code_snapshot.folder_of(sweep, snapshot)
    job = PilotJob(
        token=submission.token,
        job_name=submission.job_name,
        sweep_dir=sweep.path,
        code_dir=code,
        code_digest=snapshot.digest,
        nodes=nodes,
        count=1,
        gpus_per_node=settings.num_devices if settings.device == "cuda" else 0,
        pilot=(sys.executable, "-"),
        cluster=submission.cluster,
        stdin=code / _SCRIPT,
    )
    return job, short


def batch_file(folder: Path, settings: LaunchSettings, options: SlurmOptions, nodes: int) -> str:
    """The text of the doctor's batch file, for a dry run."""
    return submission_text(*job_of(folder, settings, options, nodes))


def ask_nodes(
    folder: Path,
    settings: LaunchSettings,
    options: SlurmOptions,
    nodes: int,
    wait_s: float,
    report: Callable[[str], None],
) -> Asked:
    """Submit the job and wait up to ``wait_s`` seconds for the answer of each of its ``nodes`` nodes.

    ``folder``: a new folder below the one of the sweeps. ``report`` takes a line for the user. The job is cancelled
    when the time is over, or on Ctrl-C. Raises `UltrasweepError` if Slurm refuses the job or nothing can be written.
    """
    if trouble := sbatch.missing_commands() or several_clusters(os.environ):
        raise UltrasweepError(trouble)
    job, options = job_of(folder, settings, options, nodes)
    try:
        job.sweep_dir.mkdir(parents=True)
        write_whole(job.sweep_dir / REQUEST, job.token)
    except OSError as error:
        raise UltrasweepError(f"cannot write in {job.sweep_dir}: {error.strerror or error}") from None
    code_snapshot.write_snapshot(SweepDir(job.sweep_dir), code_snapshot.take_snapshot())
    job_id = sbatch.submit(job, options)
    report(f"job {job_id} of {plural(nodes, 'node')} submitted; waiting for it")
    client = SlurmClient(job.cluster)
    waiting = _Waiting(job, job_id, client, nodes, report)
    done = False
    try:
        asked = waiting.wait(wait_s)
        done = not asked.trouble
        return asked
    finally:
        if not done and (one := waiting.job()) is not None and one.alive:
            client.cancel([one])


class _Waiting:
    """Waits for one job."""

    def __init__(
        self, job: PilotJob, job_id: str, client: SlurmClient, nodes: int, report: Callable[[str], None]
    ) -> None:
        self._job, self._job_id, self._client, self._nodes, self._report = job, job_id, client, nodes, report
        self._answers: dict[int, Answer] = {}
        """By the number of the task."""
        self._shown = ""

    def wait(self, wait_s: float) -> Asked:
        squeue, started, ended_at = squeue_timer(), time.monotonic(), None
        seen: Job | None = None
        while True:
            with contextlib.suppress(OSError):
                write_whole(self._job.sweep_dir / CLOCK, repr(time.time()))
            self._read_answers()
            if len(self._answers) == self._nodes:
                return self._asked("", "")
            if ended_at is not None and time.monotonic() - ended_at > LATE_S:
                return self._asked(*self._ended())
            if ended_at is None and squeue.due():
                job = self.job()
                squeue.polled(changed=job is None or seen is None or job.state != seen.state)
                if job is not None and job.never_starts:
                    why = f"Slurm will never start job {self._job_id}: {job.reason}"
                    return self._asked(why, "change launcher.time_min, partition, account or the request for GPUs")
                self._show(job)
                gone = job is None and not self._client.complaint
                if gone or (job is not None and (job.ending or not job.alive)):
                    ended_at = time.monotonic()
                seen = job or seen
            if time.monotonic() - started > wait_s:
                return self._asked(*self._late(self.job() or seen, wait_s))
            time.sleep(_POLL_S)

    def job(self) -> Job | None:
        """The job as squeue shows it; None: squeue does not answer, or no longer shows it."""
        self._client.complaint = ""
        jobs = self._client.jobs({os.getuid()})
        return next((job for job in jobs or () if job.token == self._job.token), None)

    def _show(self, job: Job | None) -> None:
        if job is None:
            return
        line = f"job {self._job_id}: {job.state.lower()}"
        line += f" on {job.nodes}" if job.nodes else f" ({job.reason})" if job.reason not in ("", "None") else ""
        if line != self._shown:
            self._shown = line
            self._report(line)

    def _read_answers(self) -> None:
        outside: str | None = None
        for task in range(self._nodes):
            text = read_or_empty(log_path(SweepDir(self._job.sweep_dir), self._job.token, self._job_id, task))
            for line in text.splitlines():
                if line.startswith(f"{_OUTSIDE} scontrol="):
                    outside = line.partition("=")[2].strip() or None
                elif task not in self._answers and (facts := parse_answer(line, self._job.token)) is not None:
                    self._answers[task] = self._answer(facts, outside)

    def _answer(self, facts: dict[str, Any], outside: str | None) -> Answer:
        read_at = time.time()
        return Answer(
            facts=facts,
            read_at=read_at,
            file_seen=answer_seen(self._job.sweep_dir, facts, self._job.token),
            scontrol_outside=outside,
        )

    def _asked(self, trouble: str, remedy: str) -> Asked:
        answers = tuple(self._answers[task] for task in sorted(self._answers))
        return Asked(answers=answers, job_id=self._job_id, trouble=trouble, remedy=remedy)

    def _ended(self) -> tuple[str, str]:
        """Why a job that has ended left nodes without an answer, and the remedy."""
        fields = self._client.fields_of(self._job_id)
        where = fields.get("NodeList", "")
        how = fields.get("JobState", "").lower() or "ended"
        code = fields.get("ExitCode", "")
        ended = f"job {self._job_id}{f' on {where}' if where not in ('', '(null)') else ''} ended"
        ended += f" ({how}{f', exit code {code}' if code else ''})"
        if self._answers:
            return f"{ended}, and only {listed(self._names())} answered", self._look()
        log = log_path(SweepDir(self._job.sweep_dir), self._job.token, self._job_id)
        if code == _NO_LOG or not _exists(log):
            return (
                f"{ended} and left no log in {log.parent}: the node does not see this folder, or may not write there",
                "mount it on the nodes at the same path, or give results_dir=DIR on a shared file system",
            )
        return f"{ended} without an answer: {tail_in_one_line(log, _LOG_LINES)}", self._look()

    def _late(self, job: Job | None, wait_s: float) -> tuple[str, str]:
        after = f"after {format_duration(wait_s)}"
        if job is None:
            said = f": {self._client.complaint}" if self._client.complaint else ""
            return f"squeue does not show job {self._job_id} {after}{said}", "look at `squeue` and `sacct`"
        if job.waiting:
            said = job.reason if job.reason not in ("", "None") else "no reason"
            return (
                f"job {self._job_id} still waits {after}; Slurm says {said}",
                "wait longer with --wait SECONDS, or choose another partition, account or launcher.qos",
            )
        log = log_path(SweepDir(self._job.sweep_dir), self._job.token, self._job_id)
        last = tail_in_one_line(log, _LOG_LINES)
        return (
            f"job {self._job_id} is {job.state.lower()} on {job.nodes} {after}, without an answer: {last}",
            self._look(),
        )

    def _names(self) -> list[str]:
        return [answer.node for answer in self._answers.values()]

    def _look(self) -> str:
        return f"look at the logs in {self._job.log_dir}"


def _exists(path: Path) -> bool:
    try:
        return path.exists()
    except OSError:
        return False

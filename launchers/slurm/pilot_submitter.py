"""Submits pilots of one shape after the other, and stops where Slurm refuses them or they keep ending at once.

What is asked of Slurm is written down before sbatch is called. So this process may be killed at any moment: the next
one finds the job by its token.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from launchers.settings import LaunchSettings
from launchers.slurm import batch_file
from launchers.slurm.client import SlurmClient, default_limits
from launchers.slurm.options import SlurmOptions
from launchers.slurm.submission_tracker import SubmissionTracker
from launchers.state import code_snapshot, node_exclusions, pilot_state, submissions
from launchers.state.pilot_config import PilotConfig, pilot_config_to_dict
from launchers.state.submissions import Submission
from launchers.state.sweep_dir import SweepDir
from results.errors import InvalidResults, UltrasweepError
from results.lease import Lease
from results.log_tail import tail_in_one_line
from results.provenance import code_provenance
from results.text import plural
from workloads.protocol import write_json

_PAUSES_S = (0.0, 15.0, 60.0)
"""After pilots that ended without an attempt, the pause before the next pilots of that shape. After the last pause, no
more are submitted."""
_RETRY_S = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Between two calls of sbatch when it fails in a way that may pass."""
_LOG_LINES = 6


class PilotsEnd(UltrasweepError):
    """Pilots keep ending without an attempt."""


class PilotSubmitter:
    """Submits for one sweep. ``given_up`` holds, by shape (nodes), why no more pilots of it are submitted."""

    def __init__(
        self,
        sweep: SweepDir,
        settings: LaunchSettings,
        options: SlurmOptions,
        tracker: SubmissionTracker,
        client: SlurmClient,
        *,
        pilot: Sequence[str],
        command: str,
        report: Callable[[str], None],
        stopped: Callable[[], bool],
    ) -> None:
        """``pilot``: command line of a pilot. ``command``: that of the sweep, for the rows. ``report`` takes a line for
        the user. ``stopped`` says whether to submit nothing more."""
        self.given_up: dict[int, UltrasweepError] = {}
        self._sweep, self._settings, self._options = sweep, settings, options
        self._tracker, self._client = tracker, client
        self._pilot, self._command = pilot, command
        self._report, self._stopped = report, stopped
        self._code: tuple[Path, Mapping[str, object]] | None = None
        self._fruitless: Counter[int] = Counter()
        """By shape: submissions in a row whose pilots ended without an attempt."""
        self._last: dict[int, tuple[str, int, float]] = {}
        """By shape: the last submission's token, the attempts recorded before it, and its monotonic time."""
        self._largest_array = sys.maxsize
        """Halved when the cluster holds too many jobs."""
        self._failures = 0
        self._not_before = 0.0

    def submit(self, nodes: int, lacking: int, living: int, attempts: int, lease: Lease) -> int:
        """Submit up to ``lacking`` pilots of ``nodes`` nodes; how many were submitted.

        ``living``: pilots of that shape that do something. ``attempts``: how many are recorded so far.
        """
        now = time.monotonic()
        if now < self._not_before or not self._worth_trying(nodes, living, attempts, now):
            return 0
        limits = self._client.limits() or default_limits()
        largest = min(limits.largest_array, self._largest_array)
        done = 0
        while done < lacking and not self._stopped():
            count = min(lacking - done, largest)
            if not lease.held():
                break
            try:
                submission = self._submit_array(nodes, count)
            except batch_file.JobLimitReached as error:
                if count > 1:
                    largest = count // 2
                    continue
                if not living + done:
                    self._give_up(nodes, error)
                else:
                    self._try_later(f"Slurm takes no more pilots of this user for now: {error}")
                break
            except batch_file.SubmissionRefused as error:
                self._give_up(nodes, error)
                break
            except (batch_file.SubmissionUncertain, InvalidResults) as error:
                if "temporarily unavailable" in str(error).lower():  # the cluster may hold too many jobs
                    self._largest_array = max(1, count // 2)
                self._try_later(f"submitting failed: {error}")
                break
            self._failures = 0
            done += count
            self._last[nodes] = (submission.token, attempts, now)
            self._report(f"{plural(count, 'pilot')} of {plural(nodes, 'node')} submitted: job {submission.job_id}")
        return done

    def _submit_array(self, nodes: int, count: int) -> Submission:
        """Write the pilots' config and the intent, call sbatch, write the job's id, in this order."""
        sweep, options = self._sweep, self._options
        try:
            code, provenance = self._code_of_pilots()
            submission = submissions.new_submission(sweep, nodes=nodes, count=count, time_min=options.time_min)
            config = PilotConfig(
                settings=self._settings,
                command=self._command,
                wall_time_s=float(options.usable_s),
                stop_with_parent=False,
                nodes=nodes,
                batch_system="slurm",
                provenance=provenance,
            )
            write_json(pilot_state.config_path(sweep, submission.token), pilot_config_to_dict(config), private=True)
            submissions.write(sweep, submission)
        except OSError as error:
            raise batch_file.SubmissionUncertain(f"cannot write in {sweep.path}: {error.strerror or error}") from None
        excluded = batch_file.node_names(list(node_exclusions.excluded(sweep)))
        job = pilot_job(sweep, self._settings, submission, code, self._pilot, excluded)
        try:
            try:
                job_id = batch_file.submit(job, options)
            except batch_file.SubmissionRefused as error:
                if not excluded or "node name" not in str(error).lower():
                    raise
                self._report(f"Slurm does not know all of the excluded nodes ({', '.join(excluded)}): {error}")
                job_id = batch_file.submit(pilot_job(sweep, self._settings, submission, code, self._pilot, ()), options)
        except (batch_file.SubmissionRefused, batch_file.JobLimitReached) as error:
            self._tracker.change(submission, stage="failed", message=str(error))
            raise
        except batch_file.SubmissionUncertain:
            self._tracker.change(submission, stage="unsure")
            raise
        return self._tracker.change(submission, stage="submitted", job_id=job_id)

    def _code_of_pilots(self) -> tuple[Path, Mapping[str, object]]:
        """The copy of the code and its provenance. Copied once, so that all pilots of one run have the same code."""
        if self._code is None:
            snapshot = code_snapshot.take_snapshot()
            provenance = code_provenance(snapshot.root)
            self._code = code_snapshot.write_snapshot(self._sweep, snapshot), provenance
        return self._code

    def _worth_trying(self, nodes: int, living: int, attempts: int, now: float) -> bool:
        """Whether to submit this shape now. Gives it up when its pilots keep ending without an attempt."""
        if nodes not in self._last or living:
            return True
        token, before, since = self._last[nodes]
        if attempts > before:
            self._fruitless[nodes] = 0
            return True
        failed = self._fruitless[nodes] + 1
        if failed >= len(_PAUSES_S):
            self._give_up(
                nodes,
                PilotsEnd(
                    f"pilots of {plural(nodes, 'node')} ended {failed} times in a row without an attempt; the last: "
                    f"{self._tracker.ending(token)}; {_end_of_log(self._sweep, token)}"
                ),
            )
            return False
        if now - since < _PAUSES_S[failed]:
            return False
        self._fruitless[nodes] = failed
        ending = self._tracker.ending(token)
        self._report(f"pilots of {plural(nodes, 'node')} ended without an attempt ({ending}); trying again")
        return True

    def _give_up(self, nodes: int, error: UltrasweepError) -> None:
        if not isinstance(error, PilotsEnd):
            error = type(error)(f"Slurm refuses pilots of {plural(nodes, 'node')}: {error}")
        self.given_up[nodes] = error

    def _try_later(self, line: str) -> None:
        pause_s = _RETRY_S[min(self._failures, len(_RETRY_S) - 1)]
        self._failures += 1
        self._not_before = time.monotonic() + pause_s
        self._report(f"{line}; trying again in {pause_s:.0f} s")


def pilot_job(
    sweep: SweepDir,
    settings: LaunchSettings,
    submission: Submission,
    code: Path,
    pilot: Sequence[str],
    excluded: Sequence[str],
) -> batch_file.PilotJob:
    """The job of a submission. ``code``: folder of the pilots' code. ``excluded``: nodes not to use."""
    return batch_file.PilotJob(
        token=submission.token,
        job_name=submission.job_name,
        sweep_dir=sweep.path.resolve(),
        code_dir=code,
        nodes=submission.nodes,
        count=submission.count,
        gpus_per_node=settings.num_devices if settings.device == "cuda" else 0,
        pilot=pilot,
        excluded=excluded,
    )


def _end_of_log(sweep: SweepDir, token: str) -> str:
    """The last lines of the newest log of a submission's pilots."""
    try:
        logs = sorted(submissions.log_dir(sweep.path, token).glob("*.out"), key=lambda path: path.stat().st_mtime)
    except OSError:
        logs = []
    lines = tail_in_one_line(logs[-1], _LOG_LINES) if logs else ""
    return f"{logs[-1]}: {lines}" if lines else "its log is empty"

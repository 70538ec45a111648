"""Submits pilots shape by shape, and stops where Slurm refuses them or they keep ending at once.

Every submission is written down before sbatch is called. So this process may be killed at any moment: the next one
finds the job by its token. Files of a refused submission are removed again.
"""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from launchers.settings import LaunchSettings
from launchers.slurm import batch_file, sbatch
from launchers.slurm.client import SlurmClient, default_limits
from launchers.slurm.failed_starts import lacks_program, last_words
from launchers.slurm.job_quota import JobQuota
from launchers.slurm.options import SlurmOptions
from launchers.slurm.submission_tracker import SubmissionTracker
from launchers.slurm.waiting_pilots import pilot_options
from launchers.state import code_snapshot, node_exclusions, pilot_state, submissions
from launchers.state.pilot_config import PilotConfig, pilot_config_to_dict
from launchers.state.submissions import Submission
from launchers.state.sweep_dir import SweepDir
from launchers.state.typed_paths import absolute_path
from results.errors import InvalidResults, UltrasweepError
from results.shared_filesystem.lease import Lease
from results.tables.provenance import code_provenance
from results.text.numbers import plural
from workloads.contract.protocol import write_json

_PAUSES_S = (0.0, 15.0, 60.0)
"""Seconds to wait, after pilots that ended without an attempt, before the next pilots of that shape. After the last
pause, no more are submitted."""
_MOST_NARROWED = 3
"""Number of submissions in a row that may end without an attempt because their pilots excluded a broken node."""
_RETRY_S = (5.0, 10.0, 20.0, 40.0, 60.0)
"""Seconds between two calls of sbatch after temporary errors."""


class PilotsEnd(UltrasweepError):
    """Pilots keep ending without an attempt."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExistingPilots:
    """Existing pilots and attempts at the time of a submission."""

    shape: int
    """Working pilots of the shape to submit."""
    all: int
    """Pilots of all shapes."""
    attempts: int
    """Attempts recorded so far."""


class PilotSubmitter:
    """Submits for one sweep. ``given_up``: by shape (nodes), the error that ended its submission."""

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
        """``pilot``: command line of a pilot. ``command``: command line of the sweep, for the rows. ``report`` takes a
        line for the user. ``stopped`` returns whether to stop submitting."""
        self.given_up: dict[int, UltrasweepError] = {}
        self._sweep, self._settings, self._options = sweep, settings, options
        self._tracker, self._client = tracker, client
        self._pilot, self._command = pilot, command
        self._report, self._stopped = report, stopped
        self._code: tuple[code_snapshot.Snapshot, Mapping[str, object]] | None = None
        self._fruitless: Counter[int] = Counter()
        """Number of submissions in a row whose pilots ended without an attempt, by shape."""
        self._last: dict[int, tuple[str, int, float]] = {}
        """The last submission by shape: its token, the attempts recorded before it, and its monotonic time."""
        self._largest_array = sys.maxsize
        """Maximum size of an array; halved when the cluster holds too many jobs."""
        self._quota = JobQuota()
        self._narrowed: Counter[int] = Counter()
        """Number of submissions in a row whose pilots ended without an attempt and excluded a node, by shape."""
        self._reported: set[str] = set()
        """Submissions whose end without an attempt has been reported, by token."""
        self._failures = 0
        self._not_before = 0.0

    @property
    def full(self) -> bool:
        """Whether Slurm accepts no more pilots of this user for now."""
        return self._quota.full

    def submit(
        self, nodes: int, lacking: int, existing: ExistingPilots, lease: Lease, *, use_excluded: bool = False
    ) -> int:
        """Submit up to ``lacking`` pilots of ``nodes`` nodes and return the number submitted. ``use_excluded``: they
        may get the nodes that the sweep has excluded."""
        now = time.monotonic()
        if now < self._not_before or not self._worth_trying(nodes, existing, now):
            return 0
        asked = self._quota.allowed(lacking, existing.all, now)
        limits = self._client.limits() or default_limits()
        largest = min(limits.largest_array, self._largest_array)
        done = 0
        while done < asked and not self._stopped():
            count = min(asked - done, largest)
            if not lease.held():
                break
            try:
                submission = self._submit_array(nodes, count, use_excluded)
            except sbatch.JobLimitReached as error:
                if count > 1:
                    largest = count // 2
                    continue
                if not existing.all + done:
                    self._give_up(nodes, error)
                elif self._quota.refused(existing.all + done, now):
                    self._report(
                        f"Slurm accepts no more pilots of this user now; the others are submitted later: {error}"
                    )
                break
            except sbatch.SubmissionRefused as error:
                self._give_up(nodes, error)
                break
            except (sbatch.SubmissionUncertain, InvalidResults) as error:
                if "temporarily unavailable" in str(error).lower():  # the cluster may hold too many jobs
                    self._largest_array = max(1, count // 2)
                self._try_later(f"submitting failed: {error}")
                break
            self._failures = 0
            done += count
            self._quota.accepted(existing.all + done)
            self._last[nodes] = (submission.token, existing.attempts, now)
            self._report(f"{plural(count, 'pilot')} of {plural(nodes, 'node')} submitted: job {submission.job_id}")
        return done

    def _submit_array(self, nodes: int, count: int, use_excluded: bool) -> Submission:
        """Write the pilots' config and the intent, call sbatch and write the job's id, in this order."""
        excluded = [] if use_excluded else batch_file.node_names(list(node_exclusions.excluded(self._sweep)))
        try:
            return self._call_sbatch(nodes, count, excluded, use_excluded)
        except sbatch.SubmissionRefused as error:
            if not excluded:
                raise
            # Retry whatever the message: without these nodes there may be too few, or Slurm may no longer know them.
            submission = self._call_sbatch(nodes, count, [], True)
            self._report(
                f"Slurm accepts the pilots only if they may use the excluded nodes ({', '.join(excluded)}): {error}"
            )
            return submission

    def _call_sbatch(self, nodes: int, count: int, excluded: Sequence[str], use_excluded: bool) -> Submission:
        sweep, options = self._sweep, self._options
        try:
            snapshot, provenance = self._code_of_pilots()
            code = code_snapshot.write_snapshot(sweep, snapshot, self._report)
            submission = submissions.new_submission(
                sweep,
                nodes=nodes,
                count=count,
                time_min=options.time_min,
                options=pilot_options(options, self._settings),
                excluded=excluded,
                use_excluded=use_excluded,
                cluster=self._client.cluster,
            )
            config = PilotConfig(
                settings=self._settings,
                command=self._command,
                wall_time_s=float(options.usable_s),
                stop_with_parent=False,
                nodes=nodes,
                batch_system="slurm",
                provenance=provenance,
                use_excluded=use_excluded,
                reserve_s=float(options.reserve_s),
            )
            write_json(pilot_state.config_path(sweep, submission.token), pilot_config_to_dict(config), private=True)
            submissions.write(sweep, submission)
        except OSError as error:
            raise sbatch.SubmissionUncertain(f"cannot write in {sweep.path}: {error.strerror or error}") from None
        job = pilot_job(sweep, self._settings, submission, code, snapshot.digest, self._pilot, excluded)
        try:
            job_id = sbatch.submit(job, options)
        except (sbatch.SubmissionRefused, sbatch.JobLimitReached):
            submissions.discard(sweep, submission)
            raise
        except sbatch.SubmissionUncertain:
            self._tracker.change(submission, stage="unsure")
            raise
        return self._tracker.change(submission, stage="submitted", job_id=job_id)

    def _code_of_pilots(self) -> tuple[code_snapshot.Snapshot, Mapping[str, object]]:
        """The code and its provenance. It is read once, so that all pilots of one run have the same code."""
        if self._code is None:
            snapshot = code_snapshot.take_snapshot()
            self._code = snapshot, code_provenance(snapshot.root)
        return self._code

    def _worth_trying(self, nodes: int, existing: ExistingPilots, now: float) -> bool:
        """Whether to submit this shape now. Gives the shape up when its pilots keep ending without an attempt."""
        if nodes not in self._last:
            return True
        token, before, since = self._last[nodes]
        if self._tracker.present(token):
            return True
        # While other pilots work, new attempts prove nothing about the last submission: check whether any of its pilots
        # started.
        fruitful = pilot_state.has_states(self._sweep, token) if existing.shape else existing.attempts > before
        if fruitful:
            self._fruitless[nodes] = self._narrowed[nodes] = 0
            return True
        if self._narrowed[nodes] < _MOST_NARROWED and self._has_excluded_more(token):
            self._narrowed[nodes] += 1
            return True
        failed = self._fruitless[nodes] + 1
        if failed >= len(_PAUSES_S):
            self._give_up(
                nodes,
                PilotsEnd(
                    f"pilots of {plural(nodes, 'node')} ended {failed} times in a row without an attempt; the last: "
                    f"{self._ending(token)}"
                ),
            )
            return False
        if token not in self._reported:
            self._reported.add(token)
            if lacks_program(self._sweep, token):
                self._give_up(
                    nodes,
                    PilotsEnd(
                        f"pilots of {plural(nodes, 'node')} cannot start, because their program is missing there "
                        f"(launcher.python, launcher.prefix, launcher.setup): {self._ending(token)}"
                    ),
                )
                return False
            pause = f" in {_PAUSES_S[failed]:.0f} s" if now - since < _PAUSES_S[failed] else ""
            ended = f"pilots of {plural(nodes, 'node')} ended without an attempt"
            self._report(f"{ended}; trying again{pause}: {self._ending(token)}")
        if now - since < _PAUSES_S[failed]:
            return False
        self._fruitless[nodes] = failed
        return True

    def _ending(self, token: str) -> str:
        """How the jobs of a submission ended, and the last words of a pilot."""
        return f"{self._tracker.ending(token)}; {last_words(self._sweep, token)}"

    def _has_excluded_more(self, token: str) -> bool:
        """Whether the pilots of a submission excluded a node: the next pilots do not get that node."""
        submission = self._tracker.submission(token)
        if submission is None or submission.use_excluded:
            return False
        exclusions = node_exclusions.excluded(self._sweep)
        return any(submissions.token_of_pilot(one.pilot_id) == token for one in exclusions.values())

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
    digest: str,
    pilot: Sequence[str],
    excluded: Sequence[str],
) -> batch_file.PilotJob:
    """The job of a submission. ``code``: folder of the pilots' code, whose files have this ``digest``. ``excluded``:
    nodes not to use."""
    return batch_file.PilotJob(
        token=submission.token,
        job_name=submission.job_name,
        sweep_dir=absolute_path(sweep.path),
        code_dir=code,
        code_digest=digest,
        nodes=submission.nodes,
        count=submission.count,
        gpus_per_node=settings.num_devices if settings.device == "cuda" else 0,
        pilot=pilot,
        excluded=excluded,
        cluster=submission.cluster,
    )

"""Runs a sweep on Slurm: submits the pilots that its points need, watches them, and replaces lost ones.

Only the submission needs this process: pilots claim points from the queue, write every row and end without it. The
process may be left (Ctrl-C), killed or started a second time at any moment.
"""

from __future__ import annotations

import errno
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType

from launchers.interrupts import interrupts
from launchers.settings import LaunchSettings
from launchers.slurm.batch_file import submission_text
from launchers.slurm.client import SlurmClient, SlurmUnreachable, cluster_for, default_limits
from launchers.slurm.demand import demand_of
from launchers.slurm.environment import cluster_in, several_clusters
from launchers.slurm.failed_starts import last_words
from launchers.slurm.held_nodes import wait_for_release
from launchers.slurm.job_summary import describe_jobs
from launchers.slurm.options import SlurmOptions, check_path
from launchers.slurm.pilot_submitter import pilot_job
from launchers.slurm.polling import PollTimer, files_timer, sleep_until_signal, squeue_timer
from launchers.slurm.reconcile import Cycle, Reconciler
from launchers.slurm.sbatch import available, missing_commands
from launchers.state import code_snapshot, submissions
from launchers.state.submissions import FilesUnreadable, new_submission
from launchers.state.sweep_dir import Point, SweepDir
from launchers.state.typed_paths import absolute_path
from launchers.status.leftovers import remove_leftovers
from launchers.status.run_summary import RunSummary, summarize
from launchers.status.status import StatusReader, SweepStatus
from launchers.status.view import StatusView, choose_view
from results.errors import InvalidResults, UltrasweepError
from results.tables.provenance import command_line
from results.text.numbers import format_duration, plural
from workloads.spec.experiment import Experiment

PILOT = (sys.executable, "-m", "launchers.slurm.pilot_job")
_DETACH_LIMIT_S = 600.0
"""Seconds for which ``detach`` tries to submit pilots that Slurm does not accept at once."""
_LASTING_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS)
"""Permanent errors, against which waiting does not help; a full disk may be freed."""


def run_slurm(
    sweep: SweepDir,
    settings: LaunchSettings,
    options: SlurmOptions,
    *,
    live: bool | None = None,
    command: str | None = None,
    detach: bool = False,
    feed: Callable[[], str] = lambda: "",
    most_points: int = 0,
    experiments: Mapping[str, Experiment] = MappingProxyType({}),
) -> RunSummary:
    """Submit the missing pilots and watch until no point is left.

    ``live``: as in `choose_view`. ``command``: the command line for the rows; None: that of this process. ``detach``:
    return after the submission. ``feed`` is called at every check of the files: it may add points, and returns a line
    to show or nothing. ``most_points``: as in `StatusReader`. ``experiments``: as in
    `launchers.state.queue.QueueReader`. Ctrl-C does not end the pilots: the
    summary is ``detached``, and the view has shown how to continue. Raises `UltrasweepError` when there is no pilot and
    Slurm refuses all of them, or they keep ending without an attempt.
    """
    if trouble := missing_commands() or several_clusters(os.environ):
        raise UltrasweepError(trouble)
    check_path(absolute_path(sweep.path))
    reader = StatusReader(sweep, most_points)
    before = reader.read()
    view = choose_view(live, before)
    with interrupts(limit=2) as signals, view:
        run = _SlurmRun(
            sweep,
            settings,
            options,
            reader,
            before,
            view,
            signals,
            command or command_line(),
            detach,
            feed,
            experiments,
        )
        try:
            run.loop()
        except KeyboardInterrupt:  # the second Ctrl-C: the next run finds an unfinished submission by its token
            run.leave()
        except FileNotFoundError:
            if not sweep.removed:
                raise
            raise InvalidResults(f"{sweep.path} was removed while its points ran; its pilots will end") from None
    return run.summary(before)


def dry_run(sweep: SweepDir, points: Sequence[Point], settings: LaunchSettings, options: SlurmOptions) -> list[str]:
    """The batch files that a run would submit for ``points`` if no pilot had been submitted yet.

    Only texts are returned: no file is written, and no Slurm is needed; ``sweep`` (``SweepDir(path)``) need not exist.
    """
    limits = (SlurmClient().limits() if available() else None) or default_limits()
    snapshot = code_snapshot.take_snapshot()
    code = code_snapshot.folder_of(sweep, snapshot)
    texts = []
    for nodes, pilots in demand_of(points, settings, options).pilots.items():
        for at in range(0, pilots, limits.largest_array):
            count = min(limits.largest_array, pilots - at)
            submission = new_submission(sweep, nodes=nodes, count=count, time_min=options.time_min)
            texts.append(
                submission_text(pilot_job(sweep, settings, submission, code, snapshot.digest, PILOT, ()), options)
            )
    return texts


class _SlurmRun:
    """One call of `run_slurm`."""

    def __init__(
        self,
        sweep: SweepDir,
        settings: LaunchSettings,
        options: SlurmOptions,
        reader: StatusReader,
        before: SweepStatus,
        view: StatusView,
        signals: list[int],
        command: str,
        detach: bool,
        feed: Callable[[], str],
        experiments: Mapping[str, Experiment],
    ) -> None:
        self._sweep, self._options = sweep, options
        self._reader, self._view, self._signals, self._detach = reader, view, signals, detach
        self._feed = feed
        self._lingers = settings.linger_s > 0
        """Whether pilots keep their nodes for points that a later call may add."""
        self._just_read: SweepStatus | None = before
        """A status that was read a moment ago and need not be read again; None: read the files."""
        self._known_attempts = len(before.attempts)
        self._known_tokens = {one.token for one in submissions.all_submissions(sweep)}
        self._cancel_mark = submissions.cancel_mark(sweep)
        used, chosen = cluster_for(sweep), cluster_in(os.environ)
        if chosen and chosen != used:
            where = f"cluster {used}" if used else "Slurm's default cluster"
            view.print_line(f"the pilots are on {where}; SLURM_CLUSTERS={chosen} takes effect when they have ended")
        self._reconciler = Reconciler(
            sweep,
            settings,
            options,
            pilot=PILOT,
            command=command,
            report=view.print_line,
            stopped=lambda: bool(signals) or self._cancelled(),
            experiments=experiments,
        )
        self._cycle = Cycle(jobs=None)
        """The last cycle in which Slurm answered."""
        self._shown_jobs = self._shown_error = ""
        self._shown_unreachable = self._shown_busy = False
        self._shown_capped: set[int] = set()
        self._message = ""
        self._detached = self._interrupted = False
        self._too_wide = 0
        self._last_finished = -1
        """Points that had ended at the last turn."""

    def loop(self) -> None:
        """Submit and show until there is nothing more to do. While the filesystem fails it waits, as pilots do: nobody
        else submits the missing ones."""
        files, squeue = files_timer(), squeue_timer()
        started = time.monotonic()
        while True:
            try:
                if self._turn(files, squeue, started):
                    return
                pause_s = min(files.period_s, squeue.left_s())
            except (OSError, FilesUnreadable) as error:
                if self._signals:
                    raise
                self._show_error(error, "read")
                pause_s = files.period_s
            sleep_until_signal(pause_s, self._signals)

    def _turn(self, files: PollTimer, squeue: PollTimer, started: float) -> bool:
        """Read the status and do what is due. Returns whether nothing more is to do."""
        status, self._just_read = self._just_read or self._reader.read(), None
        self._view.show(status)
        if self._signals:
            self.leave()
            return True
        if self._cancelled():
            self._message = f"cancelled by another command; {plural(status.left, 'point')} left"
            return True
        if line := self._feed():
            self._view.print_line(line)
            status = self._reader.read()
        progress = status.finished != self._last_finished
        self._last_finished = status.finished
        if squeue.due() or not status.left:
            changed = self._reconcile(status)
            squeue.polled(changed=changed or progress)
            if not status.left and self._lingers:
                return True
            if not status.left:
                held = wait_for_release(self._sweep, self._view.print_line, self._signals)
                remove_leftovers(self._sweep, self._reader.read(held), self._view.print_line)
                self._reader.merge_records()
                return True
            if self._is_over() or (self._detach and self._may_detach(started)):
                return True
        files.polled(changed=progress)
        return False

    def leave(self) -> None:
        """Show which pilots keep running without this process."""
        pilots = self._cycle.certainly_alive
        unsure = [one for one in submissions.all_submissions(self._sweep) if one.stage in ("intent", "unsure")]
        self._detached = bool(pilots or unsure)
        self._interrupted = not self._detached
        if self._interrupted:
            ending = sum(self._cycle.unsettled.values())
            more = f"; {plural(ending, 'pilot')} {'is' if ending == 1 else 'are'} ending" if ending else ""
            self._view.print_line(f"{self._ended()}{more}")
            return
        if not pilots:
            self._view.print_line("a submission was interrupted; if its job exists, the same command finds it")
        path = command_line([str(self._sweep.path)])
        self._view.print_line(
            f"{pilots or 'some'} {'pilot keeps' if pilots == 1 else 'pilots keep'} running without this command\n"
            f"  python -m sweep watch {path}    follows them (status shows them once)\n"
            f"  python -m sweep cancel {path}   ends them; the same run command submits again"
        )

    def _ended(self) -> str:
        """What became of the pilots that were submitted during this command, when none of them is left."""
        everything = submissions.all_submissions(self._sweep)
        ours = [one for one in everything if one.token not in self._known_tokens and one.job_id is not None]
        if not ours:
            return "no pilot was submitted"
        count = sum(one.count for one in ours)
        how = ours[-1].message or f"job {ours[-1].job_id}"
        return (
            f"{plural(count, 'pilot')} {'was' if count == 1 else 'were'} submitted, and none waits or runs now; "
            f"the last: {how}; {last_words(self._sweep, ours[-1].token)}"
        )

    def summary(self, before: SweepStatus) -> RunSummary:
        return summarize(
            before,
            self._reader.read(),
            too_wide=self._too_wide,
            interrupted=self._interrupted,
            message=self._message,
            detached=self._detached,
        )

    def _cancelled(self) -> bool:
        return submissions.cancel_mark(self._sweep) != self._cancel_mark

    def _reconcile(self, status: SweepStatus) -> bool:
        """Run one cycle of the reconciler and show what has changed. Returns whether anything has."""
        try:
            cycle = self._reconciler.cycle(status.attempts)
        except OSError as error:
            self._show_error(error, "write")
            return False
        self._shown_error = ""
        if cycle.busy:
            if not self._shown_busy:
                self._view.print_line(f"another command is submitting pilots for {self._sweep.path}; waiting for it")
            self._shown_busy = True
            return True
        self._shown_busy = False
        if cycle.jobs is None:
            if not self._shown_unreachable:
                complaint = self._reconciler.client.complaint
                self._view.print_line(
                    f"Slurm does not answer ({complaint}); nothing is lost, pilots keep running; trying again"
                )
            self._shown_unreachable = True
            return False
        if self._shown_unreachable:
            self._view.print_line("Slurm answers again")
        self._shown_unreachable = False
        if cycle.runnable or any(cycle.live.values()):  # otherwise the error or the summary contains it
            for nodes in cycle.given_up.keys() - self._cycle.given_up.keys():
                self._view.print_line(str(cycle.given_up[nodes]))
        self._cycle = cycle
        self._too_wide = cycle.demand.too_wide
        for nodes, sentence in cycle.demand.capped.items():
            if nodes not in self._shown_capped:
                self._shown_capped.add(nodes)
                self._view.print_line(sentence)
        jobs = describe_jobs(cycle.jobs)
        changed = jobs != self._shown_jobs or cycle.submitted > 0
        if changed and not cycle.submitted:  # after a submission, squeue's output is out of date
            self._view.print_line(jobs)
            self._shown_jobs = jobs
        return changed

    def _show_error(self, error: OSError | FilesUnreadable, task: str) -> None:
        """Show the error, or raise it again when waiting does not help."""
        if self._removed():
            raise error
        message = f"cannot {task} in {self._sweep.path}: {getattr(error, 'strerror', None) or error}"
        if getattr(error, "errno", None) in _LASTING_ERRORS:
            raise InvalidResults(message) from None
        if message != self._shown_error:
            self._view.print_line(f"{message}; trying again")
        self._shown_error = message

    def _removed(self) -> bool:
        """Whether the sweep's folder is gone; False while the filesystem does not say."""
        try:
            return self._sweep.removed
        except OSError:
            return False

    def _is_over(self) -> bool:
        """Whether points are left that no pilot will run. Raises when no point could be run at all: then Slurm or the
        user has to change something."""
        cycle = self._cycle
        if cycle.jobs is None or cycle.runnable or any(cycle.live.values()) or self._shown_busy:
            return False
        status = self._reader.read()  # again: points that the cycle did not find in the queue may have ended since
        if not status.left:
            return False
        if status.claimed and not cycle.demand.points:  # a pilot outside Slurm, or one that has just ended, holds them
            return False
        if cycle.demand.points and len(status.attempts) == self._known_attempts:
            raise next(iter(cycle.given_up.values()))
        self._message = "; ".join(self._why_left(cycle)) or f"{plural(status.left, 'point')} are left"
        return True

    def _why_left(self, cycle: Cycle) -> list[str]:
        demand, options = cycle.demand, self._options
        why = [str(error) for nodes, error in cycle.given_up.items() if nodes in demand.points]
        if demand.too_wide:
            why.append(f"{_need(demand.too_wide)} more nodes than launcher.max_nodes={options.max_nodes}")
        if demand.too_long:
            why.append(
                f"{_need(demand.too_long)} up to {format_duration(demand.longest_s)}; a pilot of "
                f"launcher.time_min={options.time_min} has {format_duration(options.usable_s)}"
            )
        why += [f"paused: {kind}: {reason}" for kind, reason in cycle.paused.items()]
        return why

    def _may_detach(self, started: float) -> bool:
        """Whether ``detach`` has nothing more to submit. It checks once more after a submission: only then does Slurm
        report that it will never start a job."""
        cycle = self._cycle
        settled = not cycle.missing and not cycle.submitted and not any(cycle.unsettled.values())
        if cycle.jobs is not None and settled:
            self.leave()
            return True
        if time.monotonic() - started > _DETACH_LIMIT_S:
            if not cycle.certainly_alive:
                raise SlurmUnreachable("Slurm accepted no pilot; repeat the command to try again")
            self.leave()
            return True
        return False


def _need(count: int) -> str:
    return f"{plural(count, 'point')} need{'s' * (count == 1)}"

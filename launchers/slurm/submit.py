"""Run a sweep on Slurm: submit the pilots that its queue deserves, watch them, submit again what got lost.

This process is needed for nothing but new submissions: pilots draw from the queue, write every row and end by
themselves. It may be left (Ctrl-C), killed or started a second time at any moment.
"""

from __future__ import annotations

import errno
import sys
import time
from collections import Counter
from collections.abc import Sequence

from launchers.interrupts import interrupts
from launchers.settings import LaunchSettings
from launchers.slurm import reconcile
from launchers.slurm.batch_file import SBATCH_LIMIT_S, available, submission_text
from launchers.slurm.client import Job, SlurmClient, default_limits, jobs_of
from launchers.slurm.demand import demand_of
from launchers.slurm.options import SlurmOptions, check_path
from launchers.slurm.reconcile import Cycle, Reconciler, only_submitter
from launchers.state import code_snapshot, submissions
from launchers.state.submissions import new_submission
from launchers.state.sweep_dir import Point, SweepDir
from launchers.status.run_summary import RunSummary
from launchers.status.status import StatusReader, SweepStatus
from launchers.status.view import LiveView, PlainView, View
from results.errors import InvalidResults, UltrasweepError
from results.provenance import command_line
from results.text import format_duration, plural

PILOT = (sys.executable, "-m", "launchers.slurm.pilot_job")
POLL_S, SLOWEST_POLL_S = 2.0, 60.0
"""Between two looks at squeue: short after something has changed, longer and longer while nothing does."""
_SLOWER = 1.4
_LOOK_S, _SLOWEST_LOOK_S = 1.0, 5.0
"""Between two looks at the sweep's files."""
_DETACH_LIMIT_S = 600.0
"""How long ``detach`` tries to submit what Slurm does not take at once."""


class SlurmUnreachable(UltrasweepError):
    """Slurm does not answer, and without it there is nothing to do."""


def run_slurm(
    sweep: SweepDir,
    settings: LaunchSettings,
    options: SlurmOptions,
    *,
    live: bool | None = None,
    command: str | None = None,
    detach: bool = False,
) -> RunSummary:
    """Submit the pilots that are missing and watch until no point is left.

    ``live``: a live view; None: when standard output is a terminal. ``command``: for the rows; None: this process's
    own. ``detach``: return after the submission. Ctrl-C leaves the pilots alone: the summary is ``detached``, and what
    to type next has been said. Raises `UltrasweepError` when Slurm refuses every pilot, or pilots keep ending
    without an attempt, and no pilot is there.
    """
    if not available():
        raise UltrasweepError("launcher=slurm needs sbatch and srun, which are not on PATH here; use a login node")
    check_path(sweep.path.resolve())
    reader = StatusReader(sweep)
    before = reader.read()
    view = _view(live, before)
    with interrupts(limit=2) as received, view:
        watcher = _Watcher(sweep, settings, options, reader, view, received, command or command_line(), detach)
        try:
            watcher.run()
        except KeyboardInterrupt:  # the second Ctrl-C: a submission may be half done, and will be found by its token
            watcher.leave()
        except FileNotFoundError:
            if sweep.marker.exists():
                raise
            raise InvalidResults(f"{sweep.path} was removed while its points ran; its pilots will end") from None
    return watcher.summary(before)


def watch(sweep: SweepDir, *, live: bool | None = None) -> RunSummary:
    """Look on without submitting anything, until no point or no pilot is left, or Ctrl-C."""
    reader = StatusReader(sweep)
    before = status = reader.read()
    view = _view(live, before)
    message, picture, detached = "", "", False
    look, slurm_asked = _Decay(_LOOK_S, _SLOWEST_LOOK_S), _Decay(POLL_S, SLOWEST_POLL_S)
    nobody = 0
    with interrupts(limit=2) as received, view:
        while True:
            status = reader.read()
            view.show(status)
            if not status.left:
                break
            if slurm_asked.due():
                jobs = jobs_of(sweep)
                said = _picture_of(jobs)
                if said != picture:
                    view.say(said)
                changed, picture = said != picture, said
                slurm_asked.next(changed)
                nobody = nobody + 1 if jobs is not None and not any(j.alive for j in jobs) and not status.pilots else 0
                if nobody >= 2:  # twice: a pilot may be between two states
                    message = (
                        f"no pilot is there, {plural(status.left, 'point')} left; the command that ran them goes on"
                    )
                    break
            if received:
                detached = True
                break
            look.next(False)
            _sleep(look.period, received)
    return RunSummary(
        outcomes=status.done,
        attempts=len(status.attempts) - len(before.attempts),
        left=status.left,
        too_wide=0,
        interrupted=False,
        message=message,
        detached=detached,
    )


def dry_run(sweep: SweepDir, points: Sequence[Point], settings: LaunchSettings, options: SlurmOptions) -> list[str]:
    """The batch files that a run would submit for ``points`` if nothing had been submitted yet.

    Nothing is written or submitted, and no Slurm is needed; ``sweep`` (``SweepDir(path)``) need not exist.
    """
    limits = (SlurmClient().limits() if available() else None) or default_limits()
    code = code_snapshot.folder_of(sweep, code_snapshot.take_snapshot())
    texts = []
    for nodes, pilots in demand_of(points, settings, options).pilots.items():
        for at in range(0, pilots, limits.largest_array):
            count = min(limits.largest_array, pilots - at)
            submission = new_submission(sweep, nodes=nodes, count=count, time_min=options.time_min)
            texts.append(submission_text(reconcile.pilot_job(sweep, settings, submission, code, PILOT, ()), options))
    return texts


def cancel(sweep: SweepDir) -> int:
    """Cancel every pilot of the sweep, and stop whoever watches it from submitting more; how many pilots.

    What they were running waits again. Raises `SlurmUnreachable` when Slurm does not answer.
    """
    if not submissions.all_submissions(sweep):
        return 0
    try:
        submissions.say_cancelled(sweep)
    except OSError as error:
        raise InvalidResults(
            f"cannot write in {sweep.path}: {error.strerror or error}; nothing was cancelled"
        ) from None
    client = SlurmClient()
    cancelled: set[tuple[str, str]] = set()
    # Whoever is in the middle of a submission finishes it, sees the mark and lets go.
    with only_submitter(sweep, wait_s=SBATCH_LIMIT_S + 10.0):
        while True:
            mine = submissions.all_submissions(sweep)
            jobs = client.jobs({one.uid for one in mine})
            if jobs is None:
                raise SlurmUnreachable(f"nothing was cancelled, the pilots go on: {client.complaint}")
            tokens = {one.token for one in mine}
            alive = [job for job in jobs if job.token in tokens and job.alive and job.state != "COMPLETING"]
            fresh = [job for job in alive if (job.token, job.name) not in cancelled]
            if fresh and not client.cancel(fresh):
                raise SlurmUnreachable(f"{len(fresh)} pilots could not be cancelled: {client.complaint}")
            cancelled |= {(job.token, job.name) for job in fresh}
            shown = {job.token for job in jobs}
            # An sbatch whose caller was killed may still be running: its job would come up after us.
            coming = [
                one
                for one in mine
                if one.stage == "intent" and one.token not in shown and time.time() - one.created_at < SBATCH_LIMIT_S
            ]
            if not coming:
                return len(cancelled)
            time.sleep(POLL_S)


class _Watcher:
    """One call of `run_slurm`."""

    def __init__(
        self,
        sweep: SweepDir,
        settings: LaunchSettings,
        options: SlurmOptions,
        reader: StatusReader,
        view: View,
        received: list[int],
        command: str,
        detach: bool,
    ) -> None:
        self._sweep, self._settings, self._options = sweep, settings, options
        self._reader, self._view, self._received, self._detach = reader, view, received, detach
        self._known_attempts = len(reader.read().attempts)
        self._mark = submissions.cancel_mark(sweep)
        self._reconciler = Reconciler(
            sweep,
            settings,
            options,
            pilot=PILOT,
            command=command,
            say=view.say,
            stopped=lambda: bool(received) or self._cancelled(),
        )
        self._cycle = Cycle(jobs=None)
        self._picture = ""
        self._said_unreachable = self._said_busy = False
        self._said_unwritable = self._message = ""
        self._detached = self._interrupted = False
        self._too_wide = 0

    def run(self) -> None:
        look, poll = _Decay(_LOOK_S, _SLOWEST_LOOK_S), _Decay(POLL_S, SLOWEST_POLL_S)
        started, finished = time.monotonic(), -1
        while True:
            status = self._reader.read()
            self._view.show(status)
            if self._received:
                self.leave()
                return
            if self._cancelled():
                self._message = f"cancelled by another command; {plural(status.left, 'point')} left"
                return
            moved = status.finished != finished
            finished = status.finished
            if poll.due() or not status.left:
                changed = self._ask(status)
                poll.next(changed or moved)
                if not status.left:
                    return
                # Read again: what the cycle did not find waiting may have ended since.
                if self._over(self._reader.read()) or (self._detach and self._submitted(started)):
                    return
            look.next(moved)
            _sleep(min(look.period, poll.left()), self._received)

    def leave(self) -> None:
        """Say what goes on without us."""
        pilots = sum(self._cycle.live.values())
        unsure = [one for one in submissions.all_submissions(self._sweep) if one.stage in ("intent", "unsure")]
        self._detached = bool(pilots or unsure)
        self._interrupted = not self._detached
        if self._interrupted:
            self._view.say("no pilot was submitted")
            return
        if not pilots:
            self._view.say("a submission was cut short; if its job is there, the same command finds it again")
        quoted = command_line([str(self._sweep.path)])
        self._view.say(
            f"{pilots or 'some'} {'pilot goes' if pilots == 1 else 'pilots go'} on without this command\n"
            f"  python -m sweep watch {quoted}    looks on again (status: once)\n"
            f"  python -m sweep cancel {quoted}   ends them; the same run command submits again"
        )

    def summary(self, before: SweepStatus) -> RunSummary:
        after = self._reader.read()
        return RunSummary(
            outcomes=after.done,
            attempts=len(after.attempts) - len(before.attempts),
            left=after.left,
            too_wide=self._too_wide,
            interrupted=self._interrupted,
            message=self._message,
            detached=self._detached,
        )

    def _cancelled(self) -> bool:
        return submissions.cancel_mark(self._sweep) != self._mark

    def _ask(self, status: SweepStatus) -> bool:
        """One cycle; whether anything is different from the last."""
        try:
            cycle = self._reconciler.cycle(status.attempts)
        except OSError as error:
            if not self._sweep.marker.exists():
                raise
            said = f"cannot write in {self._sweep.path}: {error.strerror or error}"
            if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):  # will not go by, as a full disk does
                raise InvalidResults(said) from None
            if said != self._said_unwritable:
                self._view.say(f"{said}; trying again")
            self._said_unwritable = said
            return False
        if cycle.busy:
            if not self._said_busy:
                self._view.say(f"another command submits for {self._sweep.path} right now; waiting for it")
            self._said_busy = True
            return True
        self._said_busy = False
        if cycle.jobs is None:
            if not self._said_unreachable:
                said = self._reconciler.client.complaint
                self._view.say(
                    f"Slurm does not answer ({said}); nothing is lost, pilots go on without it; asking again"
                )
            self._said_unreachable = True
            return False
        if self._said_unreachable:
            self._view.say("Slurm answers again")
        self._said_unreachable = False
        if cycle.runnable or any(cycle.live.values()):  # else it is told in the end
            for nodes in cycle.given_up.keys() - self._cycle.given_up.keys():
                self._view.say(str(cycle.given_up[nodes]))
        self._cycle = cycle
        self._too_wide = cycle.demand.too_wide
        picture = _picture_of(cycle.jobs)
        changed = picture != self._picture or cycle.submitted > 0
        if changed and not cycle.submitted:  # else squeue was asked just before
            self._view.say(picture)
            self._picture = picture
        return changed

    def _over(self, status: SweepStatus) -> bool:
        """Whether points are left that no pilot will ever run; raises when that is Slurm's or the user's to mend."""
        cycle = self._cycle
        if cycle.jobs is None or cycle.runnable or any(cycle.live.values()) or self._said_busy or not status.left:
            return False
        if status.claimed and not cycle.demand.points:  # with a pilot outside Slurm, or one that has just ended
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
        why += [f"held back: {kind}: {reason}" for kind, reason in cycle.held.items()]
        return why

    def _submitted(self, started: float) -> bool:
        """Whether ``detach`` has nothing more to wait for."""
        cycle = self._cycle
        if cycle.jobs is not None and not cycle.missing:
            self.leave()
            return True
        if time.monotonic() - started > _DETACH_LIMIT_S:
            if not any(cycle.live.values()):
                raise SlurmUnreachable("Slurm took no pilot; the same command tries again")
            self.leave()
            return True
        return False


class _Decay:
    """When to look next: soon after a change, later and later without one."""

    def __init__(self, shortest: float, longest: float) -> None:
        self.period = shortest
        self._shortest, self._longest = shortest, longest
        self._at = 0.0

    def due(self) -> bool:
        return time.monotonic() >= self._at

    def left(self) -> float:
        return max(0.0, self._at - time.monotonic())

    def next(self, changed: bool) -> None:
        self.period = self._shortest if changed else min(self._longest, self.period * _SLOWER)
        self._at = time.monotonic() + self.period


def _view(live: bool | None, status: SweepStatus) -> View:
    live = sys.stdout.isatty() if live is None else live
    return LiveView() if live else PlainView({record.attempt_id for record in status.attempts})


def _picture_of(jobs: Sequence[Job] | None) -> str:
    """Pilots by what they do: ``pilots: 3 run, 2 wait (Priority)``."""
    if jobs is None:
        return "Slurm does not answer"
    waiting = [job for job in jobs if job.waiting]
    ending = sum(job.state == "COMPLETING" for job in jobs)
    running = sum(job.alive for job in jobs) - len(waiting) - ending
    reasons = ", ".join(reason for reason, _ in Counter(job.reason for job in waiting).most_common(2))
    parts = [f"{running} run{'s' * (running == 1)}"] if running else []
    parts += [f"{len(waiting)} wait{'s' * (len(waiting) == 1)} ({reasons})"] if waiting else []
    parts += [f"{ending} end{'s' * (ending == 1)}"] if ending else []
    return f"pilots: {', '.join(parts) or 'none'}"


def _sleep(seconds: float, received: list[int]) -> None:
    """Sleep; a signal ends it early."""
    until, known = time.monotonic() + seconds, len(received)
    while time.monotonic() < until and len(received) == known:
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))


def _need(count: int) -> str:
    return f"{plural(count, 'point')} need{'s' * (count == 1)}"

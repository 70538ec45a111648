"""Runs a sweep on this machine: starts one pilot as a child process, shows its progress and stops it on Ctrl-C."""

from __future__ import annotations

import contextlib
import secrets
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable

from launchers.attempt.outcome import Outcome, disk_trouble
from launchers.interrupts import interrupts
from launchers.node.fork import signal_name
from launchers.pilot.pilot import FINISHED, STOPPED, TROUBLE
from launchers.settings import LaunchSettings
from launchers.state import pilot_state
from launchers.state.circuit_breaker import paused_kinds, paused_message
from launchers.state.pilot_config import PilotConfig, pilot_config_to_dict, pilot_environment
from launchers.state.queue import QueueReader
from launchers.state.sweep_dir import Point, SweepDir
from launchers.status.leftovers import remove_leftovers
from launchers.status.run_summary import RunSummary, summarize
from launchers.status.status import StatusReader, SweepStatus
from launchers.status.view import StatusView, choose_view
from results.errors import UltrasweepError
from results.shared_filesystem import packed_folder
from results.shared_filesystem.patience import patiently
from results.shared_filesystem.whole_files import create
from results.tables.provenance import command_line
from results.text.log_tail import tail_in_one_line
from workloads.contract.protocol import write_json

PILOT = (sys.executable, "-m", "launchers.pilot")
POLL_S = 0.5
"""Seconds between two checks of the sweep's files and of Ctrl-C."""
_RESTARTS = 2
"""Number of pilots in a row that may die without finishing a point and are replaced."""
_LOG_LINES = 8
_STOPPING = "stopping: the running point goes back to the queue (Ctrl-C again: stop at once)"
_KILLED = "killed; the next run records the points that were running, and runs them again"
_READ_LIMIT_S = 20.0
"""Seconds to wait for a filesystem on which the queue cannot be read now."""


class PilotFailed(UltrasweepError):
    """A pilot could not start, or died repeatedly."""


def run_local(
    sweep: SweepDir,
    settings: LaunchSettings,
    *,
    live: bool | None = None,
    command: str | None = None,
    feed: Callable[[], str] = lambda: "",
    most_points: int = 0,
) -> RunSummary:
    """Run every waiting point of ``sweep`` that fits this machine's devices, and return when none is left.

    ``live``: as in `choose_view`. ``command``: the command line for the rows; None: that of this process. ``feed`` is
    called at every check of the files: it may add points, and returns a line to show or nothing. ``most_points``:
    as in `StatusReader`. Ctrl-C ends the running point, which gets a row (cancelled) and waits again; a second Ctrl-C
    kills the pilot. Raises `PilotFailed` when a pilot cannot start or keeps dying.
    """
    reader = StatusReader(sweep, most_points)
    before = reader.read()
    damage: list[str] = []
    points = patiently(QueueReader(sweep, "", damage.append).waiting, limit_s=_READ_LIMIT_S)
    _refuse_other_methods(sweep, settings, points, before)
    too_wide = sum(_too_wide(point, settings) for point in points)
    message = ""
    interrupted = False
    if before.todo > too_wide or before.claimed:
        try:
            with choose_view(live, before) as view:
                for line in damage:
                    view.print_line(line)
                interrupted, message = _run_pilots(sweep, settings, reader, view, command, feed)
        except FileNotFoundError:
            _refuse_if_gone(sweep)
            raise
    after = reader.read()
    remove_leftovers(sweep, after, print)
    reader.merge_records()
    if not interrupted and not message:
        message = _why_left(sweep, after, too_wide, settings)
    return summarize(before, after, too_wide=too_wide, interrupted=interrupted, message=message)


def _run_pilots(
    sweep: SweepDir,
    settings: LaunchSettings,
    reader: StatusReader,
    view: StatusView,
    command: str | None,
    feed: Callable[[], str],
) -> tuple[bool, str]:
    """Run pilots until one ends regularly. Returns whether the user interrupted, and why the pilot stopped early."""
    deaths = 0
    while True:
        attempts_before = len(reader.read().attempts)
        pilot_id, status, interrupted = _run_pilot(sweep, settings, reader, view, command, feed)
        state = pilot_state.read_state(sweep, pilot_id)
        if interrupted or status == STOPPED:
            return True, ""
        if status == FINISHED:
            return False, ""
        if status == TROUBLE:
            return False, state.message if state is not None else "the pilot stopped"
        log = pilot_state.log_path(sweep, pilot_id)
        if status == 2:
            raise PilotFailed(tail_in_one_line(log, _LOG_LINES) or "the pilot could not start")
        deaths = 1 if len(reader.read().attempts) > attempts_before else deaths + 1
        ended = f"was killed by {signal_name(-status)}" if status < 0 else f"ended with status {status}"
        if deaths > _RESTARTS:
            raise PilotFailed(
                f"the pilot {ended} {deaths} times in a row; see {log}: {tail_in_one_line(log, _LOG_LINES)}"
            )
        view.print_line(f"the pilot {ended}; starting another, which takes over its point")


def _run_pilot(
    sweep: SweepDir,
    settings: LaunchSettings,
    reader: StatusReader,
    view: StatusView,
    command: str | None,
    feed: Callable[[], str],
) -> tuple[str, int, bool]:
    """Run one pilot from its start to its end. Returns its id, its exit status, and whether the user interrupted."""
    pilot_id = f"local-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    config = PilotConfig(settings=settings, command=command or command_line(), wall_time_s=None, stop_with_parent=True)
    write_json(pilot_state.config_path(sweep, pilot_id), pilot_config_to_dict(config), private=True)
    with create(pilot_state.log_path(sweep, pilot_id)) as log, interrupts() as signals:
        process = subprocess.Popen(
            [*PILOT, str(sweep.path), pilot_id],
            stdin=subprocess.PIPE,  # stays open: when this process dies, it closes and the pilot stops
            stdout=log,
            stderr=subprocess.STDOUT,
            env=pilot_environment(),
            start_new_session=True,  # a Ctrl-C in the terminal reaches only this process
        )
        assert process.stdin is not None
        handled, trouble, unread = 0, None, None
        try:
            while process.poll() is None:
                if (now := disk_trouble(sweep.path)) is not None and now != trouble:
                    _refuse_if_gone(sweep)
                    view.print_line(f"{sweep.path} {now}; writing is retried, nothing is lost")
                trouble = now
                if len(signals) > handled:
                    handled = len(signals)
                    process.send_signal(signal.SIGINT if handled == 1 else signal.SIGKILL)
                    view.print_line(_STOPPING if handled == 1 else _KILLED)
                    if handled > 1:
                        _note_kill(sweep, pilot_id)
                error = _show(sweep, reader, view)
                if error is not None and unread is None:
                    view.print_line(f"{sweep.path} cannot be read now ({error}); waiting, nothing is lost")
                unread = error
                if not signals and (line := feed()):
                    view.print_line(line)
                _wait(process, POLL_S)
        finally:
            process.stdin.close()
    _show(sweep, reader, view)
    return pilot_id, process.returncode, bool(signals)


def _note_kill(sweep: SweepDir, pilot_id: str) -> None:
    """Record in a pilot's attempts that the user killed it, so that the next pilot does not blame the machine."""
    state = pilot_state.read_state(sweep, pilot_id)
    killed = Outcome(outcome="cancelled", evidence="killed by the user (Ctrl-C twice)")
    for one in state.running if state is not None else ():
        path = sweep.attempts / one.attempt_id / "outcome.json"
        with contextlib.suppress(OSError):
            if not packed_folder.exists(
                path
            ):  # if it exists, the attempt had ended and the pilot had recorded its outcome
                write_json(path, killed)


def _show(sweep: SweepDir, reader: StatusReader, view: StatusView) -> OSError | None:
    """Show the current status. A failing file system costs one update, not the run; its error is returned."""
    try:
        view.show(reader.read(limit_s=0.0))
    except OSError as error:
        _refuse_if_gone(sweep)
        return error
    return None


def _refuse_if_gone(sweep: SweepDir) -> None:
    """Raise `PilotFailed` when the sweep's folder has been removed."""
    try:
        for path in (sweep.marker, sweep.todo):
            path.stat()
    except (FileNotFoundError, NotADirectoryError):
        raise PilotFailed(f"{sweep.path} was removed while its points ran; the run cannot continue") from None
    except OSError:
        return


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _too_wide(point: Point, settings: LaunchSettings) -> bool:
    return point.method == "measured" and point.experiment.world_size > settings.num_devices


def _refuse_other_methods(sweep: SweepDir, settings: LaunchSettings, points: list[Point], before: SweepStatus) -> None:
    """Raise `UltrasweepError` when no waiting point has the method of this run: a pilot only claims points of its own
    method."""
    methods = Counter(point.method for point in points)
    if points and not methods[settings.method] and not before.claimed:
        others = ", ".join(f"{count} {method}" for method, count in methods.items())
        raise UltrasweepError(f"{sweep.path}: no waiting point has the method {settings.method} (waiting: {others})")


def _why_left(sweep: SweepDir, status: SweepStatus, too_wide: int, settings: LaunchSettings) -> str:
    if not status.left:
        return ""
    if too_wide and too_wide >= status.todo:
        return (
            f"{too_wide} of the points need more than the {settings.num_devices} devices of this machine "
            "(launcher.num_devices)"
        )
    if status.claimed and not status.todo:
        return f"{status.claimed} of {status.total} points are claimed by other pilots, which still run"
    if paused := paused_kinds(sweep, status.attempts, settings.breaker_failures):
        return f"{status.left} of {status.total} points are left; {paused_message(paused)}"
    return f"{status.left} of {status.total} points are left"

"""Watches the ranks of one attempt until all have ended, and ends them when one fails, hangs or runs out of time.

It judges by heartbeats (phase, step, and the time since they last changed by this process's own clock), exit statuses
and the deadline; never by the text of logs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launchers.node.fork import RankExit
from launchers.node.rank_group import RankGroup
from launchers.settings import LaunchSettings
from results.shared_filesystem.patience import in_background
from results.tables.schema import PHASES
from workloads.contract import protocol
from workloads.contract.beats import Heartbeat

POLL_S = 0.02
"""Seconds between two checks of exits and stop requests."""
HEARTBEATS_EVERY_S = 0.2
"""Seconds between two checks of the heartbeats."""
STACKS_WAIT_S = 0.5
"""Seconds that the ranks of a hang get to write their stacks."""
MOST_STACKS = 64
"""Maximum number of ranks that are asked for their stacks."""
STEP_FACTOR = 20.0
"""A step may take this many times as long as the slowest step so far, or as predicted."""
STEP_LIMIT_MIN_S = 30.0
"""Lower bound of a step's time limit, seconds."""
FILES_WAIT_S = 1.0
"""Maximum seconds to wait for one answer of the file system. A slower answer is read at a later check, so that ranks
are ended in time even while the file system hangs."""

End = Literal["ended", "failed", "lost", "hang", "deadline", "teardown", "stopped"]
_FINISHING = ("teardown", "done")
STEP_PHASES = ("warmup", "replay", "step")
"""Phases in which a rank reports the number of a step."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledRank:
    """Last known position of a rank, and how long ago it got there (``age_s``)."""

    rank: int
    phase: str
    step: int | None
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchResult:
    """Observations of one set of ranks."""

    end: End
    """``ended``: all ranks ended by themselves and none failed. Other values say why the remaining ranks were
    killed."""
    exits: Mapping[int, RankExit]
    heartbeats: Mapping[int, Heartbeat | None]
    """The last heartbeat of each rank; None where there was none."""
    stalled: tuple[StalledRank, ...] = ()
    """In a hang the ranks that caused it; at the deadline all ranks still running. The one furthest behind comes
    first."""
    seconds: float
    """Seconds from the start of the watch until the last process had ended."""
    host_oom_kills: int = 0
    """See `launchers.node.rank_group.Termination`, also for ``survivors``."""
    survivors: tuple[str, ...] = ()
    lost: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose node stopped answering, with the evidence for that."""


@dataclass(slots=True)
class _Rank:
    """Observations of one running rank."""

    heartbeat: Heartbeat | None = None
    since: float = field(default_factory=time.monotonic)
    """When the heartbeat last changed, by this process's monotonic clock."""
    longest_step_s: float | None = None
    """Longest time between two heartbeats in the phases ``warmup`` and ``step``."""
    has_result: bool | None = None
    """Whether a rank that has ended had written its result; None while unknown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Phase and step of the rank that is furthest behind."""

    phase: str
    step: int | None
    part: str = ""
    """For a rehearsal, which runs one rank after the other: which of them runs now, such as ``stage 1 of 2``."""


def watch(
    folder: Path,
    group: RankGroup,
    settings: LaunchSettings,
    *,
    deadline_s: float,
    expected_step_s: float | None,
    stop_asked: Callable[[], bool],
    on_progress: Callable[[Progress], None],
) -> WatchResult:
    """Wait until every rank of ``group`` has ended; kill all when one fails, hangs or is still running at the deadline.

    ``folder``: the attempt's folder. ``expected_step_s``: predicted time of a step, which raises the limits of slow
    steps. ``stop_asked``: polled every `POLL_S` seconds; True stops the ranks. ``on_progress``: called every
    `HEARTBEATS_EVERY_S` seconds.
    """
    ranks = {rank: _Rank() for rank in group.ranks}
    started = time.monotonic()
    lost: Mapping[int, str] = {}
    try:
        end, stalled = _until_end(
            folder,
            ranks,
            group,
            settings,
            deadline_at=started + deadline_s,
            expected_step_s=expected_step_s,
            stop_asked=stop_asked,
            on_progress=on_progress,
        )
        if end == "hang":
            group.request_stacks(group.ranks[:MOST_STACKS])
            time.sleep(STACKS_WAIT_S)
        lost = group.lost()
    finally:
        ended = group.end()
    _take_heartbeats(group, ranks)
    if end != "ended":
        _keep_heartbeats(folder, ranks)
    return WatchResult(
        end=end,
        exits=group.exits(),
        heartbeats={rank: state.heartbeat for rank, state in ranks.items()},
        stalled=stalled,
        seconds=time.monotonic() - started,
        host_oom_kills=ended.host_oom_kills,
        survivors=ended.survivors,
        lost=lost,
    )


def _until_end(
    folder: Path,
    ranks: Mapping[int, _Rank],
    group: RankGroup,
    settings: LaunchSettings,
    *,
    deadline_at: float,
    expected_step_s: float | None,
    stop_asked: Callable[[], bool],
    on_progress: Callable[[Progress], None],
) -> tuple[End, tuple[StalledRank, ...]]:
    """Wait until all ranks have ended or must be killed. Returns which of the two, and `WatchResult.stalled`."""
    files = _ResultFiles(folder)
    failed_at: float | None = None
    next_heartbeats = 0.0
    while True:
        exits = group.exits()
        now = time.monotonic()
        if exits:
            _take_heartbeats(group, ranks)  # a rank's last heartbeats arrive before its exit
        _note_results(files, exits, ranks)
        failed = any(ranks[rank].has_result is False for rank in exits)
        if group.lost():
            return "lost", ()
        if now >= next_heartbeats:
            next_heartbeats = now + HEARTBEATS_EVERY_S
            _take_heartbeats(group, ranks)
            failed = failed or any(_reported_error(state) for state in ranks.values())
            on_progress(_progress(ranks))
            stalled = _stalled(ranks, exits, settings, expected_step_s)
            if stalled and not failed:
                return ("teardown" if _all_measured(folder, ranks) else "hang"), stalled
        if failed and failed_at is None:
            failed_at = now
        if len(exits) == len(ranks):
            return ("failed" if failed else "ended"), ()
        if failed_at is not None and now - failed_at > settings.failure_grace_s:
            return "failed", ()
        if stop_asked():
            return "stopped", ()
        if now > deadline_at:
            return ("teardown" if _all_measured(folder, ranks) else "deadline"), _by_progress(ranks, exits)
        time.sleep(POLL_S)


def _reported_error(state: _Rank) -> bool:
    """Whether the rank has reported a failure. A failure after its result does not count: nothing was lost."""
    return state.heartbeat is not None and state.heartbeat.failed and state.heartbeat.phase not in _FINISHING


def _note_results(files: _ResultFiles, exits: Mapping[int, RankExit], ranks: Mapping[int, _Rank]) -> None:
    """Record for each rank that has ended whether it had written its result. A rank writes its result before it enters
    ``teardown``, so the last heartbeat is enough; only for ranks that ended in another phase is the disk read, once."""
    unknown = []
    for rank in exits:
        state = ranks[rank]
        if state.has_result is None and state.heartbeat is not None and state.heartbeat.phase in _FINISHING:
            state.has_result = True
        elif state.has_result is None:
            unknown.append(rank)
    if unknown:
        for rank, written in files.written(unknown).items():
            ranks[rank].has_result = written


def _all_measured(folder: Path, ranks: Mapping[int, _Rank]) -> bool:
    """Whether all ranks have written their results. False if unknown: the ranks are ended either way, and the outcome
    is decided from the files."""
    written = _ResultFiles(folder).written(list(ranks))
    return all(written.get(rank, False) for rank in ranks)


class _ResultFiles:
    """Looks for the results of ranks on a file system that may hang."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._asked: Future[dict[int, bool]] | None = None

    def written(self, ranks: Sequence[int]) -> dict[int, bool]:
        """Whether each rank has written its result. Ranks without an answer yet are left out; ask again for them."""
        if self._asked is None:
            self._asked = in_background(lambda: {r: protocol.result_path(self._folder, r).exists() for r in ranks})
            wait([self._asked], FILES_WAIT_S)
        if not self._asked.done():
            return {}
        asked, self._asked = self._asked, None
        try:
            return asked.result()
        except OSError:  # a shared filesystem may fail temporarily
            return {}


def _take_heartbeats(group: RankGroup, ranks: Mapping[int, _Rank]) -> None:
    now = time.monotonic()
    for rank, heartbeat in group.heartbeats().items():
        state = ranks[rank]
        if heartbeat == state.heartbeat:
            continue
        if state.heartbeat is not None and heartbeat.phase == state.heartbeat.phase in STEP_PHASES:
            state.longest_step_s = max(state.longest_step_s or 0.0, heartbeat.time - state.heartbeat.time)
        state.heartbeat, state.since = heartbeat, now


def _keep_heartbeats(folder: Path, ranks: Mapping[int, _Rank]) -> None:
    """Write the last position of every rank to a file. The evidence names only a few ranks."""
    heartbeats = [dataclasses.asdict(state.heartbeat) for state in ranks.values() if state.heartbeat is not None]
    with contextlib.suppress(OSError):  # the file is for people; the outcome does not depend on it
        protocol.write_json(protocol.heartbeats_path(folder), heartbeats)


def _stalled(
    ranks: Mapping[int, _Rank],
    exits: Mapping[int, RankExit],
    settings: LaunchSettings,
    expected_step_s: float | None,
) -> tuple[StalledRank, ...]:
    """The ranks furthest behind, as soon as any rank has made no progress for too long; else empty."""
    running = _by_progress(ranks, exits)
    if not running:
        return ()
    # A rank that has finished may wait in teardown as long as another has not finished.
    finishing = running[0].phase in _FINISHING
    judged = [rank for rank in running if finishing or rank.phase not in _FINISHING]
    if not any(rank.age_s > _limit_s(rank, ranks[rank.rank], settings, expected_step_s) for rank in judged):
        return ()
    # The other ranks continue until they wait for the rank that hangs, so the one furthest behind is the cause.
    last = _position(running[0].phase, running[0].step)
    return tuple(rank for rank in running if _position(rank.phase, rank.step) == last)


def _limit_s(rank: StalledRank, state: _Rank, settings: LaunchSettings, expected_step_s: float | None) -> float:
    """Seconds that the rank may stay without progress in its current phase."""
    limit = settings.phase_limit_s(rank.phase)
    if rank.phase in STEP_PHASES and expected_step_s is not None:
        limit = max(limit, STEP_FACTOR * expected_step_s)
    if rank.phase in ("replay", "step") and state.longest_step_s is not None:
        limit = min(limit, max(STEP_LIMIT_MIN_S, STEP_FACTOR * state.longest_step_s))
    return limit


def _by_progress(ranks: Mapping[int, _Rank], exits: Mapping[int, RankExit]) -> tuple[StalledRank, ...]:
    """Every running rank with the age of its heartbeat; the one furthest behind comes first."""
    now = time.monotonic()
    running = [
        StalledRank(
            rank=rank,
            phase=state.heartbeat.phase if state.heartbeat is not None else "spawn",
            step=state.heartbeat.step if state.heartbeat is not None else None,
            age_s=now - state.since,
        )
        for rank, state in ranks.items()
        if rank not in exits
    ]
    return tuple(sorted(running, key=lambda rank: (*_position(rank.phase, rank.step), rank.rank)))


def _position(phase: str, step: int | None) -> tuple[int, int]:
    return PHASES.index(phase), step if step is not None else -1


def _progress(ranks: Mapping[int, _Rank]) -> Progress:
    behind = _by_progress(ranks, {})[0]
    return Progress(phase=behind.phase, step=behind.step)

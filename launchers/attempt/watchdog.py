"""Watches the ranks of one attempt from their start to the proof that nothing of them is left.

It judges by heartbeats (phase, step, and how long they have stood still on this process's own clock), by exit statuses
and by the deadline; never by log text. It kills by pid and process group, never by name.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from launchers.node.fork import RankExit
from launchers.node.rank_group import RankGroup
from launchers.settings import LaunchSettings
from results.schema import PHASES
from workloads import protocol
from workloads.protocol import Heartbeat

POLL_S = 0.02
"""How often exits and stop requests are looked at."""
HEARTBEATS_EVERY_S = 0.2
"""How often heartbeats and error files are read (they may lie on a shared filesystem)."""
STACKS_WAIT_S = 0.5
"""For the ranks of a hang to write down where they are."""
MOST_STACKS = 64
STEP_FACTOR = 20.0
STEP_LIMIT_MIN_S = 30.0

End = Literal["ended", "failed", "lost", "hang", "deadline", "teardown", "stopped"]


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledRank:
    """A rank without progress for longer than its phase allows."""

    rank: int
    phase: str
    step: int | None
    age_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class WatchResult:
    """What the watchdog saw of one set of ranks."""

    end: End
    """ended: all ranks ended by themselves and none failed. The others say why the rest was killed."""
    exits: Mapping[int, RankExit]
    heartbeats: Mapping[int, Heartbeat | None]
    """Last heartbeat of each rank."""
    stalled: tuple[StalledRank, ...] = ()
    """The ranks that made a hang, or that were behind when the deadline came, the one furthest behind first."""
    seconds: float
    """From the start of the watch to the last process gone."""
    host_oom_kills: int = 0
    """Processes of this control group that the kernel killed for want of host memory meanwhile."""
    survivors: tuple[str, ...] = ()
    """Processes that could not be ended; their machine must not be used further."""
    lost: Mapping[int, str] = field(default_factory=dict)
    """Ranks whose node stopped answering, and what is known of it."""


@dataclass(slots=True)
class _Rank:
    heartbeat: Heartbeat | None = None
    since: float = field(default_factory=time.monotonic)
    """When the heartbeat last moved, on our clock."""
    longest_step_s: float | None = None
    """Longest time between two heartbeats while stepping."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """Phase and step of the rank that is furthest behind."""

    phase: str
    step: int | None


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
    """Wait until every rank of ``group`` is gone; end them where they fail, hang or outlive the deadline.

    ``expected_step_s`` widens the limits of slow steps. ``on_progress`` is called a few times a second.
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
    _read_heartbeats(folder, ranks, {})
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
    """Wait until all ranks have ended or there is a reason to end them."""
    failed_at: float | None = None
    next_heartbeats = 0.0
    while True:
        exits = group.exits()
        now = time.monotonic()
        failed = any(not protocol.result_path(folder, rank).exists() for rank in exits)
        if group.lost():
            return "lost", ()
        if now >= next_heartbeats:
            next_heartbeats = now + HEARTBEATS_EVERY_S
            _read_heartbeats(folder, ranks, exits)
            failed = failed or any(_gave_up(folder, rank) for rank in ranks)
            on_progress(_progress(ranks))
            late = _stalled(ranks, exits, settings, expected_step_s)
            if late and not failed:
                return ("teardown" if _all_measured(folder, ranks) else "hang"), late
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


def _gave_up(folder: Path, rank: int) -> bool:
    """The rank has said that it failed. One that fails after its result has lost nothing."""
    return protocol.error_path(folder, rank).exists() and not protocol.result_path(folder, rank).exists()


def _all_measured(folder: Path, ranks: Mapping[int, _Rank]) -> bool:
    return all(protocol.result_path(folder, rank).exists() for rank in ranks)


def _read_heartbeats(folder: Path, ranks: Mapping[int, _Rank], exits: Mapping[int, RankExit]) -> None:
    now = time.monotonic()
    for rank, state in ranks.items():
        if rank in exits:
            continue
        try:
            heartbeat = protocol.read_heartbeat(folder, rank)
        except (OSError, ValueError, TypeError):  # a shared filesystem may answer late; the next look will do
            continue
        if heartbeat is None or heartbeat == state.heartbeat:
            continue
        if state.heartbeat is not None and heartbeat.phase == state.heartbeat.phase in ("warmup", "step"):
            state.longest_step_s = max(state.longest_step_s or 0.0, heartbeat.time - state.heartbeat.time)
        state.heartbeat, state.since = heartbeat, now


def _stalled(
    ranks: Mapping[int, _Rank],
    exits: Mapping[int, RankExit],
    settings: LaunchSettings,
    expected_step_s: float | None,
) -> tuple[StalledRank, ...]:
    """Those furthest behind, once any rank has outstayed its phase's limit; empty when all move."""
    ordered = _by_progress(ranks, exits)
    if not ordered:
        return ()
    behind_phase = ordered[0].phase  # who has finished may wait in teardown for those who have not
    judged = [
        late for late in ordered if late.phase not in ("teardown", "done") or behind_phase in ("teardown", "done")
    ]
    if not any(late.age_s > _limit_s(late, ranks[late.rank], settings, expected_step_s) for late in judged):
        return ()
    # Ranks that wait for a stuck one have mostly got as far as they can: who stands furthest behind is the cause.
    furthest = _place(ordered[0].phase, ordered[0].step)
    return tuple(late for late in ordered if _place(late.phase, late.step) == furthest)


def _limit_s(late: StalledRank, state: _Rank, settings: LaunchSettings, expected_step_s: float | None) -> float:
    limit = settings.phase_limit_s(late.phase)
    if late.phase in ("warmup", "step") and expected_step_s is not None:
        limit = max(limit, STEP_FACTOR * expected_step_s)
    if late.phase == "step" and state.longest_step_s is not None:
        limit = min(limit, max(STEP_LIMIT_MIN_S, STEP_FACTOR * state.longest_step_s))
    return limit


def _by_progress(ranks: Mapping[int, _Rank], exits: Mapping[int, RankExit]) -> tuple[StalledRank, ...]:
    """Every running rank with the age of its heartbeat, the one furthest behind first."""
    now = time.monotonic()
    found = [
        StalledRank(
            rank=rank,
            phase=state.heartbeat.phase if state.heartbeat is not None else "spawn",
            step=state.heartbeat.step if state.heartbeat is not None else None,
            age_s=now - state.since,
        )
        for rank, state in ranks.items()
        if rank not in exits
    ]
    return tuple(sorted(found, key=lambda late: (*_place(late.phase, late.step), late.rank)))


def _place(phase: str, step: int | None) -> tuple[int, int]:
    return PHASES.index(phase), step if step is not None else -1


def _progress(ranks: Mapping[int, _Rank]) -> Progress:
    behind = _by_progress(ranks, {})[0]
    return Progress(phase=behind.phase, step=behind.step)

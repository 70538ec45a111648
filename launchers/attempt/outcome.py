"""Decides how an attempt ended: one outcome with its evidence, from the files in its folder and the exits of its ranks.

When one rank fails, others fail after it: their sockets close, their collectives time out. The error text distinguishes
such consequences from causes, and the earliest cause decides.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from launchers.attempt import flight_summary
from launchers.attempt.watchdog import StalledRank, WatchResult
from results.shared_filesystem.passing_errors import names_passing_error
from results.tables.schema import PHASES
from results.text.log_tail import read_tail
from results.text.numbers import format_bytes, name_ranks, plural
from workloads.contract import protocol
from workloads.contract.protocol import RankError, RankResult

EVIDENCE_LIMIT = 2000
"""Maximum number of characters of evidence in a row."""
LEAST_FREE_BYTES = 16 * 2**10
"""A disk with less free space than this counts as full."""
_TAIL_LINES = 12
_STEP_WORDS = {"warmup": "warmup step", "replay": "the replay of step", "step": "step"}

StopReason = Literal["cancelled", "preempted", "abandoned"]
"""Why a pilot stops a running attempt: the user asked for it, the allocation ends, or (``abandoned``) the command that
started the pilot on this machine has gone. ``abandoned`` is recorded with the outcome ``cancelled``."""
_STOPPED: Mapping[StopReason, str] = {
    "cancelled": "stopped by the user",
    "preempted": "the allocation was asked to end",
    "abandoned": "the command that ran the sweep had gone (killed, or its terminal closed): stopped",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How an attempt ended. The columns of the table of attempts have the same names (see `results.tables.schema`)."""

    outcome: str
    """One of ``results.tables.schema.OUTCOMES``."""
    phase: str | None = None
    phase_step: int | None = None
    failed_rank: int | None = None
    evidence: str | None = None
    teardown_hung: bool = False
    infrastructure: bool = False
    """The point did not cause the failure (a full disk, a port in use, a broken link), so another attempt may
    succeed."""


@dataclass(frozen=True, slots=True)
class _Failure:
    """One rank that failed, and was not killed by the agent."""

    rank: int
    kind: str
    phase: str | None
    step: int | None
    message: str
    time: float
    consequence: bool
    """Whether this rank failed because another rank had failed before."""


_CONNECTION = re.compile(
    r"connection (was )?(closed|reset|refused)|broken pipe|socket (closed|timeout)|remote process exited|"
    r"pair is not connected|peer (closed|disconnected)|ncclRemoteError|heartbeat monitor|"
    r"failed to recv, got 0 bytes|no error in the last .* ncclInProgress",
    re.IGNORECASE,
)
_COLLECTIVE_TIMEOUT = re.compile(
    r"watchdog caught collective operation timeout|timed out waiting|collective.{0,80}time.?out|"
    r"operation timed out|time.?out.{0,80}(gloo|nccl|collective|store|barrier)|"
    r"(gloo|nccl|store|barrier).{0,80}time.?out",
    re.IGNORECASE | re.DOTALL,
)
_INFRASTRUCTURE = re.compile(
    r"address already in use|EADDRINUSE|uncorrectable ECC|fallen off the bus|GPU is lost", re.IGNORECASE
)
"""Failures of the machine, in addition to the errors of a file system that pass."""


def classify(
    folder: Path,
    ranks: Sequence[int],
    watched: WatchResult,
    results: Mapping[int, RankResult],
    stop_reason: StopReason | None,
    *,
    measured: bool = True,
) -> Outcome:
    """The outcome of the ``ranks`` of the attempt in ``folder``.

    ``results``: results of the ranks that finished. ``stop_reason``: why the pilot stopped the ranks, if it did.
    ``measured``: all ranks ran together; losses are meaningless where a rank was rehearsed alone. Raises `OSError` when
    files of the ranks cannot be read now.
    """
    if all(rank in results for rank in ranks):
        return _completed(results, watched, measured)
    failures = _failures(folder, ranks, watched, results)
    causes = [failure for failure in failures if not failure.consequence]
    if causes:
        return _from_failure(folder, min(causes, key=lambda failure: failure.time), failures, watched)
    if watched.lost:
        return _lost(watched)
    if failures and watched.end not in ("stopped", "hang"):
        return _only_consequences(ranks, failures, watched, results)
    if watched.end == "hang":
        return _hang(folder, watched)
    if watched.end == "deadline":
        return _timeout(watched)
    return _stopped(watched, stop_reason or "cancelled")


def classify_abandoned(
    ranks: Sequence[int], results: Mapping[int, RankResult], why: str, phase: str | None, step: int | None
) -> Outcome:
    """The outcome of an attempt whose pilot died: ok if every rank had finished, or else a node failure.

    ``why``: what is known of the pilot's end, for the evidence. ``phase`` and ``step``: last known position of the
    ranks.
    """
    if ranks and all(rank in results for rank in ranks):
        return Outcome(outcome="ok", phase="teardown", evidence=f"measured in full, then {why}")
    return Outcome(outcome="node_failure", phase=phase, phase_step=step, evidence=why, infrastructure=True)


def check_target_memory(outcome: Outcome, peak_bytes: int | None, usable_bytes: int | None, cluster: str) -> Outcome:
    """Turns ``ok`` into ``oom`` where a rehearsal needed more memory here than a device of the target cluster has."""
    if outcome.outcome != "ok" or peak_bytes is None or usable_bytes is None or peak_bytes <= usable_bytes:
        return outcome
    return Outcome(
        outcome="oom",
        phase="step",
        evidence=f"rehearsed in full; its peak of {format_bytes(peak_bytes, 2)} is over the "
        f"{format_bytes(usable_bytes, 2)} that a device of cluster {cluster} can give",
        teardown_hung=outcome.teardown_hung,
    )


def log_tail(folder: Path, rank: int, lines: int = _TAIL_LINES) -> str:
    """The last non-empty lines of a rank's output; ``""`` when there are none or the log cannot be read."""
    try:
        tail = read_tail(protocol.log_path(folder, rank), lines, skip_blank=True)
    except OSError:
        return ""
    return "\n".join(line.rstrip() for line in tail.lines)


def _completed(results: Mapping[int, RankResult], watched: WatchResult, measured: bool) -> Outcome:
    bad = [(step.step, rank) for rank, result in results.items() for step in result.steps if _not_finite(step.loss)]
    if bad and measured:
        step, rank = min(bad)
        return Outcome(
            outcome="diverged",
            phase="step",
            phase_step=step,
            failed_rank=rank,
            evidence=f"the loss of step {step} is not a finite number",
        )
    killed = sorted(rank for rank, exit_ in watched.exits.items() if exit_.killed_by_us)
    if killed:
        evidence = f"measured in full; {name_ranks(killed)} did not end and had to be killed"
        return Outcome(outcome="ok", phase="teardown", failed_rank=killed[0], evidence=evidence, teardown_hung=True)
    broken = [str(exit_) for exit_ in watched.exits.values() if exit_.status != 0]
    if broken:
        return Outcome(outcome="ok", phase="teardown", evidence=f"measured in full; then {', '.join(broken)}")
    return Outcome(outcome="ok", phase="done")


def _failures(
    folder: Path, ranks: Sequence[int], watched: WatchResult, results: Mapping[int, RankResult]
) -> list[_Failure]:
    failures: list[_Failure] = []
    for rank in ranks:
        if rank in results:
            continue
        error = _error(folder, rank)
        exit_ = watched.exits.get(rank)
        if error is not None:
            time_ = protocol.error_path(folder, rank).stat().st_mtime
            text = f"{error.message}\n{error.traceback}"
            consequence = error.kind in ("crash", "nccl_error") and _is_consequence(text)
            failures.append(_Failure(rank, error.kind, error.phase, error.step, error.message, time_, consequence))
        elif exit_ is not None and not exit_.killed_by_us:
            heartbeat = watched.heartbeats.get(rank)
            phase, step = (heartbeat.phase, heartbeat.step) if heartbeat is not None else ("spawn", None)
            tail = log_tail(folder, rank)
            # NCCL's own watchdog ends a process with SIGABRT when a collective fails because of another rank.
            consequence = exit_.signal != 9 and _is_consequence(tail)
            failures.append(_Failure(rank, "exit", phase, step, _join(str(exit_), tail), exit_.time, consequence))
    return failures


def disk_trouble(folder: Path) -> str | None:
    """Why even a small file cannot be written to ``folder``, as a phrase that follows the folder's name; None if it
    can."""
    try:
        disk = os.statvfs(folder)
    except (FileNotFoundError, NotADirectoryError):
        return "is not there any more"
    except OSError as error:
        return f"cannot be used ({error.strerror or error})"
    full = disk.f_blocks > 0 and disk.f_bavail * disk.f_frsize < LEAST_FREE_BYTES
    return "is on a full disk" if full else None


def _from_failure(folder: Path, first: _Failure, failures: Sequence[_Failure], watched: WatchResult) -> Outcome:
    others = [failure for failure in failures if failure.rank != first.rank]
    also = f" (then {name_ranks([failure.rank for failure in others])} failed too)" if others else ""
    place = where(first.phase, first.step)
    outcome = {"oom": "oom", "nccl_error": "nccl_error", "diverged": "diverged"}.get(first.kind, "crash")
    infrastructure = outcome in ("crash", "nccl_error") and _is_infrastructure(first.message)
    trouble = disk_trouble(folder) if first.kind == "exit" else None
    unwritten = first.kind == "exit" and (
        trouble is not None or watched.exits[first.rank].status == protocol.CANNOT_WRITE
    )
    if first.kind == "exit" and watched.exits[first.rank].signal == 9 and watched.host_oom_kills:
        outcome = "oom"
        evidence = (
            f"rank {first.rank} killed by SIGKILL {place}{also}: host memory ran out, which the kernel counted "
            f"{plural(watched.host_oom_kills, 'time')} in this control group"
        )
    elif unwritten:
        infrastructure = True
        evidence = f"rank {first.rank} {place}{also} could not write its files: {folder} {trouble or 'refused them'}"
    elif first.kind == "exit":
        headline, _, tail = first.message.partition("\n")
        evidence = _join(f"{headline} {place}{also}", tail)
    else:
        label = "unsupported: " if first.kind == "unsupported" else ""
        evidence = f"rank {first.rank} {place}{also}: {label}{first.message}"
    return Outcome(
        outcome=outcome,
        phase=first.phase,
        phase_step=first.step,
        failed_rank=first.rank,
        evidence=_cut(evidence),
        infrastructure=infrastructure or outcome == "nccl_error",
    )


def _only_consequences(
    ranks: Sequence[int],
    failures: Sequence[_Failure],
    watched: WatchResult,
    results: Mapping[int, RankResult],
) -> Outcome:
    """Outcome when every failed rank failed because of another one. If a collective timed out, the cause is a hang of
    the ranks that did not fail."""
    first = min(failures, key=lambda failure: failure.time)
    silent = [rank for rank in ranks if rank not in results and rank not in {failure.rank for failure in failures}]
    if any(_COLLECTIVE_TIMEOUT.search(failure.message) for failure in failures):
        cause = _furthest_behind(watched, silent or [failure.rank for failure in failures])
        evidence = f"a collective timed out on {name_ranks([failure.rank for failure in failures])}"
        if silent:
            evidence += f"; {name_ranks(silent)} did not join it or did not return"
        evidence += f", {_describe(cause)} furthest behind: {first.message}"
        return Outcome(
            outcome="hang",
            phase=cause.phase,
            phase_step=cause.step,
            failed_rank=cause.rank,
            evidence=_cut(evidence),
        )
    return Outcome(
        outcome="nccl_error",
        phase=first.phase,
        phase_step=first.step,
        failed_rank=first.rank,
        evidence=_cut(
            f"{name_ranks([f.rank for f in failures])} lost their connections {where(first.phase, first.step)}; "
            f"no rank failed by itself: {first.message}"
        ),
        infrastructure=True,
    )


def _lost(watched: WatchResult) -> Outcome:
    """Outcome when a node was lost with its ranks. Errors of other ranks are consequences of that."""
    rank, why = min(watched.lost.items())
    heartbeat = watched.heartbeats.get(rank)
    phase, step = (heartbeat.phase, heartbeat.step) if heartbeat is not None else ("spawn", None)
    return Outcome(
        outcome="node_failure",
        phase=phase,
        phase_step=step,
        failed_rank=rank,
        evidence=_cut(f"{why}, with {name_ranks(sorted(watched.lost))}"),
        infrastructure=True,
    )


def _hang(folder: Path, watched: WatchResult) -> Outcome:
    first = watched.stalled[0]
    who = "; ".join(f"{_describe(stalled)} for {stalled.age_s:.0f} s" for stalled in watched.stalled[:4])
    more = f" and {len(watched.stalled) - 4} more ranks" if len(watched.stalled) > 4 else ""
    stack = _innermost_frames(log_tail(folder, first.rank, lines=60))
    evidence = f"no progress: {who}{more}" + (f"; rank {first.rank} in {stack}" if stack else "")
    if collectives := flight_summary.summary(folder, watched.heartbeats):
        evidence += f"; {collectives}"
    return Outcome(
        outcome="hang", phase=first.phase, phase_step=first.step, failed_rank=first.rank, evidence=_cut(evidence)
    )


def _timeout(watched: WatchResult) -> Outcome:
    first = watched.stalled[0]
    evidence = f"still running after {watched.seconds:.0f} s (the deadline); furthest behind: {_describe(first)}"
    evidence += f", last heartbeat {first.age_s:.1f} s old"
    return Outcome(
        outcome="timeout", phase=first.phase, phase_step=first.step, failed_rank=first.rank, evidence=evidence
    )


def _stopped(watched: WatchResult, reason: StopReason) -> Outcome:
    heartbeats = [heartbeat for heartbeat in watched.heartbeats.values() if heartbeat is not None]
    last = max(heartbeats, key=lambda heartbeat: heartbeat.time, default=None)
    return Outcome(
        outcome="preempted" if reason == "preempted" else "cancelled",
        phase=last.phase if last is not None else "spawn",
        phase_step=last.step if last is not None else None,
        evidence=f"{_STOPPED[reason]} after {watched.seconds:.1f} s",
    )


def _furthest_behind(watched: WatchResult, ranks: Sequence[int]) -> StalledRank:
    positions = []
    for rank in ranks:
        heartbeat = watched.heartbeats.get(rank)
        phase, step = (heartbeat.phase, heartbeat.step) if heartbeat is not None else ("spawn", None)
        positions.append(StalledRank(rank=rank, phase=phase, step=step, age_s=0.0))
    return min(
        positions,
        key=lambda stalled: (
            PHASES.index(stalled.phase),
            stalled.step if stalled.step is not None else -1,
            stalled.rank,
        ),
    )


def _is_consequence(text: str) -> bool:
    return bool(_CONNECTION.search(text) or _COLLECTIVE_TIMEOUT.search(text)) and not _is_infrastructure(text)


def _is_infrastructure(text: str) -> bool:
    return bool(_INFRASTRUCTURE.search(text)) or names_passing_error(text)


def _error(folder: Path, rank: int) -> RankError | None:
    try:
        return protocol.read_error(folder, rank)
    except (ValueError, TypeError):
        return None


def _innermost_frames(tail: str, depth: int = 3) -> str:
    """The innermost Python frames of the last thread in `faulthandler`'s output, which is the main thread."""
    frames = re.findall(r'File "(.+?)", line (\d+) in (\S+)', tail.rpartition("most recent call first")[2])
    return " < ".join(f"{function} ({Path(file).name}:{line})" for file, line, function in frames[:depth])


def _describe(stalled: StalledRank) -> str:
    return f"rank {stalled.rank} {where(stalled.phase, stalled.step)}"


def where(phase: str | None, step: int | None) -> str:
    """Position in an attempt as a readable phrase: ``in step 4``, ``in build``."""
    if step is not None and phase in _STEP_WORDS:
        return f"in {_STEP_WORDS[phase]} {step}"
    return f"in {phase or 'an unknown phase'}"


def _not_finite(loss: float | None) -> bool:
    return loss is not None and not math.isfinite(loss)


def _join(headline: str, tail: str) -> str:
    return f"{headline}\n{tail}" if tail else headline


def _cut(text: str) -> str:
    return text if len(text) <= EVIDENCE_LIMIT else text[: EVIDENCE_LIMIT - 1].rstrip() + "…"

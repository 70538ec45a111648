"""Pilots that wait in Slurm's queue with other options than the present command's, or that Slurm will never start.

The options of a job are fixed when it is submitted. So when a command is repeated with other options, waiting pilots
are submitted anew with these options. The new pilots are submitted first: if Slurm refuses them, the old ones keep
their places. Running pilots are left alone. Only the first cycle of a command replaces pilots, so that two commands
with different options do not replace each other's pilots for ever.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from launchers.settings import LaunchSettings, settings_to_dict
from launchers.slurm.batch_file import node_names
from launchers.slurm.client import Job, SlurmClient
from launchers.slurm.options import SlurmOptions
from launchers.slurm.submission_tracker import SubmissionTracker
from launchers.state import node_exclusions, submissions
from launchers.state.sweep_dir import SweepDir
from results.errors import UltrasweepError
from results.text.numbers import plural

_COUNTS = ("max_nodes", "max_pilots", "target_h")
"""Options that set the number of pilots, and change nothing about a single pilot."""
_COMMANDS = ("setup", "prefix", "srun_args")
"""Options that hold commands of the user. Only digests of them are stored."""
_DIGEST = re.compile(r"sha256:[0-9a-f]{16}")
_FOR_LACK_OF_NODES = ("PartitionConfig", "PartitionNodeLimit", "BadConstraints")
"""Reasons for waiting that excluded nodes can cause."""
_MOST_CHANGES, _VALUE_LENGTH = 3, 40


class NeverStarts(UltrasweepError):
    """Pilots wait in Slurm's queue for resources that they will never get."""


def pilot_options(options: SlurmOptions, settings: LaunchSettings) -> dict[str, Any]:
    """All options that affect one pilot, as plain data that a round trip through JSON does not change."""
    chosen = {name: value for name, value in dataclasses.asdict(options).items() if name not in _COUNTS}
    plain: dict[str, Any] = json.loads(json.dumps({**settings_to_dict(settings), **chosen}))
    # Only whether a variable has changed matters, and its value may be a secret. Variables of the cluster's file are
    # also in the settings.
    plain["cluster"].pop("environment", None)
    for name, value in plain["environment"].items():
        plain["environment"][name] = _digest(value)
    return {**plain, **{name: _digests(plain[name]) for name in _COMMANDS}}


def _digests(lines: Sequence[str]) -> list[str]:
    """Digests of the user's own lines of shell, which may hold a secret. Earlier versions stored the lines."""
    return [line if _DIGEST.fullmatch(line) else f"sha256:{_digest(line)}" for line in lines]


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


class WaitingPilots:
    """Finds and replaces waiting pilots on behalf of one command."""

    def __init__(
        self,
        sweep: SweepDir,
        wanted: Mapping[str, Any],
        tracker: SubmissionTracker,
        client: SlurmClient,
        report: Callable[[str], None],
    ) -> None:
        """``wanted``: the `pilot_options` of this command."""
        self._sweep, self._wanted = sweep, wanted
        self._tracker, self._client, self._report = tracker, client, report
        self._why: dict[str, str] | None = None
        """Reason to replace waiting pilots, by token. None before the first cycle."""
        self._waiting: list[Job] = []
        self._tried: set[tuple[str, tuple[str, ...]]] = set()
        """Pairs of token and excluded nodes for which Slurm has already been asked to exclude more nodes."""

    def find_outdated(self, jobs: Sequence[Job]) -> Counter[int]:
        """Find the waiting pilots to replace and return their number by shape. They do not count as existing."""
        waiting = [job for job in jobs if job.waiting]
        if self._why is None:
            differences = {job.token: self._difference(job) for job in waiting}
            self._why = {token: why for token, why in differences.items() if why}
        for job in waiting:
            submission = self._tracker.submission(job.token)
            if job.reason in _FOR_LACK_OF_NODES and submission is not None and submission.excluded:
                self._why[job.token] = f"{job.reason} without the excluded nodes ({', '.join(submission.excluded)})"
        self._waiting = [job for job in waiting if job.token in self._why]
        return self._by_shape(self._waiting)

    def exclude_nodes(self, jobs: Sequence[Job], own: str | None) -> None:
        """Exclude the nodes that were excluded after the submission of waiting pilots from these pilots. ``own``: the
        user's list of nodes never to use."""
        excluded = node_names(list(node_exclusions.excluded(self._sweep)))
        for token in {job.token for job in jobs if job.waiting}:
            submission = self._tracker.submission(token)
            if submission is None or submission.use_excluded or not set(excluded) - set(submission.excluded):
                continue
            # a site may forbid the change: then pilots find out by themselves
            if (token, tuple(excluded)) not in self._tried:
                self._tried.add((token, tuple(excluded)))
                waiting = [job for job in jobs if job.waiting and job.token == token]
                if self._client.exclude(waiting, [*([own] if own else []), *excluded]):
                    self._tracker.change(submission, excluded=excluded)

    def lacks_nodes(self) -> set[int]:
        """Shapes whose waiting pilots never start because nodes are excluded."""
        return {
            nodes
            for job in self._waiting
            if job.reason in _FOR_LACK_OF_NODES and (nodes := self._tracker.shape(job.token)) is not None
        }

    def never_start(self, jobs: Sequence[Job]) -> tuple[Counter[int], dict[int, UltrasweepError]]:
        """Pilots with this command's own options that Slurm will never start: their number and an error, by shape."""
        replaced = {job.name for job in self._waiting}
        stuck = [job for job in jobs if job.never_starts and job.name not in replaced]
        errors: dict[int, UltrasweepError] = {}
        counts = self._by_shape(stuck)
        for nodes, count in counts.items():
            reasons = {job.reason for job in stuck if self._tracker.shape(job.token) == nodes}
            errors[nodes] = NeverStarts(
                f"Slurm will never start {plural(count, 'waiting pilot')} of {plural(nodes, 'node')}: "
                f"{', '.join(sorted(reasons))}. Repeat the command with other launcher options to replace "
                "them, or run python -m sweep cancel"
            )
        return counts, errors

    def cancel_old(self, nodes: int) -> int:
        """Cancel the old waiting pilots of this shape, because new ones have been submitted, none is needed, or there
        is no room for both. Returns the number cancelled."""
        assert self._why is not None
        old = self._of_shape(nodes)
        if not old or not self._client.cancel(old, only_waiting=True):
            return 0
        why = "; ".join(dict.fromkeys(self._why[job.token] for job in old))
        self._report(f"{plural(len(old), 'waiting pilot')} of {plural(nodes, 'node')} replaced: {why}")
        for token in {job.token for job in old}:
            del self._why[token]
        return len(old)

    def keep_old(self, nodes: int) -> None:
        """Keep the old waiting pilots of this shape, because Slurm has refused their replacements."""
        assert self._why is not None
        if old := self._of_shape(nodes):
            keep = "keeps its" if len(old) == 1 else "keep their"
            self._report(f"{plural(len(old), 'waiting pilot')} of {plural(nodes, 'node')} {keep} old options")
            for token in {job.token for job in old}:
                del self._why[token]

    def _of_shape(self, nodes: int) -> list[Job]:
        return [job for job in self._waiting if self._tracker.shape(job.token) == nodes]

    def _by_shape(self, jobs: Sequence[Job]) -> Counter[int]:
        shapes = (self._tracker.shape(job.token) for job in jobs)
        return Counter(nodes for nodes in shapes if nodes is not None)

    def _difference(self, job: Job) -> str:
        """Differences between this command's options and those of the job; empty if equal, or if the job's are
        unknown."""
        submission = self._tracker.submission(job.token)
        if submission is None:
            return ""
        if submissions.origin(self._sweep, submission) == "moved":
            return f"this folder was {submission.folder} when they were submitted"
        if not submission.options:  # options of an earlier version, or a damaged file
            return f"Slurm will never start them: {job.reason}" if job.never_starts else ""
        before = {**submission.options}
        before |= {name: _digests(before[name]) for name in _COMMANDS if isinstance(before.get(name), list)}
        names = sorted({*before, *self._wanted})
        changed = [name for name in names if before.get(name) != self._wanted.get(name)]
        changes = [_change(name, before.get(name), self._wanted.get(name)) for name in changed[:_MOST_CHANGES]]
        changes += [f"{len(changed) - _MOST_CHANGES} more"] if len(changed) > _MOST_CHANGES else []
        return ", ".join(changes)


def _change(name: str, before: object, after: object) -> str:
    if name in _COMMANDS:
        return f"{name} has changed"
    texts = [json.dumps(value) for value in (before, after)]
    if isinstance(after, dict) or any(len(text) > _VALUE_LENGTH for text in texts):
        return f"{name} has changed"
    return f"{name} was {texts[0]} and is {texts[1]}"

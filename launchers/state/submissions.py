"""Slurm submissions of a sweep: one file for each, written before sbatch is called.

    submissions/<token>.json    shape, count and time limit; the job's id as soon as sbatch has printed it
    submissions/cancelled.json  when ``cancel`` was last used: every watching command then stops submitting

The token is in the job's comment and at the end of its name. So a job is found again even when its submitter was killed
before writing down the id. Ids alone prove nothing: a cluster that loses its state reuses them.

The token ends with a mark of the folder, and the file names that folder, because folders are copied and moved. The jobs
of a copied folder belong to the original: the copy neither counts nor cancels them. The jobs of a moved folder still
belong to it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import os
import re
import secrets
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launchers.state.pilot_state import config_path
from launchers.state.sweep_dir import SweepDir
from launchers.state.typed_paths import absolute_path
from results.errors import InvalidResults
from results.shared_filesystem.lease import filesystem_time
from results.shared_filesystem.patience import may_pass, patiently
from results.shared_filesystem.whole_files import read_text
from results.text.numbers import plural
from workloads.contract.protocol import read_json, write_json
from workloads.contract.typed import typed

Stage = Literal["intent", "unsure", "submitted", "ended", "failed"]
"""``intent``: sbatch may be running, or its caller was killed. ``unsure``: sbatch ended without a clear answer.
``submitted``: the job is known. ``ended``: none of its pilots is left. ``failed``: there is no such job."""
OPEN: tuple[Stage, ...] = ("intent", "unsure", "submitted")

TOKEN = re.compile(r"slurm-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}(-[0-9a-f]{8})?")
"""Time, a random number, and the mark of the sweep's folder, which tokens of earlier versions lack."""
Origin = Literal["here", "moved", "copied"]
"""Which folder made a submission. ``here``: this one. ``moved``: this one, under another path. ``copied``: another
folder, of which this one is a copy."""
_NAME_LENGTH = 40
_READ_LIMIT_S = 20.0
"""Seconds to wait for a filesystem on which a file cannot be read now: one failed read proves neither damage nor a
cancel."""


_RANGES = {"nodes": (1, 10**6), "count": (1, 4_000_001), "uid": (0, 2**32 - 1)}
"""Smallest and largest value of a submission's numbers. Slurm's arrays have at most 4,000,001 elements."""
_LATEST_S = 86_400.0
"""Seconds. A time that lies further in the future comes from a damaged file, because clocks of two machines differ by
less."""
DAMAGED = "its file is damaged"
"""Beginning of `Submission.message` where the file cannot be read."""


class FilesUnreadable(InvalidResults):
    """The records of submissions cannot be read now, but may be later: the filesystem fails."""


@dataclass(frozen=True, slots=True)
class _Cancelled:
    """Content of ``cancelled.json``."""

    at: float = 0.0
    id: str = ""
    tokens: tuple[str, ...] | None = None
    """Submissions that existed at the time of the cancel; None in files of version 0.3.0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One call of sbatch: a single job or an array of equal jobs. Each job is one pilot."""

    token: str
    job_name: str
    nodes: int
    """Nodes of each pilot."""
    count: int
    """Number of pilots: the elements of the job array, or 1."""
    time_min: int
    """Time limit of each pilot, in minutes."""
    created_at: float
    """Seconds since the epoch, like ``ended_at``."""
    uid: int
    """Id of the user who submitted it."""
    stage: Stage = "intent"
    job_id: str | None = None
    """Slurm's id of the array, or of the single job."""
    ended_at: float | None = None
    message: str = ""
    """Slurm's message about its end, for people."""
    folder: str = ""
    """Absolute path of the sweep's folder at submission; empty if unknown."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Launcher options given to its pilots; empty if unknown."""
    excluded: Sequence[str] = ()
    """Nodes excluded by the sweep that its waiting pilots do not get."""
    use_excluded: bool = False
    """Whether its pilots may use the nodes that the sweep excludes."""
    cluster: str | None = None
    """The cluster named by ``SLURM_CLUSTERS``; empty: Slurm's default cluster; None: unknown."""

    @property
    def open(self) -> bool:
        """Whether some of its pilots may still come or run."""
        return self.stage in OPEN


def new_submission(
    sweep: SweepDir,
    *,
    nodes: int,
    count: int,
    time_min: int,
    options: Mapping[str, Any] | None = None,
    excluded: Sequence[str] = (),
    use_excluded: bool = False,
    cluster: str | None = None,
) -> Submission:
    """A submission in the stage ``intent`` with a new token; no file is written yet."""
    folder = str(absolute_path(sweep.path))
    token = f"slurm-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}-{_mark(folder)}"
    name = re.sub(r"[^A-Za-z0-9_-]+", "-", sweep.name).strip("-")[:_NAME_LENGTH] or "sweep"
    return Submission(
        token=token,
        job_name=f"{name}.{token}",
        nodes=nodes,
        count=count,
        time_min=time_min,
        created_at=time.time(),
        uid=os.getuid(),
        folder=folder,
        options=dict(options or {}),
        excluded=tuple(excluded),
        use_excluded=use_excluded,
        cluster=cluster,
    )


def token_in(text: str) -> str | None:
    """The token at the end of ``text``, a job's name or comment; None for a job of another program."""
    token = re.split(r"[.:]", text)[-1]
    return token if TOKEN.fullmatch(token) else None


def token_of_pilot(pilot_id: str) -> str | None:
    """The submission to which a pilot belongs (``<token>.<index>.<restarts>``); None for a local pilot."""
    return token_in(pilot_id.split(".", 1)[0])


def index_of_pilot(pilot_id: str) -> int | None:
    """The pilot's index in its job array; None for a local pilot."""
    parts = pilot_id.split(".")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None


def restarted_pilot_id(pilot_id: str) -> str:
    """The id of the pilot that the same job runs after a restart by Slurm."""
    job, _, restarts = pilot_id.rpartition(".")
    return f"{job}.{int(restarts) + 1}"


def write(sweep: SweepDir, submission: Submission) -> None:
    """Write or replace the submission's file. Raises `OSError`."""
    folder = _folder(sweep)
    folder.mkdir(exist_ok=True)
    write_json(folder / f"{submission.token}.json", submission)


def update(sweep: SweepDir, submission: Submission, **fields: Any) -> Submission:
    """Write ``submission`` with the given ``fields`` changed, and return the changed one. Raises `OSError`."""
    changed = dataclasses.replace(submission, **fields)
    write(sweep, changed)
    return changed


def all_submissions(sweep: SweepDir) -> list[Submission]:
    """Every submission made by this folder, oldest first. Files copied from another folder are left out.

    A damaged file is read as an ``intent``: its name is enough to find the job. Raises `InvalidResults` when the folder
    cannot be read.
    """
    return [one for one in _everything(sweep) if origin(sweep, one) != "copied"]


def cluster_of(sweep: SweepDir, *, only_open: bool = False) -> str | None:
    """The cluster of the newest submission (see `Submission.cluster`) that is open and not cancelled. If there is none,
    the cluster of the newest of all, or None with ``only_open``. None also without submissions. Raises as
    `all_submissions`."""
    everything = all_submissions(sweep)
    cancelled = cancelled_among(sweep, everything)
    still_open = [one for one in everything if one.open and one.token not in cancelled]
    candidates = still_open if still_open or only_open else everything
    known = [one for one in candidates if one.cluster is not None]  # a damaged file does not say its cluster
    return known[-1].cluster if known else None


def copied_from(sweep: SweepDir) -> str | None:
    """The folder from which this one was copied, according to submissions that are still open; None if no open
    submission is a copy. Raises as `all_submissions`."""
    copied = [one for one in _everything(sweep) if one.open and origin(sweep, one) == "copied"]
    return (copied[-1].folder or "another folder") if copied else None


def origin(sweep: SweepDir, submission: Submission) -> Origin:
    """Which folder made the submission. A doubtful one counts as a copy, so that nothing is cancelled by mistake."""
    here = (str(absolute_path(sweep.path)), str(sweep.path.resolve()))
    if not submission.folder:  # a damaged file, or one of an earlier version
        token = TOKEN.fullmatch(submission.token)
        return "here" if token is None or token[1] in (None, *(f"-{_mark(folder)}" for folder in here)) else "copied"
    if submission.folder in here:
        return "here"
    try:
        if Path(submission.folder).samefile(sweep.path):
            return "here"
        (Path(submission.folder) / "submissions" / f"{submission.token}.json").stat()
    except (FileNotFoundError, NotADirectoryError):
        return "moved"
    except OSError:
        return "copied"
    return "copied"


def log_dir(sweep: Path, token: str) -> Path:
    """Subfolder of the sweep for a submission's batch file and its pilots' output."""
    return absolute_path(sweep) / "slurm" / token


def discard(sweep: SweepDir, submission: Submission) -> None:
    """Remove all files of a submission that Slurm has refused. Files that cannot be removed stay."""
    shutil.rmtree(log_dir(sweep.path, submission.token), ignore_errors=True)
    for path in (config_path(sweep, submission.token), _folder(sweep) / f"{submission.token}.json"):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def mark_cancelled(sweep: SweepDir) -> None:
    """Tell every command that watches the sweep to submit no more pilots."""
    _folder(sweep).mkdir(exist_ok=True)
    # Store tokens, not only a time: the clocks of two login nodes differ.
    tokens = sorted(one.token for one in all_submissions(sweep))
    write_json(_folder(sweep) / "cancelled.json", {"id": secrets.token_hex(8), "at": time.time(), "tokens": tokens})


def cancel_mark(sweep: SweepDir) -> str | None:
    """Text that changes with every `mark_cancelled`; None before the first. Raises `InvalidResults` when the file
    cannot be read."""
    path = _folder(sweep) / "cancelled.json"
    try:
        return patiently(lambda: read_text(path), limit_s=_READ_LIMIT_S)
    except FileNotFoundError:
        return None
    except ValueError as error:
        return str(error)
    except OSError as error:
        raise _unreadable(path, error) from None


def cancelled_among(sweep: SweepDir, everything: Sequence[Submission]) -> set[str]:
    """Tokens of the submissions that existed at the last `mark_cancelled`. Raises as `cancel_mark`."""
    try:
        mark = typed(_Cancelled, json.loads(cancel_mark(sweep) or "{}"))
    except (ValueError, RecursionError):
        return set()
    if mark.tokens is not None:
        return {one.token for one in everything if one.token in mark.tokens}
    at = mark.at if mark.at < time.time() + _LATEST_S else 0.0  # version 0.3.0 stored the time alone
    return {one.token for one in everything if one.created_at < at}


def intent_age_s(sweep: SweepDir, submission: Submission) -> float:
    """Seconds since a submission in the stage ``intent`` was written, by the clock of the file system. 0 if its file
    cannot be read now."""
    try:
        written_at = (_folder(sweep) / f"{submission.token}.json").stat().st_mtime
        return max(0.0, filesystem_time(_folder(sweep)) - written_at)
    except OSError:
        return 0.0


def damage(submissions: Iterable[Submission]) -> str:
    """One line about submissions whose files cannot be read; empty when there are none."""
    damaged = [one for one in submissions if one.message.startswith(DAMAGED)]
    if not damaged:
        return ""
    others = f", and {len(damaged) - 1} more" if len(damaged) > 1 else ""
    return (
        f"{plural(len(damaged), 'record')} of submissions cannot be read (submissions/{damaged[0].token}.json: "
        f"{damaged[0].message.removeprefix(f'{DAMAGED}: ')}{others}); their jobs are found by their names"
    )


def lease_path(sweep: SweepDir) -> Path:
    """The lock (see `results.shared_filesystem.lease`) of the one process that may submit for this sweep."""
    _folder(sweep).mkdir(exist_ok=True)
    return _folder(sweep) / ".submitter"


def _folder(sweep: SweepDir) -> Path:
    return sweep.path / "submissions"


def _everything(sweep: SweepDir) -> list[Submission]:
    folder = _folder(sweep)
    try:
        paths = patiently(lambda: sorted(folder.iterdir()), limit_s=_READ_LIMIT_S)
        read = [_read(path) for path in paths if path.suffix == ".json" and TOKEN.fullmatch(path.stem)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(folder, error) from None
    submissions = [one for one in read if one is not None]
    return sorted(submissions, key=lambda one: (one.created_at, one.token))


def _unreadable(path: Path, error: OSError) -> InvalidResults:
    kind = FilesUnreadable if may_pass(error) else InvalidResults
    return kind(f"{path} cannot be read: {error.strerror or error}")


def _mark(folder: str) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]


def _read(path: Path) -> Submission | None:
    """The submission in a file; None when the file has just been removed. Raises `OSError` when even the file's
    metadata cannot be read."""
    try:
        submission = typed(Submission, patiently(lambda: read_json(path), limit_s=_READ_LIMIT_S))
        if submission.token != path.stem:
            raise ValueError("its token is not the file's name")
        for name, (least, most) in _RANGES.items():
            if not least <= (value := getattr(submission, name)) <= most:
                raise ValueError(f"{name}={value} is not between {least} and {most:,}")
        if "\0" in submission.folder:
            raise ValueError("its folder is not a path")
        return submission
    except (OSError, ValueError) as error:
        why = str(error)
    try:
        stat = patiently(path.lstat, limit_s=_READ_LIMIT_S)
    except FileNotFoundError:
        return None
    return Submission(
        token=path.stem,
        job_name=path.stem,
        nodes=1,
        count=1,
        time_min=1,
        created_at=stat.st_mtime,
        uid=stat.st_uid,
        message=f"{DAMAGED}: {why}",
    )

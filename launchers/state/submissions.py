"""What has been submitted to Slurm for a sweep: one file for each submission, written before sbatch is called.

    submissions/<token>.json    shape, count and time limit; the job's id as soon as sbatch has printed it
    submissions/cancelled.json  when ``cancel`` was last used: every watching command then stops submitting

The token is in the job's comment and at the end of its name. So a job is found again also when its submitter was
killed before it could write down the id. Ids alone prove nothing: a cluster that loses its state uses them again.

The token ends with a mark of the folder, and the file names that folder, because folders are copied and moved. The jobs
of a copied folder belong to the original: the copy neither counts nor cancels them. The jobs of a folder that was moved
belong to it as before.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from launchers.state.pilot_state import config_path
from launchers.state.sweep_dir import SweepDir
from results.errors import InvalidResults
from results.shared_filesystem.patience import patiently
from workloads.contract.protocol import write_json

Stage = Literal["intent", "unsure", "submitted", "ended", "failed"]
"""``intent``: sbatch may be running, or its caller was killed. ``unsure``: sbatch has ended without a clear answer.
``submitted``: the job is known. ``ended``: none of its pilots is left. ``failed``: there is no such job."""
OPEN: tuple[Stage, ...] = ("intent", "unsure", "submitted")

TOKEN = re.compile(r"slurm-[0-9]{8}-[0-9]{6}-[0-9a-f]{6}(-[0-9a-f]{8})?")
"""Time, a random number, and the mark of the sweep's folder, which tokens of earlier versions lack."""
Origin = Literal["here", "moved", "copied"]
"""Of a submission: this folder made it; this folder did, when it had another path; another folder did, of which this
one is a copy."""
_NAME_LENGTH = 40
_READ_LIMIT_S = 20.0
"""How long to wait for a filesystem on which a file cannot be read now: one failed read is no damage and no cancel."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """One call of sbatch: a job, or an array of equal jobs, each of which is one pilot."""

    token: str
    job_name: str
    nodes: int
    """Nodes of each pilot."""
    count: int
    """Number of pilots: the elements of the job array, or 1."""
    time_min: int
    """Time limit of each pilot, in minutes."""
    created_at: float
    """Seconds since the epoch, as ``ended_at``."""
    uid: int
    """Id of the user who submitted it."""
    stage: Stage = "intent"
    job_id: str | None = None
    """Slurm's id of the array, or of the single job."""
    ended_at: float | None = None
    message: str = ""
    """What Slurm said about its end, for people."""
    folder: str = ""
    """The sweep's folder at the time, absolute; empty where that is not known."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """The launcher's options that its pilots were given; empty where they are not known."""
    excluded: Sequence[str] = ()
    """Nodes of the sweep's exclusions that its pilots that wait do not get."""
    use_excluded: bool = False
    """Its pilots may use the nodes that the sweep excludes."""
    cluster: str | None = None
    """The one cluster that ``SLURM_CLUSTERS`` named; empty: the one that Slurm takes by itself; None: not known."""

    @property
    def open(self) -> bool:
        """Whether pilots of it may still come or run."""
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
    """A submission in the stage ``intent`` with a new token; nothing is written yet."""
    folder = _resolved(sweep)
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
    """The token at the end of ``text``, a job's name or comment; None for a job that is not ours."""
    token = re.split(r"[.:]", text)[-1]
    return token if TOKEN.fullmatch(token) else None


def token_of_pilot(pilot_id: str) -> str | None:
    """The submission that a pilot belongs to (``<token>.<index>.<restarts>``); None for a local pilot."""
    return token_in(pilot_id.split(".", 1)[0])


def index_of_pilot(pilot_id: str) -> int | None:
    """The pilot's index in its job array; None for a local pilot."""
    parts = pilot_id.split(".")
    return int(parts[1]) if len(parts) > 1 and parts[1].isdigit() else None


def restarted_pilot_id(pilot_id: str) -> str:
    """The id of the pilot that the same job becomes when Slurm starts it again."""
    job, _, restarts = pilot_id.rpartition(".")
    return f"{job}.{int(restarts) + 1}"


def write(sweep: SweepDir, submission: Submission) -> None:
    """Write or replace the submission's file. Raises `OSError`."""
    folder = _folder(sweep)
    folder.mkdir(exist_ok=True)
    write_json(folder / f"{submission.token}.json", submission)


def update(sweep: SweepDir, submission: Submission, **fields: Any) -> Submission:
    """Write ``submission`` with the given ``fields`` changed, and return it so. Raises `OSError`."""
    changed = dataclasses.replace(submission, **fields)
    write(sweep, changed)
    return changed


def all_submissions(sweep: SweepDir) -> list[Submission]:
    """Every submission of this folder, oldest first; not those that lie in it because it is a copy of another folder.

    A damaged file is read as an ``intent``: its name is enough to find the job. Raises `InvalidResults` when the
    folder cannot be read.
    """
    return [one for one in _everything(sweep) if origin(sweep, one) != "copied"]


def cluster_of(sweep: SweepDir, *, only_open: bool = False) -> str | None:
    """The cluster of the newest submission, as in `Submission.cluster`: of those that are open and not cancelled, or
    else, unless ``only_open``, of the others. None also where there is none. Raises as `all_submissions`."""
    everything, cancelled = all_submissions(sweep), cancelled_at(sweep)
    there = [one for one in everything if one.open and one.created_at >= cancelled]
    chosen = there if there or only_open else everything
    return chosen[-1].cluster if chosen else None


def copied_from(sweep: SweepDir) -> str | None:
    """The folder of which this one is a copy, as far as submissions that are still open tell; None when there are none.
    Raises as `all_submissions`."""
    copied = [one for one in _everything(sweep) if one.open and origin(sweep, one) == "copied"]
    return (copied[-1].folder or "another folder") if copied else None


def origin(sweep: SweepDir, submission: Submission) -> Origin:
    """Whether this folder made the submission. What cannot be found out counts as a copy: then nothing is cancelled."""
    here = _resolved(sweep)
    if not submission.folder:  # a damaged file, or one of an earlier version
        found = TOKEN.fullmatch(submission.token)
        return "here" if found is None or found[1] in (None, f"-{_mark(here)}") else "copied"
    if submission.folder == here:
        return "here"
    try:
        if Path(submission.folder).samefile(here):
            return "here"
        (Path(submission.folder) / "submissions" / f"{submission.token}.json").stat()
    except (FileNotFoundError, NotADirectoryError):
        return "moved"
    except OSError:
        return "copied"
    return "copied"


def log_dir(sweep: Path, token: str) -> Path:
    """The folder, inside the sweep's, of a submission's batch file and of its pilots' output."""
    return sweep.resolve() / "slurm" / token


def discard(sweep: SweepDir, submission: Submission) -> None:
    """Remove all that was written for a submission that Slurm has refused. What cannot be removed stays."""
    shutil.rmtree(log_dir(sweep.path, submission.token), ignore_errors=True)
    for path in (config_path(sweep, submission.token), _folder(sweep) / f"{submission.token}.json"):
        with contextlib.suppress(OSError):
            path.unlink(missing_ok=True)


def mark_cancelled(sweep: SweepDir) -> None:
    """Tell every command that watches the sweep to submit nothing more."""
    _folder(sweep).mkdir(exist_ok=True)
    write_json(_folder(sweep) / "cancelled.json", {"id": secrets.token_hex(8), "at": time.time()})


def cancel_mark(sweep: SweepDir) -> str | None:
    """Text that is another one after every `mark_cancelled`; None before the first. Raises `InvalidResults` when that
    cannot be read."""
    path = _folder(sweep) / "cancelled.json"
    try:
        return patiently(path.read_text, limit_s=_READ_LIMIT_S)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise InvalidResults(f"{path} cannot be read: {error.strerror or error}") from None


def cancelled_at(sweep: SweepDir) -> float:
    """When `mark_cancelled` was last called, in seconds since the epoch; 0 before the first.

    Raises as `cancel_mark`.
    """
    try:
        return float(json.loads(cancel_mark(sweep) or "{}").get("at", 0.0))
    except (ValueError, TypeError, AttributeError):
        return 0.0


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
        raise InvalidResults(f"{folder} cannot be read: {error.strerror or error}") from None
    found = [one for one in read if one is not None]
    return sorted(found, key=lambda one: (one.created_at, one.token))


def _resolved(sweep: SweepDir) -> str:
    return str(sweep.path.resolve())


def _mark(folder: str) -> str:
    return hashlib.sha256(os.fsencode(folder)).hexdigest()[:8]


def _read(path: Path) -> Submission | None:
    """None when the file has just been removed. Raises `OSError` when nothing is known even of the file."""
    try:
        fields = json.loads(patiently(path.read_text, limit_s=_READ_LIMIT_S))
        submission = Submission(**fields)
        if submission.token == path.stem and submission.count >= 1 and submission.nodes >= 1:
            return submission
    except (OSError, ValueError, TypeError):
        pass
    try:
        stat = patiently(path.stat, limit_s=_READ_LIMIT_S)
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
        message="its file is damaged",
    )

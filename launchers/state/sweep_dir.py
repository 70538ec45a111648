"""The folder of one sweep, and how points are added to its queue.

<results>/<sweep>/sweep.json            what this folder is
                  queue/todo|claimed|done/   one file for each point, in one of the three (see `launchers.state.queue`)
                  queue/points-*.parquet     copies of many points in one file (see `launchers.state.point_index`)
                  queue/broken/         files that hold no point (see `launchers.state.damaged`)
                  queue/history/        one record for each attempt
                  pilots/               config, state and log of every pilot
                  attempts/<id>/        task, results and logs of one attempt
                  checks/<pilot>/       speed of a pilot's nodes at its start
                  stages/  losses/      rehearsed stages and reference losses, shared by points
                  parts/  *.parquet     the tables (see `results.tables.store`)
"""

from __future__ import annotations

import math
import os
import pwd
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from results.errors import InvalidResults, UltrasweepError
from results.shared_filesystem.lease import Lease, acquire
from results.shared_filesystem.patience import patiently, repeated
from results.shared_filesystem.whole_files import create, link_out, temporary_path
from workloads.contract.protocol import Method, read_json, write_json
from workloads.contract.typed import typed
from workloads.spec import experiment as ex
from workloads.spec.experiment import Experiment

FORMAT = 1
_ADDING_STALE_S = 30.0
"""Seconds without a sign of life after which another process may add points instead of this one."""
_ADDING_WAIT_S = 300.0
_CHECK_S = 1.0
"""Seconds after which a process that adds points checks again that no other has taken over."""
_OPEN_LIMIT_S = 20.0
"""Seconds to wait for a filesystem on which a sweep's marker cannot be read now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of the grid that is to be run. Immutable."""

    index: int
    """Number in the expanded sweep: points are claimed in this order."""
    grid: str
    experiment: Experiment
    predicted_peak_bytes: int | None = None
    predicted_step_time_s: float | None = None
    predicted_step_time_low_s: float | None = None
    predicted_step_time_high_s: float | None = None
    """Bounds (with ``predicted_step_time_low_s``) of the middle 90 % of the predicted step time."""
    deadline_s: float
    """Maximum seconds from the start of its processes to their end."""
    method: Method = "measured"
    slow_step_s: float | None = None
    """Step time in seconds above which the layout cannot win: the run ends early, and its row stays."""
    ran_on: tuple[str, ...] = ()
    """Nodes on which this layout ran before; another free node is preferred."""

    @property
    def key(self) -> str:
        """Key that identifies the point: two points with the same key run the same experiment by the same method."""
        return self.experiment.id if self.method == "measured" else f"{self.experiment.id}+{self.method}"

    @property
    def stem(self) -> str:
        """Name of the point's file in the queue."""
        return f"{self.index:06d}-{self.key}"


@dataclass(frozen=True, slots=True)
class SweepDir:
    """The folder of one sweep: creates or opens it, names its parts, and adds points to its queue."""

    path: Path

    @classmethod
    def create(cls, path: Path, settings: Mapping[str, Any]) -> SweepDir:
        """Create the folder of a sweep, or open an existing one; an archived one gets a queue again. ``settings`` are
        stored for people to read.

        Raises `InvalidResults` for a folder with other content or of another user, and where it cannot be written.
        """
        sweep = cls(Path(path))
        try:
            existed = sweep.marker.exists()
            if existed:
                cls.open(path)
            elif sweep.path.exists() and not _is_begun(sweep.path):
                raise InvalidResults(f"{path} exists and is not a sweep (no sweep.json); choose another name or folder")
            if sweep.path.exists():
                _check_owner(sweep.path)
            if not existed:  # first of all, so that a full disk leaves nothing that is no sweep
                sweep.path.mkdir(parents=True, exist_ok=True)
                about = {"format": FORMAT, "name": sweep.name, "created_at": time.time(), "settings": dict(settings)}
                write_json(sweep.marker, about)
            for folder in (sweep.todo, sweep.claimed, sweep.done, sweep.history, sweep.pilots, sweep.attempts):
                folder.mkdir(parents=True, exist_ok=True)
            sweep.stages.mkdir(exist_ok=True)
            sweep.losses.mkdir(exist_ok=True)
        except OSError as error:
            raise InvalidResults(f"cannot make a sweep in {path}: {error.strerror or error}") from None
        return sweep

    @classmethod
    def open(cls, path: Path, *, with_queue: bool = False) -> SweepDir:
        """The sweep in ``path``. Raises `InvalidResults` when there is none, when this version cannot read it, or when
        a caller needs its queue and only the rows are left."""
        sweep = cls(Path(path))
        try:
            about = patiently(lambda: read_json(sweep.marker), limit_s=_OPEN_LIMIT_S)
            patiently(sweep._refuse_links, limit_s=_OPEN_LIMIT_S)
        except (FileNotFoundError, NotADirectoryError):
            raise InvalidResults(f"{path} is not a sweep: it has no sweep.json") from None
        except (OSError, ValueError) as error:
            raise InvalidResults(f"{sweep.marker} cannot be read: {error}") from None
        if not isinstance(about, dict) or about.get("format") != FORMAT:
            raise InvalidResults(f"{sweep.marker} is not of format {FORMAT}, which this version reads")
        if with_queue and sweep.archived:
            raise InvalidResults(
                f"{path} is an archived sweep: it has rows but no queue; status, explain and reports show its rows"
            )
        return sweep

    @property
    def archived(self) -> bool:
        """Whether only the rows are left, as in the sweeps that come with the program."""
        return not self.todo.parent.is_dir()

    @property
    def removed(self) -> bool:
        """Whether the folder of a sweep that had a queue is gone, or is being removed. Raises `OSError`."""
        return not (self.marker.exists() and self.todo.exists())

    @property
    def name(self) -> str:
        return self.path.resolve().name

    @property
    def marker(self) -> Path:
        return self.path / "sweep.json"

    @property
    def todo(self) -> Path:
        return self.path / "queue" / "todo"

    @property
    def claimed(self) -> Path:
        return self.path / "queue" / "claimed"

    @property
    def done(self) -> Path:
        return self.path / "queue" / "done"

    @property
    def history(self) -> Path:
        return self.path / "queue" / "history"

    @property
    def pilots(self) -> Path:
        return self.path / "pilots"

    @property
    def attempts(self) -> Path:
        return self.path / "attempts"

    @property
    def stages(self) -> Path:
        return self.path / "stages"

    @property
    def losses(self) -> Path:
        return self.path / "losses"

    def _refuse_links(self) -> None:
        """Raises `InvalidResults` where a folder of the sweep is a link that leads out of it, and `OSError`."""
        for folder in (self.path, self.todo.parent):
            if (link := link_out(folder, self.path)) is not None:
                raise InvalidResults(
                    f"{link} is a link to {link.resolve()}, outside the sweep, whose files could be changed or shown "
                    "by mistake; move that folder into the sweep"
                )

    def settings(self) -> dict[str, Any]:
        """The settings that `create` was given. Raises `InvalidResults` when the marker is damaged."""
        try:
            return dict(read_json(self.marker)["settings"])
        except (ValueError, TypeError, KeyError):
            raise InvalidResults(f"{self.marker} is damaged: it does not hold a sweep's settings") from None

    def add_points(self, points: Iterable[Point]) -> int:
        """Put the points that are not in the queue yet under ``todo``; return their number.

        Raises `InvalidResults` when another process adds points for minutes.
        """
        from launchers.state.point_index import write_index  # only who adds or claims points needs Arrow

        lock = self.path / "queue" / "adding.lock"
        with acquire(lock, stale_after_s=_ADDING_STALE_S, wait_s=_ADDING_WAIT_S) as lease:
            if lease is None:
                raise InvalidResults(
                    f"another process has been adding points to {self.path} for {_ADDING_WAIT_S:.0f} s; "
                    "try again when it has ended"
                )
            names = [name for folder in (self.todo, self.claimed, self.done) for name in entry_names(folder)]
            known = set(map(key_of, names))
            check = _StillAdding(self.path, lease)
            added: dict[str, dict[str, Any]] = {}
            for point in points:
                if point.key not in known:
                    check()
                    known.add(point.key)
                    added[point.stem] = point_to_dict(point)
            check(now=True)
            # It comes first, so that whoever finds a point's file finds it in the index, too.
            write_index(self.todo.parent, added, {split_name(name)[0] for name in names})
            check(now=True)
            todo = self.todo
            for stem, plain in added.items():
                check()
                write_json(todo / f"{stem}.json", plain)
        return len(added)


class _StillAdding:
    """Checks that no other process has taken the right to add points over. Each check is a call to the file system, so
    that it is made at most once in `_CHECK_S`."""

    def __init__(self, sweep: Path, lease: Lease) -> None:
        self._sweep, self._lease = sweep, lease
        self._checked_at = -math.inf

    def __call__(self, *, now: bool = False) -> None:
        """Raises `InvalidResults` if another process has."""
        if not now and time.monotonic() - self._checked_at < _CHECK_S:
            return
        if not self._lease.held():
            raise InvalidResults(
                f"adding points to {self._sweep} stalled for {_ADDING_STALE_S:.0f} s, and another process "
                "took over; run the same command again"
            )
        self._checked_at = time.monotonic()


def _check_owner(folder: Path) -> None:
    """Raises `InvalidResults` when the folder belongs to another user, who could change what its pilots run. Some file
    systems give every file to one user, so the owner of a new file there counts, too. Raises `OSError`."""
    owner = folder.stat().st_uid
    if owner == os.geteuid():
        return
    probe = temporary_path(folder / "owner")
    try:
        with create(probe) as file:
            if os.fstat(file.fileno()).st_uid == owner:
                return
    finally:
        probe.unlink(missing_ok=True)
    try:
        name = pwd.getpwuid(owner).pw_name
    except KeyError:
        name = f"user {owner}"
    raise InvalidResults(
        f"{folder} belongs to {name}, who could change what your pilots run there; choose another name or results_dir"
    )


def _is_begun(path: Path) -> bool:
    """Whether a folder holds nothing but what an interrupted `SweepDir.create` leaves: empty folders of a sweep, and
    temporary files of its marker."""
    if not path.is_dir():
        return False
    sweep = SweepDir(path)
    parts = {part.name for part in (sweep.todo.parent, sweep.pilots, sweep.attempts, sweep.stages, sweep.losses)}
    with os.scandir(path) as entries:
        return all(
            entry.name.startswith(f".{sweep.marker.name}.")
            or (
                entry.name in parts
                and entry.is_dir(follow_symlinks=False)
                and not any(files for _, _, files in os.walk(entry.path))
            )
            for entry in entries
        )


def entry_names(folder: Path) -> list[str]:
    """Names of the files of points or records in ``folder``, sorted by the points' indices."""

    def names() -> list[str]:
        with os.scandir(folder) as entries:  # distinguishes files from folders without a call for each
            return sorted(e.name for e in entries if e.name.endswith(".json") and e.name[0] != "." and e.is_file())

    return repeated(names)


def split_name(name: str) -> tuple[str, str]:
    """``(stem, suffix)`` of ``stem@suffix.json``. The suffix is a pilot's id under ``claimed``, an outcome under
    ``done``, an attempt's id under ``history`` and empty under ``todo``."""
    stem, _, suffix = name.removesuffix(".json").partition("@")
    return stem, suffix


def key_of(name: str) -> str:
    """`Point.key` of the point whose file has this ``name``."""
    return split_name(name)[0].partition("-")[2]


def point_to_dict(point: Point) -> dict[str, Any]:
    """Plain data, ready for JSON; see `read_point`."""
    plain = {name: getattr(point, name) for name in point.__slots__}
    return {**plain, "experiment": ex.to_dict(point.experiment)}


def read_point(path: Path) -> Point:
    """The point in one of the queue's files. Raises `OSError`, or `InvalidResults` for other content."""
    try:
        fields = read_json(path)
        point = typed(Point, {**fields, "experiment": ex.from_dict(fields["experiment"])})
        if point.index < 0 or point.deadline_s <= 0:
            raise ValueError(f"index={point.index}, deadline_s={point.deadline_s:g}")
        return point
    except (ValueError, TypeError, KeyError, AttributeError, UltrasweepError) as error:
        raise InvalidResults(f"{path} is not a point of a sweep: {error}") from None

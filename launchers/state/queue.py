"""The queue of one sweep on a shared filesystem: no server, no database, no file that two processes write.

Every point is exactly one file, in exactly one of three folders, and moves by one atomic rename:

    todo/<stem>.json --claim_next--> claimed/<stem>@<pilot>.json --finish--> done/<stem>@<outcome>.json
                     <---release----
                     <------------------------requeue------------------------

The stem is the point's index and key (``000007-<key>``). `take_over` renames a dead pilot's claim to another pilot's.
The content of the file never changes. The history of a point is in ``history/<stem>@<attempt>.json``, one record for
each attempt. The record is written before the point moves, so a pilot that takes over a dead pilot's claim knows that
pilot's decision. The taken-over claim repeats it: ``claimed/<stem>@<pilot>@<attempt>.json`` names the attempt that was
recorded under it. So the next pilot to take over the claim knows it too if this pilot dies before the move.

A shared filesystem may do a rename and answer with an error. So every function here checks whether the rename has
happened before it raises an `OSError`. After an `OSError` the whole operation may be repeated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from launchers.state.damaged import read_or_rebuild
from launchers.state.point_index import PointIndex
from launchers.state.sweep_dir import Point, SweepDir, entry_names, key_of, read_point, split_name
from results.errors import InvalidResults
from results.shared_filesystem.patience import repeated
from workloads.spec.experiment import Experiment


@dataclass(frozen=True, slots=True)
class Claim:
    """A point that only one pilot may run."""

    sweep: SweepDir
    stem: str
    pilot_id: str
    point: Point
    recorded: str = ""
    """The attempt that an earlier holder recorded under this claim; empty if there is none."""

    @property
    def path(self) -> Path:
        return self.sweep.claimed / _claimed_name(self.stem, self.pilot_id, self.recorded)

    @property
    def held(self) -> bool:
        """False after another pilot has taken over the claim because it considered this pilot dead."""
        return _is_there(self.path)


class QueueReader:
    """Reads the queue and claims points for one pilot. Points of an index (`launchers.state.point_index`) are read
    together; the file of any other is read once, since it never changes."""

    def __init__(
        self,
        sweep: SweepDir,
        pilot_id: str,
        report: Callable[[str], None],
        experiments: Mapping[str, Experiment] = MappingProxyType({}),
    ) -> None:
        """``report`` is called with one line about every file that holds no point. ``experiments``: those that the
        caller has, by id; they need not be read again."""
        self.sweep = sweep
        self.pilot_id = pilot_id
        self._report = report
        self._points: dict[str, Point] = {}
        self._experiments = experiments
        self._index = PointIndex(sweep.todo.parent)
        self._copies: set[str] = set()
        """Stems of the points that were read from an index."""

    @property
    def files_read(self) -> int:
        """Number of points whose files have been read."""
        return len(self._points)

    def claim_next(self, choose: Callable[[list[Point]], Iterable[Point]]) -> Claim | None:
        """Claim one point. ``choose`` gets the waiting points and returns those that may run now, best first. The first
        point that no other pilot has claimed meanwhile is claimed. None when there is no such point."""
        for point in choose(self.waiting()):
            claim = Claim(self.sweep, point.stem, self.pilot_id, point)
            if _move(self.sweep.todo / f"{point.stem}.json", claim.path):
                return replace(claim, point=self._as_stored(claim)) if claim.stem in self._copies else claim
        return None

    def claimed_by_others(self) -> list[Point]:
        """Points that other pilots have claimed but not finished."""
        names = [name for name in entry_names(self.sweep.claimed) if _split_claim(name)[1] != self.pilot_id]
        return self._read(self.sweep.claimed, names)

    def waiting(self) -> list[Point]:
        """Points under ``todo``, in the order of their indices."""
        return self._read(self.sweep.todo, entry_names(self.sweep.todo))

    def _read(self, folder: Path, names: Iterable[str]) -> list[Point]:
        """The points of the files in a folder, without those that hold no point or are gone."""
        stems = {name: split_name(name)[0] for name in names}
        if not self._points.keys() >= set(stems.values()):
            self._index.refresh()
        points = (self._point(folder / name, stem) for name, stem in stems.items())
        return [point for point in points if point is not None]

    def _point(self, path: Path, stem: str) -> Point | None:
        point = self._points.get(stem)
        if point is None:
            known = self._experiments.get(key_of(stem).partition("+")[0])
            if (fields := self._index.take(stem, known)) is not None and (copy := Point(**fields)).stem == stem:
                point = copy
                self._copies.add(stem)
            else:
                try:
                    point = read_or_rebuild(self.sweep, path, self._report)
                except FileNotFoundError:  # another pilot was faster
                    return None
                if point is None:
                    return None
            self._points[stem] = point
        return point

    def _as_stored(self, claim: Claim) -> Point:
        """The claimed point as its file has it: the copy in an index may be older. A file that cannot be read does not
        matter."""
        try:
            stored = read_point(claim.path)
        except InvalidResults as error:
            self._report(f"{error}; the point is taken from the index")
        except OSError:
            pass
        else:
            if stored.stem == claim.stem:
                return stored
        return claim.point


def name_attempt(claim: Claim, attempt_id: str) -> Claim:
    """Note in the claim's name which attempt is about to be recorded under it: whoever has the claim later, after an
    error or after a death between the record and the move, then only moves the point. Raises `OSError`."""
    named = replace(claim, recorded=attempt_id)
    if named.path != claim.path:
        _move(claim.path, named.path)
    return named


def finish(claim: Claim, outcome: str) -> bool:
    """Move the point to ``done``, with its ``outcome``. False when the claim was no longer this pilot's."""
    return _move(claim.path, claim.sweep.done / f"{claim.stem}@{outcome}.json")


def release(claim: Claim) -> bool:
    """Move the point back to ``todo``, for any pilot. False when the claim was no longer this pilot's."""
    return _move(claim.path, claim.sweep.todo / f"{claim.stem}.json")


def requeue(sweep: SweepDir, name: str) -> bool:
    """Move a finished point back to ``todo``. ``name``: name of its file under ``done``. False when the file has
    gone."""
    stem, _ = split_name(name)
    return _move(sweep.done / name, sweep.todo / f"{stem}.json")


def claims_of_others(sweep: SweepDir, pilot_id: str) -> list[tuple[str, str]]:
    """Every claim of other pilots, as ``(stem of the point, id of the pilot)``."""
    claims = (_split_claim(name) for name in entry_names(sweep.claimed))
    return [(stem, holder) for stem, holder, _ in claims if holder != pilot_id]


def claims_of(sweep: SweepDir, pilot_id: str, report: Callable[[str], None]) -> list[Claim]:
    """Every claim of one pilot. ``report`` as in `QueueReader`."""
    claims = []
    for name in entry_names(sweep.claimed):
        stem, holder, recorded = _split_claim(name)
        if holder == pilot_id:
            point = read_or_rebuild(sweep, sweep.claimed / name, report)
            if point is not None:
                claims.append(Claim(sweep, stem, pilot_id, point, recorded))
    return claims


def claimed_point(sweep: SweepDir, stem: str, holder: str, report: Callable[[str], None]) -> Point | None:
    """The point that ``holder`` has claimed; None without such a claim. ``report`` as in `QueueReader`."""
    for name in _names_of(sweep, stem, holder):
        try:
            return read_or_rebuild(sweep, sweep.claimed / name, report)
        except FileNotFoundError:
            return None
    return None


def take_over(
    sweep: SweepDir,
    stem: str,
    holder: str,
    pilot_id: str,
    recorded: str = "",
    report: Callable[[str], None] = lambda line: None,
) -> Claim | None:
    """Give the claim of the dead pilot ``holder`` to ``pilot_id``. None when another pilot was faster, or when the file
    holds no point (see `read_or_rebuild`).

    ``recorded``: the attempt that the holder has recorded under its claim, if any. An attempt that the claim already
    names stays. ``report`` as in `QueueReader`.
    """
    for name in _names_of(sweep, stem, holder):
        claimed = sweep.claimed / name
        try:
            point = read_or_rebuild(sweep, claimed, report)
        except FileNotFoundError:
            return None
        if point is None:
            return None
        claim = Claim(sweep, stem, pilot_id, point, _split_claim(name)[2] or recorded)
        return claim if _move(claimed, claim.path) else None
    return None


def _names_of(sweep: SweepDir, stem: str, holder: str) -> list[str]:
    """Names of files under ``claimed`` for a point and its holder: one or none."""
    return [name for name in entry_names(sweep.claimed) if _split_claim(name)[:2] == (stem, holder)]


def _claimed_name(stem: str, pilot_id: str, recorded: str) -> str:
    return f"{stem}@{pilot_id}@{recorded}.json" if recorded else f"{stem}@{pilot_id}.json"


def _split_claim(name: str) -> tuple[str, str, str]:
    """Stem, pilot and recorded attempt in a file name under ``claimed``."""
    stem, suffix = split_name(name)
    pilot_id, _, recorded = suffix.partition("@")
    return stem, pilot_id, recorded


def _move(source: Path, target: Path) -> bool:
    """Rename; False when ``source`` no longer exists.

    Over NFS a successful rename may return an error, or be sent twice and then report a missing source. A claim
    contains its pilot's name, so an existing target was moved by this pilot. For other targets, a source that is
    missing after an error was moved by this pilot, or by one that took the claim over; in both cases it must not be
    moved again. Raises `OSError` when the file was not moved.
    """
    claiming = target.parent.name == "claimed"
    failed = False

    def move() -> bool:
        nonlocal failed
        try:
            source.rename(target)
        except FileNotFoundError:
            return _is_there(target) if claiming else failed
        except OSError:
            failed = True
            if _is_there(source):
                raise
            return not claiming or _is_there(target)
        return True

    return repeated(move)


def _is_there(path: Path) -> bool:
    """Whether the file exists. Raises `OSError` when that cannot be seen now."""
    try:
        repeated(path.stat)
    except FileNotFoundError:
        return False
    return True

"""The queue of one sweep on a shared filesystem: no server, no database, no file that two processes write.

Every point is exactly one file, in exactly one of three folders, and moves by one atomic rename:

    todo/<stem>.json --claim_next--> claimed/<stem>@<pilot>.json --finish--> done/<stem>@<outcome>.json
                     <---release----
                     <------------------------requeue------------------------

The stem is the point's index and key (``000007-<key>``). `take_over` renames a dead pilot's claim to another pilot's.
The content of the file never changes. What happened to a point stands in ``history/<stem>@<attempt>.json``, one record
for each attempt. It is written before the point moves, so that whoever takes over the claim of a dead pilot knows what
that pilot had decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from launchers.state.sweep_dir import Point, SweepDir, entry_names, read_point, split_name
from results.errors import InvalidResults


@dataclass(frozen=True, slots=True)
class Claim:
    """A point that only one pilot may run."""

    sweep: SweepDir
    stem: str
    pilot_id: str
    point: Point

    @property
    def path(self) -> Path:
        return self.sweep.claimed / f"{self.stem}@{self.pilot_id}.json"

    @property
    def held(self) -> bool:
        """False after another pilot has taken over the claim because it took this one for dead."""
        return self.path.exists()


class QueueReader:
    """Reads the queue and claims points for one pilot. Each point's file is read once, since it never changes."""

    def __init__(self, sweep: SweepDir, pilot_id: str, report: Callable[[str], None]) -> None:
        """``report`` is called with one line about every file that holds no point."""
        self.sweep = sweep
        self.pilot_id = pilot_id
        self._report = report
        self._points: dict[str, Point] = {}

    def claim_next(self, choose: Callable[[list[Point]], Iterable[Point]]) -> Claim | None:
        """Claim one point. ``choose`` gets the waiting points and returns those that may run now, best first; the first
        that no other pilot has claimed meanwhile is taken. None when there is no such point."""
        for point in choose(self.waiting()):
            claim = Claim(self.sweep, point.stem, self.pilot_id, point)
            if _move(self.sweep.todo / f"{point.stem}.json", claim.path):
                return claim
        return None

    def claimed_by_others(self) -> list[Point]:
        """Points that other pilots have claimed and not finished."""
        names = ((name, *split_name(name)) for name in entry_names(self.sweep.claimed))
        points = [self._read(name, stem, self.sweep.claimed) for name, stem, pilot in names if pilot != self.pilot_id]
        return [point for point in points if point is not None]

    def waiting(self) -> list[Point]:
        """Points under ``todo``, in the order of their indices."""
        points = [self._read(name, split_name(name)[0]) for name in entry_names(self.sweep.todo)]
        return [point for point in points if point is not None]

    def _read(self, name: str, stem: str, folder: Path | None = None) -> Point | None:
        if stem not in self._points:
            path = (folder or self.sweep.todo) / name
            try:
                self._points[stem] = read_point(path)
            except FileNotFoundError:  # another pilot was faster
                return None
            except InvalidResults as error:
                self._report(f"{error}; moved to {_set_aside(self.sweep, path)}")
                return None
        return self._points[stem]


def finish(claim: Claim, outcome: str) -> bool:
    """Move the point to ``done``, with its ``outcome``. False when the claim was no longer ours."""
    return _move(claim.path, claim.sweep.done / f"{claim.stem}@{outcome}.json")


def release(claim: Claim) -> bool:
    """Move the point back to ``todo``, for any pilot. False when the claim was no longer ours."""
    return _move(claim.path, claim.sweep.todo / f"{claim.stem}.json")


def requeue(sweep: SweepDir, name: str) -> bool:
    """Move a finished point back to ``todo``; ``name`` is its file's name under ``done``. False when it has gone."""
    stem, _ = split_name(name)
    return _move(sweep.done / name, sweep.todo / f"{stem}.json")


def claims_of_others(sweep: SweepDir, pilot_id: str) -> list[tuple[str, str]]:
    """Every claim of another pilot, as ``(stem of the point, id of that pilot)``."""
    pairs = (split_name(name) for name in entry_names(sweep.claimed))
    return [(stem, holder) for stem, holder in pairs if holder != pilot_id]


def take_over(sweep: SweepDir, stem: str, holder: str, pilot_id: str) -> Claim | None:
    """Give the claim of the dead pilot ``holder`` to ``pilot_id``. None when another pilot was faster, or when the file
    holds no point; then it is moved to ``broken``."""
    claimed = sweep.claimed / (f"{stem}@{holder}.json" if holder else f"{stem}.json")
    try:
        claim = Claim(sweep, stem, pilot_id, read_point(claimed))
    except FileNotFoundError:
        return None
    except InvalidResults:
        _set_aside(sweep, claimed)
        return None
    return claim if _move(claimed, claim.path) else None


def _set_aside(sweep: SweepDir, path: Path) -> Path:
    """Move a file that holds no point to the folder ``broken``, which is returned."""
    broken = sweep.path / "queue" / "broken"
    broken.mkdir(exist_ok=True)
    _move(path, broken / path.name)
    return broken


def _move(source: Path, target: Path) -> bool:
    """Rename; False when ``source`` is not there any more.

    Over NFS a rename can be sent twice and then report a missing source although it was done. So a target that is
    there, with our own pilot's name in it, counts as moved by us.
    """
    try:
        source.rename(target)
    except FileNotFoundError:
        return source.parent.name == "todo" and target.exists()
    return True

"""The queue of one sweep on a shared filesystem: no server, no database, no file that two processes write.

Every point is exactly one file, in exactly one of three folders, and moves by one atomic rename:

    todo/000007-<key>.json --claim--> claimed/000007-<key>@<pilot>.json --finish--> done/000007-<key>@<outcome>.json
                          <-------------------- hand back -----------------        <------- retry -------

The file's content never changes. What happened to a point is told by ``history/<stem>@<attempt>.json``, one record
an attempt, written before the point moves: whoever finds a claim of a dead pilot can tell what it had decided.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from launchers.state.sweep_dir import Point, SweepDir, entry_names, read_point, split_name
from results.errors import InvalidResults


@dataclass(frozen=True, slots=True)
class Claim:
    """A point that one pilot has to itself."""

    sweep: SweepDir
    stem: str
    pilot_id: str
    point: Point

    @property
    def path(self) -> Path:
        return self.sweep.claimed / f"{self.stem}@{self.pilot_id}.json"

    @property
    def held(self) -> bool:
        """False after another pilot has taken the claim over, thinking this one dead."""
        return self.path.exists()


class QueueReader:
    """Draws points for one pilot. Remembers the points it has read, since their files never change."""

    def __init__(self, sweep: SweepDir, pilot_id: str, report: Callable[[str], None]) -> None:
        self.sweep = sweep
        self.pilot_id = pilot_id
        self._report = report
        self._points: dict[str, Point] = {}

    def claim_next(self, choose: Callable[[list[Point]], Iterable[Point]]) -> Claim | None:
        """Claim the first point of those that ``choose`` makes of the waiting ones; None when there is none left."""
        for point in choose(self.waiting()):
            claim = Claim(self.sweep, point.stem, self.pilot_id, point)
            if _move(self.sweep.todo / f"{point.stem}.json", claim.path):
                return claim
        return None

    def claimed_by_others(self) -> list[Point]:
        """Points that other pilots hold now."""
        names = ((name, *split_name(name)) for name in entry_names(self.sweep.claimed))
        points = [self._read(name, stem, self.sweep.claimed) for name, stem, pilot in names if pilot != self.pilot_id]
        return [point for point in points if point is not None]

    def waiting(self) -> list[Point]:
        """Points under ``todo``, in the order in which they are drawn."""
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
    """The point has its last row. False when the claim was no longer ours."""
    return _move(claim.path, claim.sweep.done / f"{claim.stem}@{outcome}.json")


def release(claim: Claim) -> bool:
    """The point waits again, for any pilot. False when the claim was no longer ours."""
    return _move(claim.path, claim.sweep.todo / f"{claim.stem}.json")


def requeue(sweep: SweepDir, name: str) -> bool:
    """Move a finished point, by its file's name under ``done``, to ``todo``."""
    stem, _ = split_name(name)
    return _move(sweep.done / name, sweep.todo / f"{stem}.json")


def claims_of_others(sweep: SweepDir, pilot_id: str) -> list[tuple[str, str]]:
    """``(stem, pilot)`` of every claim that is not ``pilot_id``'s."""
    pairs = (split_name(name) for name in entry_names(sweep.claimed))
    return [(stem, holder) for stem, holder in pairs if holder != pilot_id]


def take_over(sweep: SweepDir, stem: str, holder: str, pilot_id: str) -> Claim | None:
    """Take over the claim of a dead pilot; None when another was faster or the file is no point, which moves aside."""
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
    """Move a file that is no point out of the queue; the folder where it went."""
    broken = sweep.path / "queue" / "broken"
    broken.mkdir(exist_ok=True)
    _move(path, broken / path.name)
    return broken


def _move(source: Path, target: Path) -> bool:
    """Rename; False when ``source`` has gone. A retransmitted rename over NFS may report a missing source although
    it was this one that moved it, so a target that carries our own pilot's name counts as ours."""
    try:
        source.rename(target)
    except FileNotFoundError:
        return source.parent.name == "todo" and target.exists()
    return True

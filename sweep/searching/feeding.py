"""Keeps the queue of a search filled: after each finished run, the points that are most promising now replace the
waiting ones."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from math import exp

from launchers.state.sweep_dir import Point, SweepDir, entry_names, split_name
from results.text.numbers import plural
from sweep.composing.search_settings import Settings
from sweep.planning.price import within_budget
from sweep.running.run import point_of
from sweep.searching.planned import PlannedSpace
from sweep.searching.rounds import SearchRound, Wanted, next_points, read_round
from workloads.contract.protocol import Method


@dataclass(frozen=True, slots=True, kw_only=True)
class Look:
    """State of a search at one moment, and the changes to its queue."""

    round: SearchRound
    probabilities: dict[int, float]
    """Probability of a better layout, by cell."""
    chosen: tuple[Wanted, ...]
    """Points chosen to wait now, in addition to those that had to stay."""
    added: int = 0
    """Points that were added to the queue."""
    over_budget: bool
    """Whether the budget does not cover all wanted runs."""


def choose_points(now: SearchRound, settings: Settings, budget_gpu_hours: float | None) -> Look:
    """Choose what waits next, as far as the budget goes. Nothing is written."""
    probabilities = {cell: now.session.probability(cell) for cell in now.planned.names}
    wanted = next_points(now, settings)
    left = None
    if budget_gpu_hours is not None:
        running = (_cost_h(now, cell, place) for cell, places in now.pending.items() for place in places)
        left = budget_gpu_hours - now.spent - sum(running)
    inside = within_budget([_cost_h(now, one.cell, one.place) for one in wanted], left)
    chosen = tuple(one for one, fits in zip(wanted, inside, strict=True) if fits)
    return Look(round=now, probabilities=probabilities, chosen=chosen, over_budget=len(chosen) < len(wanted))


class Feeder:
    """Fills the queue of one search."""

    def __init__(
        self, sweep: SweepDir, planned: PlannedSpace, settings: Settings, method: Method, budget_gpu_hours: float | None
    ) -> None:
        self._sweep, self._planned, self._settings, self._method = sweep, planned, settings, method
        self._budget_gpu_hours = budget_gpu_hours
        self._ended = (0, 0)
        """Numbers of attempts and points that had ended at the last look."""

    def look(self) -> Look:
        """Read the folder, choose again, and update the queue. Raises `OSError`."""
        self._ended = self._count()
        now = read_round(self._sweep, self._planned, self._settings, self._method)
        choice = choose_points(now, self._settings, self._budget_gpu_hours)
        return dataclasses.replace(choice, added=self._change_queue(now, choice.chosen))

    def feed(self) -> str:
        """Call `look` again if a run has ended since. Returns a line for the user, empty if nothing was added."""
        before = self._ended
        try:
            if self._count() == before:
                return ""
            look = self.look()
        except OSError:
            self._ended = before  # the file system fails for now: try again at the next call
            return ""
        return self.message(look) if look.added else ""

    def _count(self) -> tuple[int, int]:
        return len(entry_names(self._sweep.history)), len(entry_names(self._sweep.done))

    def message(self, look: Look) -> str:
        """One line on the points added."""
        cells = sorted({one.cell for one in look.chosen})
        line = f"search: {plural(look.added, 'point')} of {plural(len(cells), 'model and size', 'models and sizes')}"
        if len(cells) != 1 or (best := look.round.session.best(cells[0])) is None:
            return line
        seconds = exp(float(look.round.session.seen.log_time[best]))
        return f"{line}; fastest so far {seconds:.4g} s a step, a better one {look.probabilities[cells[0]]:.2f}"

    def _change_queue(self, now: SearchRound, chosen: Sequence[Wanted]) -> int:
        """Replaces waiting points that were not chosen again, and keeps the order in which points were chosen.

        Returns the number of added points that did not wait before.
        """
        order = [(one.place, self._slow_step_s(one)) for one in chosen]
        waits = {place: (place, point.slow_step_s) for place, point in now.waiting.items()}
        stay = [place for place, as_it_waits in waits.items() if as_it_waits in order]
        if order[: len(stay)] != [waits[place] for place in stay]:
            stay = []  # another order: add all points again
        folders = (self._sweep.todo, self._sweep.claimed, self._sweep.done)
        names = (name for folder in folders for name in entry_names(folder))
        # A number is never used again: pilots remember points by it.
        first = 1 + max((int(split_name(name)[0].partition("-")[0]) for name in names), default=-1)
        for place, point in now.waiting.items():
            if place not in stay:
                (self._sweep.todo / f"{point.stem}.json").unlink(missing_ok=True)  # a pilot may just have claimed it
        new = [one for one in chosen if one.place not in stay]
        self._sweep.add_points(self._point(first + number, one) for number, one in enumerate(new))
        return sum(one.place not in now.waiting for one in new)

    def _point(self, index: int, wanted: Wanted) -> Point:
        point = point_of(index, wanted.point, self._method)
        return dataclasses.replace(point, slow_step_s=self._slow_step_s(wanted), ran_on=wanted.ran_on)

    def _slow_step_s(self, wanted: Wanted) -> float | None:
        """Limit on the step time for an early end; None for rehearsals, whose steps do not have the layout's
        duration."""
        return wanted.slow_step_s if self._method == "measured" else None


def _cost_h(now: SearchRound, cell: int, place: int) -> float:
    """GPU-hours that a run may cost: as planned, or if unknown the mean cost of runs of its cell so far."""
    price = now.planned.points[place].price
    assert price is not None
    if price.expected_h is None and now.runs.get(cell):
        return now.gpu_hours[cell] / now.runs[cell]
    return price.charged_h

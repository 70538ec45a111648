"""Baselines for a search: other ways to choose the runs, replayed on the same recorded runs."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from sweep.searching.recorded import RecordedSpace
from sweep.searching.replay import CellReplay, CellResult
from sweep.searching.space import Ints

Order = Callable[[int], Ints]
"""Maps a cell to its candidates, in the order in which they run."""
HAND_AXES = ("tp", "pp", "mbs", "zero")


def in_order(
    recorded: RecordedSpace,
    order: Order,
    *,
    most: int | None = None,
    patience: int | None = None,
    slow: float | None = None,
) -> list[CellResult]:
    """Runs every cell in the given order: at most ``most`` candidates, until ``patience`` runs in a row bring no
    improvement.

    ``slow``: as `Settings.slow`.
    """
    results = []
    for cell in recorded.space.cells:
        ran, since = CellReplay(recorded, cell, slow), 0
        for one in order(cell)[:most]:
            before = ran.fastest
            ran.run(int(one))
            since = since + 1 if ran.fastest == before and before is not None else 0
            if patience is not None and since >= patience:
                break
        results.append(ran.result())
    return results


def by_prediction(recorded: RecordedSpace) -> Order:
    """Candidates that are predicted to fit, fastest first; then the rest, lowest predicted memory first."""

    def order(cell: int) -> Ints:
        candidates = recorded.space.of(cell)
        load, time = recorded.space.log_load[candidates], recorded.space.log_time[candidates]
        by_expected_time: Ints = candidates[np.lexsort((np.where(load > 0, load, time), load > 0))]
        return by_expected_time

    return order


def at_random(recorded: RecordedSpace, seed: int) -> Order:
    random = np.random.default_rng(seed)

    def order(cell: int) -> Ints:
        shuffled: Ints = random.permutation(recorded.space.of(cell))
        return shuffled

    return order


def by_hand(recorded: RecordedSpace, slow: float | None = None) -> list[CellResult]:
    """Optimizes one axis at a time, as by hand: from the least model parallelism that runs, vary tp, pp, micro-batch
    and ZeRO in turn, each starting from the best so far."""
    return [_by_hand(recorded, cell, slow) for cell in recorded.space.cells]


def _by_hand(recorded: RecordedSpace, cell: int, slow: float | None) -> CellResult:
    candidates, points = recorded.space.of(cell), recorded.points
    axes = np.stack([getattr(points, name)[candidates] for name in HAND_AXES], axis=1)
    ran, tried = CellReplay(recorded, cell, slow), set[int]()

    def run(row: int) -> None:
        if row not in tried:
            tried.add(row)
            ran.run(int(candidates[row]))

    # Until one run succeeds: smallest micro-batch first, then more and more model parallelism, tensor before pipeline.
    for row in np.lexsort((-axes[:, 3], axes[:, 1], axes[:, 0] * axes[:, 1], axes[:, 2])):
        run(int(row))
        if ran.fastest is not None:
            break
    for axis in range(len(HAND_AXES)):
        assert ran.fastest is not None
        at = axes[int(np.flatnonzero(candidates == ran.fastest)[0])]
        others = np.delete(axes, axis, axis=1)
        for row in np.flatnonzero((others == np.delete(at, axis)).all(axis=1)):
            run(int(row))
    return ran.result()

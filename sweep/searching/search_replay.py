"""``search --replay``: replays a search on a table of recorded runs, and compares it with other strategies."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isfinite
from pathlib import Path

import numpy as np
import pandas as pd
from rich.console import Console
from threadpoolctl import threadpool_limits

from results.errors import UltrasweepError
from results.text.numbers import plural
from sweep.composing.conffiles import ConfFolders
from sweep.composing.search_settings import Settings
from sweep.searching.baselines import at_random, by_hand, by_prediction, in_order
from sweep.searching.recorded import RecordedSpace, read_recorded, recorded_space
from sweep.searching.replay import CellResult, coverage, quantiles, replay, settled

CALIBRATED, COLD, UNFITTED = "other models", "nothing", "–"
SEARCH, IN_ORDER, RANDOM = "search", "predicted order", "random"
PATIENCE = 5
RANDOM_ORDERS = 10
BINS = (0.0, 0.1, 0.3, 0.7, 1.0)


@dataclass(frozen=True, slots=True)
class Strategy:
    """Results of one strategy: all cells, once or for each of several draws."""

    fitted_on: str
    name: str
    results: tuple[CellResult, ...]
    draws: int = 1


@dataclass(frozen=True, slots=True)
class Replayed:
    spaces: dict[str, RecordedSpace]
    """Search spaces by the rows on which the predictions were fitted."""
    strategies: tuple[Strategy, ...]


# The matrices are small: more threads would only wait for each other.
@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]
def replay_table(path: Path, settings: Settings, folders: ConfFolders | None = None) -> Replayed:
    """Replays every strategy on one table. ``folders``: with files of clusters that the table names. Raises
    `UltrasweepError` for a table on which no search can be replayed."""
    frame = read_recorded(path)
    spaces = {CALIBRATED: recorded_space(frame, True, folders), COLD: recorded_space(frame, False, folders)}
    strategies = []
    for fitted_on, recorded in spaces.items():
        strategy = functools.partial(Strategy, fitted_on)
        order = by_prediction(recorded)
        strategies += [
            strategy(SEARCH, tuple(replay(recorded, settings))),
            strategy(
                f"{IN_ORDER}, patience {PATIENCE}",
                tuple(in_order(recorded, order, patience=PATIENCE, slow=settings.slow)),
            ),
            strategy(f"{IN_ORDER}, all", tuple(in_order(recorded, order))),
        ]
    recorded = spaces[COLD]
    draws = [in_order(recorded, at_random(recorded, seed)) for seed in range(RANDOM_ORDERS)]
    strategies += [
        Strategy(UNFITTED, "one axis at a time", tuple(by_hand(recorded, settings.slow))),
        Strategy(UNFITTED, f"{RANDOM}, all", tuple(result for draw in draws for result in draw), RANDOM_ORDERS),
    ]
    return Replayed(spaces, tuple(strategies))


def print_replay(replayed: Replayed, settings: Settings, console: Console) -> None:
    def say(text: str = "") -> None:
        console.print(text, markup=False, highlight=False)

    recorded = replayed.spaces[COLD]
    cells, goal = len(recorded.space.cells), f"{settings.within * 100:g} %"
    ran = int(np.isfinite(recorded.step_time_s).sum())
    say(f"{plural(len(recorded.space), 'layout')} in {plural(cells, 'cell')}, of which {ran} ran")
    say()
    say(f"| fitted on | strategy | runs | GPU-hours | cells within {goal} | runs to {goal}: median | p90 |")
    say("|---|---|---:|---:|---:|---:|---:|")
    for one in replayed.strategies:
        say(f"| {' | '.join(_line(one, settings.within))} |")
    say()
    say("| fitted on | estimated probability of a better layout | decisions | mean estimate | better layout existed |")
    say("|---|---|---:|---:|---:|")
    for one in replayed.strategies:
        if one.name == SEARCH:
            for low, high, count, mean_probability, was in coverage(one.results, BINS):
                say(f"| {one.fitted_on} | {low:g} to {high:g} | {count} | {mean_probability:.2f} | {was:.2f} |")


def _line(one: Strategy, within: float) -> Iterator[str]:
    yield one.fitted_on
    yield one.name
    yield f"{sum(len(cell.runs) for cell in one.results) / one.draws:,.0f}"
    yield f"{sum(cell.gpu_hours[-1] for cell in one.results) / one.draws:,.0f}"
    yield f"{settled(one.results, within) / one.draws:g} of {len(one.results) // one.draws}"
    for value in quantiles(one.results, within):
        yield f"{value:g}" if isfinite(value) else "never"


def rows(replayed: Replayed) -> pd.DataFrame:
    """One row for each run of each strategy, in order."""
    lines = []
    for one in replayed.strategies:
        recorded = replayed.spaces.get(one.fitted_on, replayed.spaces[COLD])
        per_draw = len(one.results) // one.draws
        for place, cell in enumerate(one.results):
            for run, candidate in enumerate(cell.runs):
                lines.append(
                    {
                        "fitted_on": one.fitted_on,
                        "strategy": one.name,
                        "draw": place // per_draw,
                        "cell": recorded.names[cell.cell],
                        "run": run + 1,
                        "layout": recorded.tag(candidate),
                        "outcome": str(recorded.outcome[candidate]),
                        "step_time_s": _known(recorded.step_time_s[candidate]),
                        "regret": _known(cell.regret[run]),
                        "gpu_hours": cell.gpu_hours[run],
                    }
                )
    return pd.DataFrame(lines)


def _known(value: float) -> float | None:
    return float(value) if isfinite(value) else None


def check_replay(overrides: Sequence[str], out: Path | None) -> None:
    """Raises `UltrasweepError` for overrides that a replay does not take, and for a file that cannot be written."""
    for override in overrides:
        if not override.startswith("search."):
            raise UltrasweepError(f"{override}: a replay takes only options of the section search, e.g. search.batch=1")
    if out is not None:
        if out.suffix not in (".parquet", ".csv"):
            raise UltrasweepError(f"--out {out}: its name must end in .parquet or .csv")
        if not out.absolute().parent.is_dir():
            raise UltrasweepError(f"--out {out}: {out.absolute().parent} is not a folder")

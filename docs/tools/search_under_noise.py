"""``python -m docs.tools.search_under_noise TABLE``: replays a search on recorded runs with noise, failures and a slow
node, as often as there are draws."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from math import sqrt

import numpy as np
import pandas as pd
from threadpoolctl import threadpool_limits

from results.errors import UltrasweepError
from results.text import command_line
from sweep.composing.config import compose_search
from sweep.composing.search_settings import Settings
from sweep.searching.recorded import RecordedSpace, read_recorded, recorded_space
from sweep.searching.replay import Trouble, replay, settled
from sweep.searching.search_replay import CALIBRATED, COLD, check_replay


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0, or 2 after a user's mistake."""
    parser = command_line.Parser(
        prog="python -m docs.tools.search_under_noise",
        description="Replays a search as python -m sweep search --replay TABLE does, with trouble in its runs: the "
        "step time of each run is multiplied by a random factor, runs fail at random, and one node is slow.",
        allow_abbrev=False,
    )
    parser.add_argument("table", type=command_line.path, metavar="TABLE", help="as for search --replay")
    parser.add_argument("overrides", nargs="*", metavar="search.OPTION=VALUE", help="options of the section search")
    parser.add_argument("--noise", type=_share, default=0.04, help="standard deviation of log step time (default 0.04)")
    parser.add_argument("--failures", type=_share, default=0.02, help="share of runs that fail (default 0.02)")
    parser.add_argument("--slow", type=_share, default=0.2, help="how much slower the slow node is (default 0.2)")
    parser.add_argument("--draws", type=int, default=8, help="replays of each line (default 8)")
    parser.add_argument("--first-draw", type=int, default=0, help="number of the first draw (default 0)")
    parser.add_argument(
        "--contenders",
        type=_share,
        help="search only among the layouts whose recorded time is within this share of the best of their cell: what a "
        "search could reach that knows beforehand which others need no run",
    )
    parser.add_argument("--cold", action="store_true", help="also without rows of other models")
    try:
        options = parser.parse_intermixed_args(argv)
        check_replay(options.overrides, None)
        settings, frame = compose_search(options.overrides), read_recorded(options.table)
        seeds = range(options.first_draw, options.first_draw + options.draws)
        troubles = (
            Trouble(noise=options.noise),
            Trouble(noise=options.noise, failures=options.failures, slow_node=1 + options.slow),
        )
        fitted_on = (CALIBRATED, COLD) if options.cold else (CALIBRATED,)
        for line in table(frame, settings, troubles, seeds, fitted_on, options.contenders):
            print(line, flush=True)
        return 0
    except UltrasweepError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def table(
    frame: pd.DataFrame,
    settings: Settings,
    troubles: Sequence[Trouble],
    seeds: Sequence[int],
    fitted_on: Sequence[str] = (CALIBRATED,),
    contenders: float | None = None,
) -> Iterator[str]:
    """Lines of a Markdown table: the replays under each trouble, with one draw for each of ``seeds``.

    ``frame``: rows of `read_recorded`. ``contenders``: see `RecordedSpace.contenders`; None: all layouts.
    """
    yield "| fitted on | trouble | cells within the goal | least and most of a draw | runs |"
    yield "|---|---|---:|---:|---:|"
    for rows in fitted_on:
        recorded = recorded_space(frame, rows == CALIBRATED)
        if contenders is not None:
            recorded = recorded.contenders(contenders)
        for trouble in troubles:
            yield f"| {' | '.join((rows, _name(trouble), *_cells(recorded, settings, trouble, seeds)))} |"


def _name(trouble: Trouble) -> str:
    text = f"noise {trouble.noise:.1%}"
    if trouble.failures or trouble.slow_node != 1:
        text += f", failures {trouble.failures:.1%}, one node {trouble.slow_node - 1:.0%} slower"
    return text


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to below 1")
    return value


# The matrices are small: more threads would only wait for each other.
@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]
def _cells(recorded: RecordedSpace, settings: Settings, trouble: Trouble, seeds: Sequence[int]) -> tuple[str, str, str]:
    results = [replay(recorded, settings, trouble=trouble, seed=seed) for seed in seeds]
    right = [settled(one, settings.within) for one in results]
    runs = np.mean([sum(len(cell.runs) for cell in one) for one in results])
    error = f" ± {np.std(right, ddof=1) / sqrt(len(right)):.1f}" if len(right) > 1 else ""
    return f"{np.mean(right):.1f}{error} of {len(recorded.space.cells)}", f"{min(right)} to {max(right)}", f"{runs:.0f}"


if __name__ == "__main__":
    sys.exit(main())

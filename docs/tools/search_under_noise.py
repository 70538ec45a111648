"""``python -m docs.tools.search_under_noise TABLE``: replays a search on recorded runs with noise, failures and a slow
node, as often as there are draws."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

import numpy as np
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
    parser.add_argument("--cold", action="store_true", help="also without rows of other models")
    try:
        options = parser.parse_intermixed_args(argv)
        check_replay(options.overrides, None)
        settings, frame = compose_search(options.overrides), read_recorded(options.table)
        troubles = {
            f"noise {options.noise:.1%}": Trouble(noise=options.noise),
            f"noise {options.noise:.1%}, failures {options.failures:.1%}, one node {options.slow:.0%} slower": Trouble(
                noise=options.noise, failures=options.failures, slow_node=1 + options.slow
            ),
        }
        print(
            "| fitted on | trouble | cells within the goal | least and most of a draw | runs |\n"
            "|---|---|---:|---:|---:|"
        )
        for fitted_on in (CALIBRATED, COLD) if options.cold else (CALIBRATED,):
            recorded = recorded_space(frame, fitted_on == CALIBRATED)
            for name, trouble in troubles.items():
                print(
                    f"| {' | '.join((fitted_on, name, *_cells(recorded, settings, trouble, options.draws)))} |",
                    flush=True,
                )
        return 0
    except UltrasweepError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a share from 0 to below 1")
    return value


# The matrices are small: more threads would only wait for each other.
@threadpool_limits.wrap(limits=1, user_api="blas")  # type: ignore[untyped-decorator]
def _cells(recorded: RecordedSpace, settings: Settings, trouble: Trouble, draws: int) -> tuple[str, str, str]:
    results = [replay(recorded, settings, trouble=trouble, seed=seed) for seed in range(draws)]
    right = [settled(one, settings.within) for one in results]
    runs = np.mean([sum(len(cell.runs) for cell in one) for one in results])
    return f"{np.mean(right):.1f} of {len(recorded.space.cells)}", f"{min(right)} to {max(right)}", f"{runs:.0f}"


if __name__ == "__main__":
    sys.exit(main())

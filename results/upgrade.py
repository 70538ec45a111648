"""``python -m results.upgrade FOLDER``: rewrites the merged tables of every sweep below a folder with today's columns.

This project does not need it, because it upgrades tables when it reads them. The command is for other programs that
read several files together, such as ``duckdb -c "from 'results/recorded/*/attempts.parquet'"``.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from results.errors import InvalidResults, UltrasweepError
from results.shared_filesystem.lease import acquire
from results.tables.load import SCHEMAS, load, rewrite
from results.tables.store import sweep_dirs
from results.text import command_line
from results.text.numbers import listed

_LOCK = ".compact.lock"
"""The lock of `results.tables.compaction`, which replaces the same files."""
_STALE_AFTER_S = 120.0
_WAIT_S = 10.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0 and prints a line for each sweep, or returns 2 and prints one line for a mistake."""
    parser = command_line.Parser(
        prog="python -m results.upgrade",
        description="Rewrite attempts.parquet, steps.parquet and ledger.parquet of every sweep below a folder with the "
        "columns of this version. Rows keep their values.",
        allow_abbrev=False,
    )
    parser.add_argument("folder", type=command_line.path, help="a sweep, or a folder that holds sweeps")
    try:
        folder = parser.parse_args(argv).folder
        for sweep in sweep_dirs(folder):
            newer = [
                problem for name in SCHEMAS for problem in load(sweep, name).problems if "newer version" in problem
            ]
            if newer:
                raise InvalidResults(newer[0])
            with acquire(sweep / _LOCK, stale_after_s=_STALE_AFTER_S, wait_s=_WAIT_S) as lease:
                if lease is None:
                    raise InvalidResults(f"{sweep} is being compacted by another process; try again in a minute")
                changed = [f"{name}.parquet" for name in SCHEMAS if rewrite(sweep, name, lease)]
            print(f"{sweep}: {listed(changed) + ' rewritten' if changed else 'up to date'}")
        return 0
    except OSError as error:
        print(f"error: {error.filename or folder}: {error.strerror or error}", file=sys.stderr)
        return 2
    except UltrasweepError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())

"""``python -m results.export RESULTS --out FILE``: writes one table of any results to one file with today's columns.

The file is for DuckDB, polars, pandas or a spreadsheet. Files of older versions get the columns that they lack.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.csv as pa_csv

from results.errors import UltrasweepError
from results.shared_filesystem.whole_files import output_file
from results.tables import files
from results.tables.load import SCHEMAS, load
from results.text import command_line
from results.text.command_line import InvalidOption
from results.text.numbers import plural

_SUFFIXES = (".parquet", ".csv")


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0 and prints what was written, or returns 2 and prints one line for a mistake."""
    try:
        print(_export(argv))
        return 0
    except UltrasweepError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _export(argv: Sequence[str] | None) -> str:
    parser = command_line.Parser(
        prog="python -m results.export",
        description="Write one table of a sweep, or of every sweep below a folder, to one file with today's columns.",
        allow_abbrev=False,
    )
    parser.add_argument(
        "results",
        type=command_line.path,
        metavar="RESULTS",
        help="a sweep, a folder that holds sweeps, or one Parquet file",
    )
    parser.add_argument("--out", type=_file, required=True, help=f"the file: {' or '.join(_SUFFIXES)}")
    parser.add_argument("--table", choices=[*SCHEMAS], default="attempts", help="which table (default: attempts)")
    asked = parser.parse_args(argv)
    reading = load(asked.results, asked.table)
    for problem in reading.problems:
        print(f"warning: {problem}", file=sys.stderr)
    try:
        _write(asked.out, reading.table)
    except OSError as error:
        raise InvalidOption(f"--out {asked.out}: {error.strerror or error}") from None
    rows, columns = reading.table.num_rows, reading.table.num_columns
    return f"{asked.out}: {plural(rows, 'row')}, {plural(columns, 'column')}"


def _write(path: Path, table: pa.Table) -> None:
    if not path.parent.is_dir():
        raise InvalidOption(f"--out {path}: there is no folder {path.parent}")
    if path.suffix == ".parquet":
        files.write_parquet(path, table)
        return
    with output_file(path) as file:
        pa_csv.write_csv(pa.table([_flat(column) for column in table.columns], names=table.column_names), file)


def _flat(column: pa.ChunkedArray) -> pa.ChunkedArray | pa.Array:
    """The column in a form that CSV can hold: lists become JSON."""
    if not pa.types.is_list(column.type):
        return column
    return pa.array([None if value is None else json.dumps(value) for value in column.to_pylist()], pa.string())


def _file(text: str) -> Path:
    path = command_line.path(text)
    if path.suffix not in _SUFFIXES:
        raise argparse.ArgumentTypeError(f"{text!r} must end with {' or '.join(_SUFFIXES)}")
    return path


if __name__ == "__main__":
    sys.exit(main())

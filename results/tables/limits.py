"""Limits for tables that others wrote: a Parquet file of a few kilobytes may unpack to more than a machine's memory."""

from __future__ import annotations

import os
import resource
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from results.errors import InvalidResults
from results.shared_filesystem.whole_files import open_regular, path_of
from results.text.numbers import format_bytes

if TYPE_CHECKING:
    import pandas as pd

MOST_COLUMNS = 2_000
"""Most columns of a table; attempts have fewer than 250."""
_SHARE_OF_MEMORY = 0.25
"""A table is copied several times on its way to a report."""
_WIDTHS = {"BOOLEAN": 1, "INT32": 4, "INT64": 8, "INT96": 8, "FLOAT": 4, "DOUBLE": 8}
_LONGEST_LINE = 2**20
_CELLS = 1_000_000
"""Cells of a CSV file that are read at a time."""
_SURELY_SMALL = 200
"""A column of texts is not measured if even its longest possible texts take less than this part of the memory."""


def most_bytes() -> int:
    """Memory in bytes that one table may take in this process."""
    limits = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")]
    for kind in (resource.RLIMIT_AS, resource.RLIMIT_DATA):
        soft, _ = resource.getrlimit(kind)
        if soft != resource.RLIM_INFINITY:
            limits.append(soft)
    return int(_SHARE_OF_MEMORY * min(limits))


def read_parquet(
    path: Path, schema: pa.Schema | None = None, most: int | None = None, columns: Sequence[str] | None = None
) -> pa.Table:
    """Reads a whole Parquet file. Raises `InvalidResults` as `refuse_large` does, and the errors of Arrow.

    ``schema``: the columns that the caller will add where they are missing. ``columns``: those to read, as far as the
    file has them; None: all.
    """
    with open_regular(path) as opened, pq.ParquetFile(path_of(opened)) as file:
        added = set(schema.names).difference(file.schema_arrow.names) if schema is not None else ()
        refuse_large(path, file, len(added), most)
        return file.read(columns=list(columns) if columns is not None else None)


def refuse_large(path: Path, file: pq.ParquetFile, columns: int, most: int | None = None) -> None:
    """Raises `InvalidResults` if the file, once read, has too many columns or takes too much memory.

    ``columns``: number of columns that readers add if the file lacks them. ``most``: limit in bytes; by default
    `most_bytes`. Only columns of texts that could be large are read, without unpacking repeated texts.
    """
    about = file.metadata
    if about.num_columns > MOST_COLUMNS:
        raise InvalidResults(f"{path} has {about.num_columns:,} columns; a table has at most {MOST_COLUMNS:,}")
    most = most_bytes() if most is None else most
    needed = 8 * about.num_rows * columns
    for leaf in range(about.num_columns):
        if needed > most:
            break
        needed += _bytes_of(path, file, leaf, most)
    if needed > most:
        raise InvalidResults(
            f"{path} has {about.num_rows:,} rows that take {format_bytes(needed)} or more in memory; a table may take "
            f"{format_bytes(most)} here"
        )


def read_csv(path: Path, *, most: int | None = None, **options: Any) -> pd.DataFrame:
    """Reads a CSV file with ``options`` of `pandas.read_csv`, piece by piece. Raises `InvalidResults` as `refuse_large`
    does, and the errors of pandas for a file that is no CSV file."""
    import pandas as pd  # pilots, which import this module, do without it

    most = most_bytes() if most is None else most
    with path.open("rb") as file:
        commas = file.readline(_LONGEST_LINE).count(b",")
    if commas >= MOST_COLUMNS:  # pandas would take half a minute for 100,000 columns
        raise InvalidResults(f"{path} has {commas + 1:,} columns or more; a table has at most {MOST_COLUMNS:,}")
    columns = len(pd.read_csv(path, nrows=0, **options).columns)
    pieces, held = [], 0
    with pd.read_csv(path, chunksize=max(1, _CELLS // max(1, columns)), **options) as reader:
        for piece in reader:
            held += int(piece.memory_usage(deep=True).sum())
            if held > most:
                raise InvalidResults(
                    f"{path} takes more than the {format_bytes(most)} of memory that a table may take here"
                )
            pieces.append(piece)
    return pd.concat(pieces, ignore_index=True) if len(pieces) > 1 else pieces[0]


def _bytes_of(path: Path, file: pq.ParquetFile, leaf: int, most: int) -> int:
    chunks = [file.metadata.row_group(group).column(leaf) for group in range(file.metadata.num_row_groups)]
    if not chunks:
        return 0
    values = sum(int(chunk.num_values) for chunk in chunks)
    if (width := _WIDTHS.get(chunks[0].physical_type)) is not None:
        return values * width
    stored = sum(int(chunk.total_uncompressed_size) for chunk in chunks)
    if values * stored <= most // _SURELY_SMALL or stored > most:
        return stored
    name = chunks[0].path_in_schema
    with open_regular(path) as opened, pq.ParquetFile(path_of(opened), read_dictionary=[name]) as packed:
        return _unpacked(packed.read(columns=[name], use_threads=False))


def _unpacked(table: pa.Table) -> int:
    """Bytes of texts that are stored once and repeated by number."""
    total = 0
    for column in table.columns:
        for chunk in column.chunks:
            total += _unpacked_array(chunk)
    return total


def _unpacked_array(array: pa.Array) -> int:
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        array = array.flatten()
    if pa.types.is_struct(array.type):
        return sum(_unpacked_array(array.field(place)) for place in range(array.type.num_fields))
    if pa.types.is_dictionary(array.type):
        lengths = pc.binary_length(array.dictionary)
        total = pc.sum(pc.take(lengths.cast(pa.int64()), array.indices)).as_py() or 0
        return int(total) + 4 * len(array)
    return int(array.nbytes)

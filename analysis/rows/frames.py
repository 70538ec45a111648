"""Arrow tables as frames that take little memory."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa


def frame_of(table: pa.Table) -> pd.DataFrame:
    """``table`` as a frame in which equal texts of a column, and equal lists of texts, are one object. Arrow makes one
    for each row: most columns of a sweep have the same text in every row."""
    texts = {field.name for field in table.schema if _is_text(field.type) and _has_values(table[field.name])}
    frame = table.select([name for name in table.column_names if name not in texts]).to_pandas()
    columns = {}
    for field in table.schema:
        if field.name in texts:
            encoded = table[field.name].combine_chunks().dictionary_encode()
            places = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            columns[field.name] = pd.Series(encoded.dictionary.to_pandas().array.take(places, allow_fill=True))
        elif pa.types.is_list(field.type) and pa.types.is_string(field.type.value_type):
            columns[field.name] = _shared_lists(frame[field.name])
        else:
            columns[field.name] = frame[field.name]
    return pd.DataFrame(columns, copy=True) if columns else frame


def _has_values(column: pa.ChunkedArray) -> bool:
    return bool(column.null_count < len(column))


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))


def _shared_lists(lists: pd.Series) -> pd.Series:
    seen: dict[tuple[str, ...], object] = {}
    return lists.map(lambda value: seen.setdefault(tuple(value), value), na_action="ignore")

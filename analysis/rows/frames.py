"""Arrow tables as frames that take little memory."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa


def frame_of(table: pa.Table) -> pd.DataFrame:
    """``table`` as a frame in which equal texts of a column, and equal lists of texts, are one object. Arrow makes one
    for each row: most columns of a sweep have the same text in every row."""
    columns = {}
    for field in table.schema:
        column = table[field.name]
        texts = pa.types.is_string(field.type) or pa.types.is_large_string(field.type)
        if texts and len(column):
            encoded = column.combine_chunks().dictionary_encode()
            levels = pa.table({field.name: encoded.dictionary}).to_pandas()[field.name].array
            places = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False)
            columns[field.name] = pd.Series(levels.take(places, allow_fill=True))
        elif pa.types.is_list(field.type) and pa.types.is_string(field.type.value_type):
            columns[field.name] = _shared_lists(table.select([field.name]).to_pandas()[field.name])
        else:
            columns[field.name] = table.select([field.name]).to_pandas()[field.name]
    return pd.DataFrame(columns, copy=True) if columns else table.to_pandas()


def _shared_lists(lists: pd.Series) -> pd.Series:
    seen: dict[tuple[str, ...], object] = {}
    return lists.map(lambda value: seen.setdefault(tuple(value), value), na_action="ignore")

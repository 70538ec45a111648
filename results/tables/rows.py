"""Checks plain rows against a table's schema, and brings stored tables to that schema.

Writing is strict: an unknown column, a wrong type, a NaN or a missing required value raises an error with the column
and the value, because Arrow would accept much of that (3.5 in a whole-number column becomes 3). Reading is lenient:
tables of an older or newer version get nulls for columns that they lack and keep columns that are unknown here.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

import pyarrow as pa

from results.errors import InvalidResults
from results.tables.schema import METHODS, OUTCOMES, PHASES, VERDICTS

CHOICES = {"outcome": OUTCOMES, "method": METHODS, "verdict": VERDICTS, "phase": PHASES}


def table_from_rows(rows: Sequence[Mapping[str, Any]], schema: pa.Schema) -> pa.Table:
    """Returns ``rows`` as a table of ``schema``; missing keys become null. Raises `InvalidResults` on the first bad
    cell."""
    names = set(schema.names)
    for row in rows:
        if unknown := [name for name in row if name not in names]:
            raise InvalidResults(_unknown_column(schema, unknown[0]))
    columns = {}
    for field in schema:
        values = [row.get(field.name) for row in rows]
        plainly_right = _all_right(field, values)
        columns[field.name] = values if plainly_right else [_checked(schema, field, value) for value in values]
    return pa.Table.from_pydict(columns, schema=schema)


def conform(table: pa.Table, schema: pa.Schema) -> pa.Table:
    """Returns ``table`` with every column of ``schema`` in its order and type, then the table's extra columns.

    All fields become nullable, because an old table may lack a column that is required today. Raises `InvalidResults`
    if a column cannot be cast to its type.
    """
    arrays, fields = [], []
    for field in schema:
        field = field.with_nullable(True)
        index = table.schema.get_field_index(field.name)
        if index < 0:
            column = pa.nulls(table.num_rows, type=field.type)
        else:
            column = table.column(index)
            if column.type != field.type:
                try:
                    column = column.cast(field.type)
                except pa.ArrowException as error:
                    raise InvalidResults(
                        f"column {field.name} is {column.type}, not {field.type}: {str(error).splitlines()[0]}"
                    ) from None
        arrays.append(column)
        fields.append(field)
    known = set(schema.names)
    for index, field in enumerate(table.schema):
        if field.name not in known:
            arrays.append(table.column(index))
            fields.append(field.with_nullable(True))
    return pa.Table.from_arrays(arrays, schema=pa.schema(fields, metadata=schema.metadata))


def _unknown_column(schema: pa.Schema, name: str) -> str:
    message = f"{_title(schema)}: there is no column {name!r}"
    close = difflib.get_close_matches(name, schema.names, n=1)
    return f"{message}; did you mean {close[0]!r}?" if close else message


def _all_right(field: pa.Field, values: Sequence[Any]) -> bool:
    """Whether a look at the whole column shows that every value is right; otherwise `_checked` looks at each."""
    kinds = set(map(type, values))
    if type(None) in kinds:
        if not field.nullable:
            return False
        kinds.remove(type(None))
    if not kinds:
        return True
    given = (value for value in values if value is not None)
    if kinds == {bool}:
        return bool(pa.types.is_boolean(field.type))
    if kinds == {str}:
        return pa.types.is_string(field.type) and (field.name not in CHOICES or set(given) <= set(CHOICES[field.name]))
    if kinds == {int} and pa.types.is_integer(field.type):
        return all(-(2**63) <= value < 2**63 for value in given)
    return kinds <= {int, float} and pa.types.is_floating(field.type) and all(map(math.isfinite, given))


def _checked(schema: pa.Schema, field: pa.Field, value: Any) -> Any:
    if value is None:
        if not field.nullable:
            raise InvalidResults(f"{_title(schema)}: column {field.name} must have a value, got None")
        return None
    if hasattr(value, "item") and not isinstance(value, (list, tuple)):  # a NumPy scalar
        value = value.item()
    problem = _problem(field.type, value)
    choices = CHOICES.get(field.name)
    if problem is None and choices is not None and value not in choices:
        problem = f"it may be one of {', '.join(choices)}"
    if problem is not None:
        raise InvalidResults(f"{_title(schema)}: column {field.name}={_short(value)}: {problem}")
    return value


def _problem(kind: pa.DataType, value: Any) -> str | None:
    """Reason why ``value`` is not of type ``kind``; None if it is."""
    if pa.types.is_list(kind):
        if not isinstance(value, (list, tuple)):
            return f"a list of {kind.value_type} was expected, got {type(value).__name__}"
        return next((p for v in value if v is not None and (p := _problem(kind.value_type, v))), None)
    if pa.types.is_struct(kind):
        fields = {field.name: field.type for field in kind}
        if not isinstance(value, Mapping) or value.keys() != fields.keys():
            return f"an entry with {', '.join(fields)} was expected, got {_short(value)}"
        return next((p for name, v in value.items() if v is not None and (p := _problem(fields[name], v))), None)
    if pa.types.is_boolean(kind):
        return None if isinstance(value, bool) else f"true or false was expected, got {type(value).__name__}"
    if pa.types.is_integer(kind):
        if isinstance(value, bool) or not isinstance(value, int):
            return f"a whole number was expected, got {type(value).__name__}"
        return None if -(2**63) <= value < 2**63 else "it does not fit into 64 bits"
    if pa.types.is_floating(kind):
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return f"a number was expected, got {type(value).__name__}"
        return None if math.isfinite(value) else "it is not finite; use None for unknown values"
    if pa.types.is_timestamp(kind):
        if not isinstance(value, datetime):
            return f"a datetime was expected, got {type(value).__name__}"
        return None if value.tzinfo is not None else "it has no time zone"
    assert pa.types.is_string(kind), kind
    return None if isinstance(value, str) else f"text was expected, got {type(value).__name__}"


def _title(schema: pa.Schema) -> str:
    name: bytes = (schema.metadata or {}).get(b"table", b"table")
    return name.decode()


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."

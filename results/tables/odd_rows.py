"""Rows of attempts with values that no run can have, such as a negative step time: they cost a warning, not a report.

A row is left out if such a value says what the run was or how fast it was; of other columns only the value is left out.
A number that is not a number (NaN) counts as missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from datetime import UTC, datetime
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from results.tables.schema import ATTEMPT_COLUMNS, CONFIG_COLUMNS, METHODS, OUTCOMES, PHASES, UNKNOWN_OUTCOME, Column
from results.text.numbers import plural

_MOST = 10**15
"""Largest count of anything: parameters, tokens of a step, ranks."""
_MOST_BYTES = 2**62
_MOST_BRACKETS = 50
_LARGEST = 1e30
_LONGEST = 200
"""Most characters of a name; the names of figures and files are composed of them."""
_MAY_BE_ZERO = ("zero_stage", "ffn_hidden_size")
_SPEEDS = ("step_time_s", "tokens_per_s", "tokens_per_s_per_gpu")
_ABOVE_ZERO = (
    *("step_time_min_s", "step_time_max_s", "step_time_mean_s", "breakdown_step_time_s", "peak_flops"),
    *("predicted_step_time_s", "predicted_step_time_low_s", "predicted_step_time_high_s", "predicted_peak_bytes"),
    *("flops_per_token_palm", "flops_per_token_causal", "flops_per_token_playbook", "flops_per_token_hardware"),
    *("num_params", "num_matmul_params", "peak_allocated_bytes", "peak_reserved_bytes", "device_memory_bytes"),
)
"""Measurements by which others are divided."""
_ANY_SIGN = ("gap_s", "host_lead_s", "temperature_c")
"""Numbers that may be negative."""
_UNBOUNDED = ("loss_max_difference", "grad_norm_max_difference", "loss_scale")
"""Numbers that are infinite in a run that diverged."""
_NAMES = ("experiment_id", "model", "sweep", "cluster", "engine", "engine_version", "device_name", "precision")
_FIRST, _LAST = datetime(2000, 1, 1, tzinfo=UTC), datetime(2200, 1, 1, tzinfo=UTC)


def without_odd_rows(attempts: pa.Table) -> tuple[pa.Table, list[str]]:
    """Returns the rows of ``attempts`` that can be read, with null for odd values of columns that do not define a run,
    and one line for each column with odd values."""
    problems: list[str] = []
    if not attempts.num_rows:
        return attempts, problems
    odd_rows = pa.array([False] * attempts.num_rows)
    for column, ok in _known(attempts, _defining()):
        odd = pc.and_(attempts[column].is_valid(), pc.invert(pc.fill_null(ok(attempts[column]), True)))
        if count := pc.sum(odd).as_py():
            problems.append(f"{plural(count, 'row')} left out: {_example(attempts, column, odd, count)}")
            odd_rows = pc.or_(odd_rows, odd.combine_chunks() if isinstance(odd, pa.ChunkedArray) else odd)
    if problems:
        attempts = attempts.filter(pc.invert(odd_rows))
        if not attempts.num_rows:
            return attempts, problems
    for column, ok in _known(attempts, _measured()):
        odd = pc.and_(attempts[column].is_valid(), pc.invert(pc.fill_null(ok(attempts[column]), True)))
        if count := pc.sum(odd).as_py():
            problems.append(f"{plural(count, 'value')} left out: {_example(attempts, column, odd, count)}")
            place = attempts.schema.get_field_index(column)
            kind = attempts.schema.field(column).type
            cleared = pc.if_else(odd, pa.scalar(None, kind), attempts[column])
            attempts = attempts.set_column(place, pa.field(column, kind), cleared)
    return attempts, problems


Test = Callable[[Any], Any]
"""Whether each value of a column is one that a run can have; null where that is not known."""


def _known(attempts: pa.Table, tests: Iterable[tuple[str, Test]]) -> Iterator[tuple[str, Test]]:
    """The tests of the columns that the table has."""
    names = set(attempts.column_names)
    return ((column, ok) for column, ok in tests if column in names)


def _defining() -> Iterator[tuple[str, Test]]:
    """Columns that say what a run was and how fast it was, with the test of their values."""
    yield "outcome", _one_of(*OUTCOMES, UNKNOWN_OUTCOME)
    yield "method", _one_of(*METHODS)
    for column in CONFIG_COLUMNS:
        if pa.types.is_integer(column.type) and column.name != "seed":
            yield column.name, _between(0 if column.name in _MAY_BE_ZERO else 1, _MOST)
    for name in _SPEEDS:
        yield name, _is_speed
    yield "config_json", _is_flat
    for name in _NAMES:
        yield (
            name,
            lambda values: pc.and_(pc.less_equal(pc.utf8_length(values), _LONGEST), pc.utf8_is_printable(values)),
        )


def _measured() -> Iterator[tuple[str, Test]]:
    """All other columns that are checked, with the test of their values."""
    yield "phase", _one_of(*PHASES)
    defining = {*_SPEEDS, *(column.name for column in CONFIG_COLUMNS)}
    for column in ATTEMPT_COLUMNS:
        if column.name in defining or column.name in _UNBOUNDED:
            continue
        if (test := _test_of(column)) is not None:
            yield column.name, test


def _test_of(column: Column) -> Test | None:
    kind = column.type
    if pa.types.is_floating(kind):
        if column.name in _ABOVE_ZERO:
            return _is_speed
        least = -_LARGEST if column.name in _ANY_SIGN else 0
        return lambda values: pc.or_(pc.is_nan(values), _between(least, _LARGEST)(values))
    if pa.types.is_integer(kind):
        return _between(int(column.name in _ABOVE_ZERO), _MOST_BYTES if column.unit == "B" else _MOST)
    if pa.types.is_timestamp(kind):
        return _between(_FIRST, _LAST)
    if pa.types.is_list(kind) and column.unit == "s":
        return _lists_of_times
    if pa.types.is_list(kind) and pa.types.is_struct(kind.value_type):
        return _lists_of(lambda entry: entry is not None)
    return None


def _one_of(*choices: str) -> Test:
    return lambda values: pc.is_in(values, value_set=pa.array(choices, pa.string()))


def _between(least: Any, most: Any) -> Test:
    def test(values: Any) -> Any:
        low, high = (pa.scalar(edge, values.type) for edge in (least, most))
        return pc.and_(pc.greater_equal(values, low), pc.less_equal(values, high))

    return test


def _is_speed(values: Any) -> Any:
    """Whether each number is above zero, or missing."""
    return pc.or_(pc.is_nan(values), pc.and_(pc.greater(values, 0.0), pc.less_equal(values, _LARGEST)))


def _lists_of_times(values: Any) -> Any:
    """Lists of seconds, or of structs with seconds."""
    return _lists_of(_is_struct_of_times if pa.types.is_struct(values.type.value_type) else _is_time)(values)


def _is_struct_of_times(entry: Any) -> bool:
    return entry is not None and all(_is_time(part) for part in entry.values() if isinstance(part, float))


def _is_time(entry: float | None) -> bool:
    return entry is None or entry != entry or 0 <= entry <= _LARGEST


def _lists_of(fits: Callable[[Any], bool]) -> Test:
    def test(values: Any) -> Any:
        if _is_ordinary(pc.list_flatten(values)):  # without a loop over all rows
            return pa.chunked_array([pa.array([True] * len(values))])
        lists = values.to_pylist()
        return pa.chunked_array([pa.array([entries is None or all(map(fits, entries)) for entries in lists])])

    return test


def _is_ordinary(entries: Any) -> bool:
    """Whether no entry of any list is odd: no number is negative or too large, and no struct is missing."""
    if pa.types.is_struct(entries.type):
        floats = [part.name for part in entries.type if pa.types.is_floating(part.type)]
        return not entries.null_count and all(_is_ordinary(pc.struct_field(entries, name)) for name in floats)
    ends = pc.min_max(entries).as_py()
    return ends["min"] is None or bool(ends["min"] >= 0 and ends["max"] <= _LARGEST)


def _is_flat(values: Any) -> Any:
    """Whether a stored configuration is nested no deeper than an experiment, so that a JSON parser can read it."""
    return pc.and_(*(pc.less_equal(pc.count_substring(values, bracket), _MOST_BRACKETS) for bracket in "[{"))


def _example(attempts: pa.Table, column: str, odd: Any, count: int) -> str:
    """The first odd value with its attempt: ``world_size=0 (attempt ID) and 3 more``."""
    row = attempts.filter(odd).slice(0, 1)
    value, attempt = row[column][0].as_py(), row["attempt_id"][0].as_py()
    more = f" and {count - 1:,} more" if count > 1 else ""
    return f"{column}={_short(value)} (attempt {_short(attempt)}){more} is no value that a run can have"


def _short(value: object) -> str:
    text = str(value) if not isinstance(value, str) or value.isprintable() else repr(value)
    return text if len(text) <= 60 else text[:59] + "…"

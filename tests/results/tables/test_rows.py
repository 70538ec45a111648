"""What may be written: typed cells only, with the column and the value in the message."""

from __future__ import annotations

from datetime import datetime

import numpy as np
import pyarrow as pa
import pytest

from results.errors import InvalidResults
from results.tables import rows
from results.tables.rows import conform, table_from_rows
from results.tables.schema import ATTEMPTS, LEDGER, STEPS
from tests.results.helpers import attempt


@pytest.mark.parametrize(
    ("column", "value", "says"),
    [
        ("peak_allocated_bytes", 3.5, "column peak_allocated_bytes=3.5: a whole number"),
        ("peak_allocated_bytes", True, "column peak_allocated_bytes=True: a whole number"),
        ("peak_allocated_bytes", 2**63, "64 bits"),
        ("step_time_s", "fast", "column step_time_s='fast': a number was expected, got str"),
        ("step_time_s", float("nan"), "column step_time_s=nan: it is not finite"),
        ("step_time_s", float("inf"), "not finite"),
        ("losses", [1.0, float("nan")], "column losses="),
        ("losses", 1.0, "a list of double was expected"),
        ("hosts", "node1", "a list of string was expected"),
        ("git_dirty", 1, "column git_dirty=1: true or false"),
        ("model", 8, "column model=8: text was expected"),
        ("started_at", datetime(2025, 1, 1), "no time zone"),
        ("started_at", 1.7e9, "a datetime was expected"),
        ("outcome", "fine", "column outcome='fine': it may be one of ok, oom"),
        ("method", "guessed", "measured, rehearsed"),
        ("phase", "lunch", "spawn, rendezvous"),
        ("outcome", None, "column outcome must have a value"),
    ],
)
def test_bad_cell_is_named(column: str, value: object, says: str) -> None:
    with pytest.raises(InvalidResults, match="attempts: ") as error:
        table_from_rows([attempt("a", **{column: value})], ATTEMPTS)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def test_required_column_left_out() -> None:
    row = attempt("a")
    del row["measurement_version"]
    with pytest.raises(InvalidResults, match="attempts: column measurement_version must have a value"):
        table_from_rows([row], ATTEMPTS)


def test_misspelt_column_gets_a_hint() -> None:
    with pytest.raises(InvalidResults, match="no column 'step_time'; did you mean 'step_time_s'"):
        table_from_rows([attempt("a", step_time=1.0)], ATTEMPTS)


def test_null_stays_null_and_good_values_stay_themselves() -> None:
    row = attempt("a", mfu_palm=None, num_params=np.int64(7), power_w=np.float32(0.5), tokens_per_s=3)
    stored = table_from_rows([row], ATTEMPTS).to_pylist()[0]
    assert stored["mfu_palm"] is None
    assert stored["pp_schedule"] is None  # not given at all
    assert stored["losses"] == [11.7, None, 11.2]
    assert (stored["num_params"], stored["power_w"], stored["tokens_per_s"]) == (7, 0.5, 3.0)


def test_units_travel_with_the_columns() -> None:
    assert table_from_rows([], ATTEMPTS).schema.field("step_time_s").metadata[b"unit"] == b"s"
    assert table_from_rows([], STEPS).schema.field("peak_allocated_bytes").metadata[b"unit"] == b"B"
    assert table_from_rows([], LEDGER).schema.metadata[b"table"] == b"ledger"


def test_conform_fills_and_keeps() -> None:
    old = pa.table({"attempt_id": ["a"], "tp": pa.array([2], pa.int32()), "colour": ["blue"]})
    table = conform(old, ATTEMPTS)
    assert table.column_names == [*ATTEMPTS.names, "colour"]
    row = table.to_pylist()[0]
    assert (row["tp"], row["colour"], row["step_time_s"], row["schema_version"]) == (2, "blue", None, None)
    assert table.schema.field("tp").type == pa.int64()


def test_conform_refuses_what_cannot_be_cast() -> None:
    with pytest.raises(InvalidResults, match="column tp is string, not int64"):
        conform(pa.table({"attempt_id": ["a"], "tp": ["two"]}), ATTEMPTS)


def test_columns_of_plain_values_are_not_checked_cell_by_cell(monkeypatch: pytest.MonkeyPatch) -> None:
    checked: list[object] = []
    monkeypatch.setattr(rows, "_checked", lambda schema, field, value: checked.append(field.name) or value)
    row = {"point": 0, "verdict": "run", "experiment_id": "e", "predicted_step_time_s": 1, "detail": None}
    table = table_from_rows([row, {**row, "predicted_step_time_s": 0.5}], LEDGER)
    assert checked == [] and table["predicted_step_time_s"].to_pylist() == [1.0, 0.5]
    table_from_rows([row, {**row, "model": np.str_("numpy")}], LEDGER)
    assert set(checked) == {"model"}

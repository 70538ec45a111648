"""Frames of Arrow tables hold each text once and are otherwise Arrow's own."""

from __future__ import annotations

import pandas as pd
import pyarrow as pa

from analysis.rows.frames import frame_of
from results.tables.rows import table_from_rows
from results.tables.schema import ATTEMPTS
from tests.analysis import synthetic

POINTS = list(synthetic.experiments())[:6]


def test_a_frame_is_that_of_arrow_and_shares_its_texts() -> None:
    rows = synthetic.attempts(POINTS)
    rows[0] |= {"phase": None, "hosts": None}
    rows[1] |= {"hosts": ["a", "b"]}
    rows[2] |= {"hosts": ["a", "b"]}
    table = table_from_rows(rows, ATTEMPTS)
    table = pa.concat_tables([table, table.slice(0, 2)])
    with pd.option_context("mode.string_storage", "python"):
        frame = frame_of(table)
        pd.testing.assert_frame_equal(frame, table.to_pandas())
    assert frame["cluster"].iloc[0] is frame["cluster"].iloc[3]
    assert frame["hosts"].iloc[1] is frame["hosts"].iloc[2]
    pd.testing.assert_frame_equal(frame_of(table.slice(0, 0)), table.slice(0, 0).to_pandas())

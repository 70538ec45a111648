"""Frames of Arrow tables hold each text once and are otherwise Arrow's own."""

from __future__ import annotations

import base64
import json
import zlib
from pathlib import Path

import pandas as pd
import pyarrow as pa

from analysis.page import embed
from analysis.rows import load
from analysis.rows.frames import frame_of
from results.tables import store
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


def test_data_of_the_page_is_compressed_part_by_part_and_reads_back() -> None:
    for data in ({}, [], "text", {"a": [], "b": {"c": [{"d": 1}, {}], "é": None}, "e": [[1], 2.5]}, [{"a": 1}]):
        assert json.loads(zlib.decompress(base64.b64decode(embed.deflated(data)))) == data
    rows = {"columns": [{"values": list(range(place, place + 300))} for place in range(300)]}
    assert json.loads(zlib.decompress(base64.b64decode(embed.deflated(rows)))) == rows
    assert max(map(len, embed._parts(rows))) < 2000


def test_equal_texts_of_a_ledger_are_one_object(tmp_path: Path) -> None:
    [row] = (
        store.read_ledger(Path(__file__).parents[2] / "results" / "recorded" / "h200x1_search").slice(0, 1).to_pylist()
    )
    (tmp_path / "sweep.json").write_text("{}")
    store.write_ledger(tmp_path, [row | {"point": point} for point in range(3)])
    with pd.option_context("mode.string_storage", "python"):
        ledger, problems = load._ledger_of(tmp_path)
    assert problems == [] and len(ledger) == 3
    assert len({id(value) for value in ledger["config_json"].array}) == 1

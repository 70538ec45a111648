"""``analysis.compare --json``: one document that says what the text says and has the rows of compare.csv."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from analysis.compare import command
from tests.analysis import synthetic
from tests.analysis.compared import POINTS, run, sweep
from tests.sweep.documented_json import documented


def cli(*words: object) -> int:
    return command.main([str(word) for word in words])


@pytest.fixture
def sides(tmp_path: Path) -> tuple[Path, Path]:
    a = sweep(tmp_path / "a", *(run(point, 100.0) for point in POINTS[:6]), synthetic.attempt(POINTS[6], outcome="oom"))
    return a, sweep(tmp_path / "b", *(run(point, 80.0) for point in POINTS[:5]))


@pytest.mark.slow
def test_the_document_has_what_the_text_and_the_table_have(
    sides: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli(*sides, "--json") == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert cli(*sides, "--out", tmp_path / "out") == 0
    said = " ".join(capsys.readouterr().out.split())
    assert set(document) == documented("compare") | {"schema", "schema_version"}
    assert (document["schema"], document["schema_version"]) == ("ultrasweep.compare/1", 1)
    assert document["verdicts"] and all(f"{count} {name}" in said for name, count in document["verdicts"].items())
    for sentence in (*document["matching"], *document["found"], document["a"]["description"]):
        assert " ".join(sentence.split()) in said
    table = pd.read_csv(tmp_path / "out" / "tables" / "compare.csv")
    assert list(document["points"][0]) == list(table.columns)
    assert [point["found_in"] for point in document["points"]] == table["found_in"].tolist()
    for point, ratio in zip(document["points"], table["ratio"], strict=True):
        assert point["ratio"] is None if math.isnan(ratio) else point["ratio"] == pytest.approx(ratio)
    by_axis = pd.read_csv(tmp_path / "out" / "tables" / "compare_by_axis.csv")
    assert [row["axis"] for row in document["by_axis"]] == by_axis["axis"].tolist()


@pytest.mark.slow
def test_it_writes_no_file_and_takes_no_option_of_files(
    sides: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(tmp_path.rglob("*"))
    monkeypatch.chdir(tmp_path)
    assert cli(*sides, "--json") == 0
    assert sorted(tmp_path.rglob("*")) == before
    capsys.readouterr()
    for option in (("--out", "x"), ("--format", "html"), ("--fail-if-slower", "5")):
        assert cli(*sides, "--json", *option) == 2
        told = capsys.readouterr()
        assert told.out == "" and told.err.startswith("error: --json writes no file")

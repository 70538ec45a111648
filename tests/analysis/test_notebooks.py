"""The notebooks: thin, shipped with outputs that a fresh run repeats, and silent about the machine they ran on."""

from __future__ import annotations

import ast
import math
import re
from functools import cache
from typing import Any

import pytest
from matplotlib.figure import Figure

from analysis.page.interactive import figure
from analysis.rows.cohorts import split
from analysis.rows.load import load
from results.errors import InvalidResults
from tests.analysis.report_page import RECORDED
from tests.analysis.run_notebooks import (
    FOLDER,
    MOST_BYTES,
    NOTEBOOKS,
    ROOT,
    STUDY,
    executed,
    pictures,
    read,
    texts,
    tidy,
)

pytestmark = pytest.mark.slow

NUMBER = re.compile(r"(?<![\w.])[-−]?\d[\d,]*\.?\d*(?:e-?\d+)?")
PICTURES = {"choosing_a_layout": 1, "study": 3, "your_own_sweep": 2}
"""How many figures each notebook shows."""


@cache
def fresh(name: str) -> Any:
    """The notebook run now; skips without the study's table, which is not shipped."""
    if name == "study" and not STUDY.is_file():
        pytest.skip(f"the study's raw table is not at {STUDY}")
    return executed(name, **({"table": str(STUDY)} if name == "study" else {}))


def differences(kept: str, now: str) -> list[str]:
    """In which numbers or words two texts differ: numbers by more than the last digit of the fewer, or 1 %."""
    one, two = (NUMBER.findall(text) for text in (kept, now))
    words = [" ".join(NUMBER.sub("#", text).replace("-", "").split()) for text in (kept, now)]
    found = [] if words[0] == words[1] else [f"words differ: {words[0]!r} against {words[1]!r}"]
    if len(one) != len(two):
        return [*found, f"{len(one)} numbers against {len(two)}"]
    for a, b in zip(one, two, strict=True):
        values = [float(text.replace(",", "").replace("−", "-")) for text in (a, b)]
        digit = 10.0 ** -min(len(text.partition(".")[2]) for text in (a, b))
        if not math.isclose(*values, rel_tol=0.01, abs_tol=1.01 * digit if "." in a + b else 0):
            found.append(f"{a} against {b}")
    return found


def test_there_are_three_notebooks() -> None:
    assert sorted(PICTURES) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_thin_and_hold_their_outputs(name: str) -> None:
    notebook = read(name)
    cells = notebook.cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert code[0].metadata["tags"] == ["parameters"]
    for number, cell in enumerate(code, start=1):
        assert len(cell.source.splitlines()) <= 25
        assert cell.execution_count == number
        source = ast.parse(re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE))
        assert not any(isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)) for node in ast.walk(source))
        assert not re.search(r"[\"']/(?!/)", cell.source), "an absolute path"
        assert number == 1 or cell.outputs, cell.source
        assert not any(output.output_type == "error" or output.get("name") == "stderr" for output in cell.outputs)
    assert all(isinstance(node, ast.Assign) for node in ast.parse(code[0].source).body)
    assert pictures(notebook) == PICTURES[name]
    assert sum(cell.cell_type == "markdown" for cell in cells) >= 5


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_shipped_files_are_small_and_name_no_machine(name: str) -> None:
    text = (FOLDER / f"{name}.ipynb").read_text()
    assert len(text.encode()) <= MOST_BYTES
    bare = re.sub(r'"image/png": "[^"]*"', "", text)
    assert str(ROOT) not in bare
    assert not re.search(r"(?<![\w./])/(home|root|tmp|work|usr|Users)/", bare)
    assert "://" not in bare
    for output in (output for cell in read(name).cells if cell.cell_type == "code" for output in cell.outputs):
        assert set(output.get("metadata", {})) == set()


@pytest.mark.exhaustive(seconds=20)
@pytest.mark.parametrize("name", NOTEBOOKS)
def test_shipped_outputs_are_those_of_a_fresh_run(name: str) -> None:
    """``make notebooks`` writes them anew."""
    kept, now = read(name), fresh(name)
    assert len(texts(kept)) == len(texts(now))
    for number, (one, two) in enumerate(zip(texts(kept), texts(now), strict=True), start=1):
        assert differences(one, two) == [], f"cell {number} of {name}.ipynb is stale: run make notebooks"
    assert pictures(now) == pictures(kept)


def test_stale_outputs_are_told() -> None:
    text = "llama1b on 2: 18 layouts\n0  dp2 z2 · mbs 4×1  61178.956  0.035"
    assert differences(text, text) == []
    assert differences(text, text.replace("0.035", "0.0354")) == []
    assert differences(text, text.replace("61178.956", "62178.956")) == ["61178.956 against 62178.956"]
    assert differences(text, text.replace("18 layouts", "19 layouts")) == ["18 against 19"]
    assert differences(text, text.replace("llama1b", "llama3b")) != []
    assert differences(text, text + " 3") != []


@pytest.mark.exhaustive(seconds=20)
def test_a_second_run_writes_the_same_file() -> None:
    name = "choosing_a_layout"
    again = tidy(fresh(name))
    assert [cell.get("id") for cell in again.cells] == [cell.get("id") for cell in read(name).cells]
    assert again.metadata == read(name).metadata


@pytest.mark.exhaustive(seconds=20)
def test_study_from_the_published_table() -> None:
    text = "\n".join(texts(fresh("study")))
    assert "32 / 65" in text
    assert "7 of 27 winners change" in text
    assert "27 of 27" in text


@pytest.mark.exhaustive(seconds=20)
def test_your_own_sweep_on_another_part() -> None:
    methods = [part.frame["method"].iloc[0] for part in split(load(RECORDED).attempts)]
    text = "\n".join(texts(executed("your_own_sweep", part=methods.index("rehearsed"))))
    assert "These are not measurements of a whole run" in text


@pytest.mark.exhaustive(seconds=20)
def test_choosing_a_layout_puts_rows_beside_predictions() -> None:
    text = "\n".join(texts(fresh("choosing_a_layout")))
    found = re.search(r"(\d+) points; the two orders agree by a rank correlation \(Spearman's\) of (\d\.\d+)", text)
    assert found is not None
    assert int(found[1]) > 20
    assert float(found[2]) > 0.8


def test_a_figure_by_name(frame: Any) -> None:
    assert isinstance(figure("outcomes", frame), Figure)
    missing = figure("bandwidth", frame)
    assert isinstance(missing, str)
    assert "not drawn, no " in missing
    with pytest.raises(InvalidResults, match="no figure called 'outcome'; did you mean outcomes"):
        figure("outcome", frame)

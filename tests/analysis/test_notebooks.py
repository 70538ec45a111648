"""The notebooks run from start to end, hold no outputs, and say nothing about the machine they were written on."""

from __future__ import annotations

import ast
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from matplotlib.figure import Figure
from nbclient import NotebookClient

from analysis.page.interactive import figure
from results.errors import InvalidResults

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "analysis" / "notebooks"
STUDY = ROOT.parent / "shared" / "study" / "bench_final2_mfu2.csv"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))


def read(name: str) -> Any:
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(name: str, **parameters: object) -> list[Any]:
    """Code cells after a run in the notebook's own folder; ``parameters`` replace what its first code cell sets."""
    notebook = read(name)
    place = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code")
    told = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    notebook.cells.insert(place + 1, nbformat.v4.new_code_cell(told))
    NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(FOLDER)}}).execute()
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def shown(cells: list[Any]) -> tuple[str, int]:
    """All text that the cells printed or showed, and how many pictures."""
    outputs = [output for cell in cells for output in cell.outputs]
    texts = [output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in outputs]
    return "\n".join(texts), sum("image/png" in output.get("data", {}) for output in outputs)


def test_there_are_three_notebooks() -> None:
    assert NOTEBOOKS == ["choosing_a_layout", "study", "your_own_sweep"]


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_notebooks_are_thin_and_clean(name: str) -> None:
    cells = read(name).cells
    code = [cell for cell in cells if cell.cell_type == "code"]
    assert not any(cell.outputs or cell.execution_count for cell in code)
    assert code[0].metadata["tags"] == ["parameters"]
    for cell in code:
        assert len(cell.source.splitlines()) <= 25
        source = ast.parse(re.sub(r"^%.*$", "", cell.source, flags=re.MULTILINE))
        assert not any(isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)) for node in ast.walk(source))
        assert not re.search(r"[\"']/(?!/)", cell.source), "an absolute path"
    assert all(isinstance(node, ast.Assign) for node in ast.parse(code[0].source).body)


def test_study_from_the_published_table() -> None:
    if not STUDY.is_file():
        pytest.skip(f"the study's raw table is not at {STUDY}")
    text, pictures = shown(executed("study", table=str(STUDY)))
    assert "4,083 points attempted" in text
    assert pictures == 6
    assert "not drawn" not in text
    assert "27 of 27 cells agree in layout, MFU and memory" in text


def test_your_own_sweep_on_the_recorded_rows() -> None:
    text, pictures = shown(executed("your_own_sweep"))
    assert "Measured: h200" in text
    assert pictures == 8
    assert "out of memory" in text


def test_your_own_sweep_on_another_part() -> None:
    text, _ = shown(executed("your_own_sweep", part=1))
    assert "These are not measurements of a whole run" in text


def test_choosing_a_layout_puts_rows_beside_predictions() -> None:
    cells = executed("choosing_a_layout")
    text, pictures = shown(cells)
    assert pictures == 1
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

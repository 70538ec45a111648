"""Runs the notebooks and keeps their outputs in them: ``python -m tests.analysis.run_notebooks [--study TABLE]``.

Outputs are those of the folder that the notebooks lie in, so that paths in them are relative. Pictures are cut to a
palette, and what only tells how and when a cell ran is left out: a second run writes the same files.
"""

from __future__ import annotations

import argparse
import base64
import io
import os
import sys
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from PIL import Image

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "analysis" / "notebooks"
STUDY = ROOT.parent / "shared" / "study" / "bench_final2_mfu2.csv"
NOTEBOOKS = sorted(path.stem for path in FOLDER.glob("*.ipynb"))
MOST_BYTES = 500_000
"""Of a notebook with its outputs."""
_COLOURS = 128
_WIDEST = 1000
"""Pixels of a picture."""


def read(name: str) -> Any:
    """A notebook as it is kept, with its outputs."""
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def executed(name: str, **parameters: object) -> Any:
    """The notebook after a run in its own folder; ``parameters`` replace what its first code cell sets."""
    notebook = read(name)
    place = next(i for i, cell in enumerate(notebook.cells) if cell.cell_type == "code") + 1
    told = "\n".join(f"{key} = {value!r}" for key, value in parameters.items())
    notebook.cells.insert(place, nbformat.v4.new_code_cell(told))
    client = NotebookClient(notebook, timeout=120, resources={"metadata": {"path": str(FOLDER)}})
    checkout = os.pathsep.join([str(ROOT), str(ROOT / "sweep" / "python")])  # this one, whichever is installed
    client.execute(env=os.environ | {"PYTHONPATH": checkout})
    del notebook.cells[place]
    return notebook


def tidy(notebook: Any) -> Any:
    """The notebook without what differs from run to run, its pictures made small."""
    number = 0
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        number += 1
        cell.execution_count = number
        cell.metadata.pop("execution", None)
        for output in cell.outputs:
            if "execution_count" in output:
                output["execution_count"] = number
            if "image/png" in output.get("data", {}):
                output["data"]["image/png"] = _small(output["data"]["image/png"])
    notebook.metadata["language_info"] = {"name": "python"}
    return notebook


def texts(notebook: Any) -> list[str]:
    """What each code cell printed and showed, as text; the sizes of pictures are left out."""
    told = []
    for cell in notebook.cells:
        if cell.cell_type == "code":
            outputs = [
                output.get("text", "") or output.get("data", {}).get("text/plain", "") for output in cell.outputs
            ]
            told.append("\n".join(text for text in outputs if not text.startswith("<Figure")))
    return told


def pictures(notebook: Any) -> int:
    """How many pictures it shows."""
    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    return sum("image/png" in output.get("data", {}) for output in outputs)


def _small(encoded: str) -> str:
    with Image.open(io.BytesIO(base64.b64decode(encoded))) as picture:
        small = picture.convert("RGB")
        small.thumbnail((_WIDEST, 10 * _WIDEST))
        file = io.BytesIO()
        small.quantize(_COLOURS, dither=Image.Dither.NONE).save(file, "PNG", optimize=True)
    return base64.b64encode(file.getvalue()).decode()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.analysis.run_notebooks", description=__doc__)
    parser.add_argument("--study", type=Path, default=STUDY, metavar="TABLE", help="the study's table (CSV)")
    study = parser.parse_args().study
    for name in NOTEBOOKS:
        if name == "study" and not study.is_file():
            print(f"study.ipynb stays as it is: {study} does not exist; --study TABLE names the study's table")
            continue
        parameters = {"table": str(study.resolve())} if name == "study" else {}
        text = nbformat.writes(tidy(executed(name, **parameters)))
        if len(text.encode()) > MOST_BYTES:
            print(
                f"error: {name}.ipynb would have {len(text.encode()):,} bytes, at most {MOST_BYTES:,}", file=sys.stderr
            )
            return 1
        (FOLDER / f"{name}.ipynb").write_text(text + "\n", encoding="utf-8")
        print(f"{name}.ipynb: {len(text.encode()):,} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Tables as files: CSV with every row in full precision; Markdown and LaTeX cut to a readable length, with a note."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from analysis.page import csv_file
from analysis.page.render import PageTable

MOST_ROWS = 50
"""Maximum number of rows of a table in Markdown and LaTeX."""
_LONGEST = 160
"""Maximum number of characters of a cell in Markdown and LaTeX; the evidence of a failure can be longer."""
_SUFFIXES = {"csv": ".csv", "md": ".md", "latex": ".tex"}
_MARKDOWN = str.maketrans({character: "\\" + character for character in "\\`*_{}[]<>#|~"})
_LATEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "~": r"\textasciitilde{}",
        "^": r"\textasciicircum{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': "''",
        **{character: "\\" + character for character in "&%$#_{}"},
        # Characters that LaTeX does not accept in UTF-8 by default; it accepts accents and the like.
        "×": r"$\times$",
        "−": r"$-$",
        "–": "--",
        "—": "---",
        "·": r"$\cdot$",
        "→": r"$\rightarrow$",
        "≤": r"$\leq$",
        "≥": r"$\geq$",
        "≈": r"$\approx$",
        "±": r"$\pm$",
        "…": r"\dots{}",
        "²": r"$^2$",
        "³": r"$^3$",
        "⁹": r"$^9$",
        "\u00a0": "~",
    }
)


@dataclass(frozen=True, slots=True)
class FileTable:
    """Table for files, with the columns of its readable forms if it has too many."""

    name: str
    frame: pd.DataFrame
    readable: tuple[str, ...] | None = None
    """Columns in Markdown and LaTeX; None: all columns."""


def write(tables: Iterable[FileTable], folder: Path, kinds: Sequence[str]) -> list[Path]:
    """Write a file for each table and kind (of `analysis.options.TABLE_KINDS`) into ``folder``; returns their paths.

    Raises `OSError` if a file cannot be written.
    """
    paths = []
    for table in tables:
        short = None
        for kind in kinds:
            path = folder / (table.name + _SUFFIXES[kind])
            if kind == "csv":
                csv_file.write(table.frame, path)
            else:
                columns = list(table.readable or table.frame.columns)
                short = short or shown(table.frame[columns], MOST_ROWS)
                path.write_text({"md": markdown, "latex": latex}[kind](short, table.name), encoding="utf-8")
            paths.append(path)
    return paths


def shown(frame: pd.DataFrame, most: int) -> PageTable:
    """The first ``most`` rows as texts: numbers to six digits, unknown values as a dash."""
    rows = [[_text(value) for value in row] for row in frame.head(most).itertuples(index=False, name=None)]
    return PageTable([str(name) for name in frame.columns], rows, len(frame))


def markdown(table: PageTable, name: str) -> str:
    """Table in GitHub's Markdown; ends with a sentence if rows are left out."""
    rows = [table.header, *table.rows]
    lines = ["| " + " | ".join(_one_line(cell).translate(_MARKDOWN) for cell in row) + " |" for row in rows]
    lines.insert(1, "|" + "---|" * len(table.header))
    if left_out := _left_out(table, name):
        lines += ["", left_out.translate(_MARKDOWN)]
    return "\n".join(lines) + "\n"


def latex(table: PageTable, name: str) -> str:
    """A ``tabular`` with rules by booktabs. A comment names the package it needs; a last row says if rows are left
    out."""
    columns = len(table.header)
    # Cells are escaped here: pandas escapes LaTeX's special characters, but not the others in `_LATEX`.
    rows = [[_latex_cell(cell) for cell in row] for row in table.rows]
    frame = pd.DataFrame(rows, columns=[_latex_cell(name) for name in table.header])
    text = frame.to_latex(index=False, escape=False, column_format="l" * columns)
    if left_out := _left_out(table, name):
        last = f"\\multicolumn{{{columns}}}{{l}}{{{left_out.translate(_LATEX)}}} \\\\\n"
        text = text.replace("\\end{tabular}", last + "\\end{tabular}")
    return "% Needs \\usepackage{booktabs}; wide tables fit with \\resizebox or a landscape page.\n" + text


def _latex_cell(text: str) -> str:
    # LaTeX would read a row that begins with "[" as the argument of the line break before it.
    return re.sub(r"^\[", "{[}", _one_line(text).translate(_LATEX))


def _left_out(table: PageTable, name: str) -> str:
    if table.total <= len(table.rows):
        return ""
    return f"The first {len(table.rows):,} of {table.total:,} rows; --tables csv writes all of them ({name}.csv)."


def _text(value: Any) -> str:
    if isinstance(value, float) and value.is_integer() and abs(value) < 1e15:
        return str(int(value))
    if isinstance(value, float) and value == value:
        return f"{value:.6g}"
    if isinstance(value, np.ndarray):
        value = value.tolist()
    if isinstance(value, (list, tuple)):
        return _short(str(list(value)))
    if pd.isna(value):
        return "–"
    return _short(str(value))


def _short(text: str) -> str:
    return text if len(text) <= _LONGEST else text[: _LONGEST - 1] + "…"


def _one_line(text: str) -> str:
    return " ".join(text.split())

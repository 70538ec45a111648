"""The generated parts of docs/architecture.md: the tree with one line a file, and what each room of launchers imports.

``python -m tests.tree_doc`` tells what is stale (exit status 1), ``python -m tests.tree_doc --write`` rewrites it. A
file's line is the first sentence of its module docstring (Python) or of the comment on its top (JavaScript).
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

from tests.test_arrows import LAUNCHERS, imports

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "architecture.md"
ROOMS = ("sweep", "workloads", "launchers", "results", "analysis")
DATA = {
    "sweep/conf/grid": "What to sweep: one file a grid.",
    "sweep/conf/model": "Shapes of models, with the published file that each comes from.",
    "sweep/conf/cluster": "Nodes and links: what the planner needs to know of a cluster.",
    "sweep/conf/device": "Memory and peak rates of one accelerator.",
    "sweep/conf/launcher": "Options of the three launchers, with their defaults.",
    "sweep/conf/measure": "How many steps are run before the timing and timed.",
    "workloads/text": "The public-domain book that training curves learn.",
    "results/recorded": "Rows of measured sweeps that ship with the code, each with a note.",
    "analysis/notebooks": "Notebooks over the same functions as the report; the tests run them.",
}
"""Folders that hold data: they are listed as one line each, whatever files are in them."""
_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)[.:?!]\)?(?=\s|$)")
_SOURCES = (".py", ".js")


def tree_lines() -> list[str]:
    """The tree as a Markdown list: a heading line for each folder that holds code, then a line for each of its files.

    An ``__init__.py`` has no line of its own: its sentence, where it has one, is that of its folder.
    """
    lines: list[str] = []
    for room in ROOMS:
        for folder in sorted({room, *(str(path.parent.relative_to(ROOT)) for path in source_files(room))}):
            sentence = first_sentence(ROOT / folder / "__init__.py")
            lines += [f"**`{folder}/`**{f' {sentence}' if sentence else ''}", ""]
            files = [path for path in source_files(room) if path.parent == ROOT / folder]
            lines += [f"- `{path.name}`: {first_sentence(path)}" for path in files]
            lines += [
                f"- `{name}/`: {what}" for name, what in DATA.items() if name.startswith(f"{room}/") and folder == room
            ]
            lines.append("")
    return lines[:-1]


def source_files(room: str) -> list[Path]:
    """Every source file of a room but ``__init__.py``, without folders of data."""
    found = [path for path in (ROOT / room).rglob("*") if path.suffix in _SOURCES and path.name != "__init__.py"]
    return sorted(path for path in found if not any(path.is_relative_to(ROOT / folder) for folder in DATA))


def first_sentence(path: Path) -> str:
    """The first sentence of what a source file says about itself; empty where it says nothing."""
    if not path.exists():
        return ""
    text = path.read_text()
    if path.suffix == ".py":
        about = ast.get_docstring(ast.parse(text)) or ""
    else:
        comment = re.match(r'\s*(?:"use strict";\s*)?/\*+\s*(.*?)\s*\*/', text, re.DOTALL)
        about = comment.group(1) if comment else ""
    paragraph = " ".join(re.split(r"\n\s*\n", about.strip())[0].split()).replace("``", "`")
    end = _SENTENCE_END.search(paragraph)
    while end is not None and end.group().startswith(":") and len(paragraph[: end.start()].split()) < 12:
        end = _SENTENCE_END.search(paragraph, end.end())  # a colon ends the sentence only where it is long enough
    sentence = (paragraph[: end.end()] if end else paragraph).rstrip(":").replace("|", "\\|")
    return sentence if not sentence or sentence.endswith((".", "?", "!", ".)")) else f"{sentence}."


def rooms_lines(old: list[str]) -> list[str]:
    """The table of the rooms of ``launchers``, from the lowest to the highest: the first two columns as they are in
    ``old``, the third from the imports in the code."""
    duties = {cells[1]: cells[2] for line in old if len(cells := [cell.strip() for cell in line.split("|")]) > 3}
    lines = ["| room | duty | imports, of `launchers/` |", "|---|---|---|"]
    for room in (*LAUNCHERS,):
        name = f"`{room}/`" if (ROOT / "launchers" / room).is_dir() else f"`{room}.py`"
        files = sorted((ROOT / "launchers" / room).rglob("*.py")) or [ROOT / "launchers" / f"{room}.py"]
        used = {m.split(".")[1] for file in files for m in imports(file) if m.startswith("launchers.")} - {room}
        told = ", ".join(f"`{other}`" for other in LAUNCHERS if other in used) or "none"
        lines.append(f"| {name} | {duties.get(name, '')} | {told} |")
    return lines


def renewed(page: str) -> str:
    """The page with its generated parts as the code has them now."""
    page = _replaced(page, "tree", tree_lines())
    return _replaced(page, "rooms", rooms_lines(_between(page, "rooms").splitlines()))


def _between(page: str, name: str) -> str:
    start, end = f"<!-- {name}: begin -->", f"<!-- {name}: end -->"
    return page.partition(start)[2].partition(end)[0]


def _replaced(page: str, name: str, lines: list[str]) -> str:
    before, marker, rest = page.partition(f"<!-- {name}: begin -->")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    assert marker and end, f"{PAGE}: no markers for {name!r}"
    return "\n".join([before + marker, "", *lines, "", end + after])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.tree_doc", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="rewrite the generated parts")
    options = parser.parse_args()
    old = PAGE.read_text()
    new = renewed(old)
    if options.write:
        PAGE.write_text(new)
    elif new != old:
        print(f"{PAGE.relative_to(ROOT)} is stale; python -m tests.tree_doc --write mends it")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())

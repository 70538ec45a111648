"""Writes what documents list from the code: docs/tree.md, and the folders in docs/architecture.md.

``python -m docs.tools.write_tree`` reports what is stale (exit status 1); with ``--write`` it writes them anew. A
file's line is the first sentence of its module docstring (Python) or of its first comment (JavaScript); a room's duty
is the docstring of its ``__init__.py``.
"""

from __future__ import annotations

import argparse
import ast
import re
import sys
from pathlib import Path

from tests.test_arrows import ORDER, PACKAGES, imports, room_of

ROOT = Path(__file__).parents[2]
TREE = ROOT / "docs" / "tree.md"
ROOMS = ROOT / "docs" / "architecture.md"
PAGES = (TREE, ROOMS)
FOLDERS = (*reversed(PACKAGES), "docs/tools")
DATA = {
    "sweep/conf/grid": "Grids: what to sweep, one file each.",
    "sweep/conf/model": "Shapes of models, each with the published file that it comes from.",
    "sweep/conf/cluster": "Clusters: nodes and links.",
    "sweep/conf/device": "Memory and peak rates of one accelerator.",
    "sweep/conf/launcher": "Options of the three launchers, with their defaults.",
    "sweep/conf/measure": "How many steps run before the timing, and how many are timed.",
    "results/recorded": "Rows of measured sweeps that ship with the code, each with a note.",
    "analysis/notebooks": "Notebooks over the same functions as the report; the tests run them.",
}
"""Folders that hold data, with one line each whatever files are in them."""
_SENTENCE_END = re.compile(r"(?<!e\.g)(?<!i\.e)[.:?!]\)?(?=\s|$)")
_SOURCES = (".py", ".js")


def tree_lines() -> list[str]:
    """The tree as a Markdown list: a heading line for each folder that holds code, then a line for each of its files.

    An ``__init__.py`` has no line: its sentence, if any, describes its folder.
    """
    lines: list[str] = []
    for room in FOLDERS:
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
    """Every source file of a room except ``__init__.py`` and folders of data."""
    sources = [path for path in (ROOT / room).rglob("*") if path.suffix in _SOURCES and path.name != "__init__.py"]
    return sorted(path for path in sources if not any(path.is_relative_to(ROOT / folder) for folder in DATA))


def first_sentence(path: Path) -> str:
    """The first sentence of a source file's docstring or comment; empty if it has none."""
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
        end = _SENTENCE_END.search(paragraph, end.end())  # a colon ends the sentence only if it is long enough
    sentence = (paragraph[: end.end()] if end else paragraph).rstrip(":").replace("|", "\\|")
    return sentence if not sentence or sentence.endswith((".", "?", "!", ".)")) else f"{sentence}."


def rooms_lines() -> list[str]:
    """The table of rooms: each package from its lowest room to its highest, its duty, and the rooms that it imports."""
    lines = ["| folder | duty | imports from the same package |", "|---|---|---|"]
    for package in PACKAGES:
        for room in ORDER[package]:
            path = ROOT / package / room.replace(".", "/")
            if not path.is_dir():
                continue
            used = {other for file in path.rglob("*.py") for m in imports(file) if (other := _room_in(package, m))}
            names = ", ".join(f"`{other}`" for other in ORDER[package] if other in used - {room}) or "none"
            lines.append(
                f"| `{package}/{room.replace('.', '/')}/` | {first_sentence(path / '__init__.py')} | {names} |"
            )
    return lines


def _room_in(package: str, module: str) -> str | None:
    return room_of(module) if module.startswith(package + ".") else None


def renewed(path: Path) -> str:
    """The page with its generated part as the code has it now."""
    page = path.read_text()
    return (
        _replaced(page, "tree", ["", *tree_lines(), ""])
        if path == TREE
        else _replaced(page, "rooms", ["", *rooms_lines(), ""])
    )


def _replaced(page: str, name: str, lines: list[str]) -> str:
    before, marker, rest = page.partition(f"<!-- {name}: begin -->")
    _, end, after = rest.partition(f"<!-- {name}: end -->")
    assert marker and end, f"no markers for {name!r}"
    return "\n".join([before + marker, *lines, end + after])


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m docs.tools.write_tree", description=__doc__.splitlines()[0])
    parser.add_argument("--write", action="store_true", help="write the generated parts anew")
    options = parser.parse_args()
    stale = [path for path in PAGES if renewed(path) != path.read_text()]
    for path in stale:
        if options.write:
            path.write_text(renewed(path))
        else:
            print(f"{path.relative_to(ROOT)} is stale; python -m docs.tools.write_tree --write renews it")
    return 0 if options.write or not stale else 1


if __name__ == "__main__":
    sys.exit(main())

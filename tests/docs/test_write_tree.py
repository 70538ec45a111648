"""The generated lists of files and rooms are those of the code, and every file says what it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from docs.tools import write_tree

ROOT = Path(__file__).resolve().parents[2]


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


@pytest.mark.slow
@pytest.mark.parametrize("page", write_tree.PAGES, ids=name_of)
def test_generated_lists_of_files_and_rooms_are_those_of_the_code(page: Path) -> None:
    assert page.read_text() == write_tree.renewed(page), "stale; python -m docs.tools.write_tree --write renews it"


def test_the_tree_lists_every_python_file_once() -> None:
    listed, folder = [], ""
    for line in write_tree.TREE.read_text().partition("<!-- tree: begin -->")[2].splitlines():
        if named := re.match(r"\*\*`([\w/]+/)`\*\*", line):
            folder = named.group(1)
        elif (named := re.match(r"- `([\w.]+\.py)`", line)) is not None:
            listed.append(folder + named.group(1))
    files = [
        name_of(path)
        for room in write_tree.FOLDERS
        for path in (ROOT / room).rglob("*.py")
        if path.name != "__init__.py" and not path.is_relative_to(ROOT / "results" / "recorded")
    ]
    assert sorted(listed) == sorted(files)


@pytest.mark.slow
def test_every_file_says_what_it_is() -> None:
    silent = [name_of(path) for room in write_tree.FOLDERS for path in write_tree.source_files(room)]
    assert [name for name in silent if not write_tree.first_sentence(ROOT / name)] == []


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        (
            '"""One thing: it does this, e.g. that (see `a.b`). And more."""',
            "One thing: it does this, e.g. that (see `a.b`).",
        ),
        ('"""One thing\nover two lines.\n\nMore."""', "One thing over two lines."),
        ('"""Without an end\n\nMore."""', "Without an end."),
        ("x = 1", ""),
    ],
)
def test_a_first_sentence(tmp_path: Path, text: str, sentence: str) -> None:
    (tmp_path / "module.py").write_text(text)
    assert write_tree.first_sentence(tmp_path / "module.py") == sentence

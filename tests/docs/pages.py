"""The documents' pages, and the commands and files that stand in them."""

from __future__ import annotations

import re
import shlex
import textwrap
from pathlib import Path

from sweep.composing.conffiles import GROUPS

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *(path for path in sorted(DOCS.rglob("*.md")) if not path.is_relative_to(DOCS / "lab")),  # history
]
WRITTEN_BY_HAND = [path for path in PAGES if path.parent != DOCS / "reference"]
"""The pages of docs/reference are written from the code, and checked where that is done."""
REFERENCE = (
    *(
        DOCS / f"{name}.md"
        for name in ("grids", "fields", "model_files", "models", "clusters", "configuration", "plans")
    ),
    *sorted((DOCS / "fields").glob("*.md")),
    *sorted((DOCS / "layers").glob("*.md")),
)
"""Pages about the files, fields and layers that describe a sweep."""


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def code_lines(page: str) -> list[str]:
    """The lines of a page's code blocks, without comments; a line that ends in a backslash is joined to the next."""
    page = re.sub(r" *\\\n *", " ", page)
    blocks = r"^ *```(\w*)\n(.*?)^ *```"
    fenced = [code for language, code in re.findall(blocks, page, re.DOTALL | re.MULTILINE) if language != "yaml"]
    indented = re.findall(r"^ {4,}(?!\|)(.+)$", re.sub(blocks, "", page, flags=re.DOTALL | re.MULTILINE), re.MULTILINE)
    lines = [*(line for block in fenced for line in block.splitlines()), *indented]
    return [line.partition(" # ")[0].strip() for line in lines]


def commands(page: str, module: str) -> list[list[str]]:
    """The words after ``python -m MODULE`` of every such line in the page's code blocks."""
    start = f"python -m {module} "
    return [shlex.split(line.removeprefix(start)) for line in code_lines(page) if line.startswith(start)]


def write_conf(page: str, folder: Path) -> Path:
    """Every YAML block of a page whose first line names its file, written below ``folder``."""
    blocks = re.findall(r"^( *)```yaml\n(.*?)^ *```", page, re.DOTALL | re.MULTILINE)
    for _, block in blocks:
        text = textwrap.dedent(block)
        named = re.match(r"# (conf/(\w+)/[\w.-]+\.yaml)\n", text)
        assert named, f"a YAML block does not begin with the name of its file: {text[:80]!r}"
        assert named.group(2) in GROUPS
        (folder / named.group(1)).parent.mkdir(parents=True, exist_ok=True)
        (folder / named.group(1)).write_text(text)
    (folder / "conf").mkdir(exist_ok=True)
    return folder / "conf"

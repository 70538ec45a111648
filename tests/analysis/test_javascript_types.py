"""The page's scripts agree with the types that their comments name: TypeScript's checker finds nothing."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TEMPLATES = Path(__file__).resolve().parents[2] / "analysis" / "templates"
COMPILER = "node_modules/typescript/bin/tsc"


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """The command of TypeScript's compiler. Skips where it cannot be installed."""
    if shutil.which("npm") is None or shutil.which("node") is None:
        pytest.skip("npm is not installed: no typescript")
    folder = tmp_path_factory.mktemp("typescript")
    install = ["npm", "install", "--no-save", "--no-audit", "--no-fund", "typescript@5.6.3"]
    if subprocess.run(install, cwd=folder, capture_output=True, timeout=120, check=False).returncode:
        pytest.skip("typescript could not be installed: no registry")
    return ["node", str(folder / COMPILER)]


def checked(compiler: list[str], project: Path) -> str:
    """What the compiler says of a project; empty when it finds nothing."""
    run = subprocess.run(
        [*compiler, "--project", str(project)], capture_output=True, text=True, timeout=120, check=False
    )
    return run.stdout + run.stderr


@pytest.mark.slow
def test_the_scripts_keep_their_types(compiler: list[str]) -> None:
    assert checked(compiler, TEMPLATES) == ""


@pytest.mark.slow
def test_a_wrong_type_is_found(compiler: list[str], tmp_path: Path) -> None:
    copy = shutil.copytree(TEMPLATES, tmp_path / "templates", ignore=shutil.ignore_patterns("vendor"))
    script = copy / "page" / "cost.js"
    wrong = [
        "/** @type {(part: Part) => number} */ const wrongName = (part) => part.capacty;",
        "/** @type {(column: Column) => string} */ const wrongKind = (column) => column.numbers;",
        "/** @type {(packed: PackedPart) => string} */ const wrongValue = (packed) => packed.points;",
    ]
    script.write_text("\n".join([script.read_text(), *wrong]))
    errors = [line for line in checked(compiler, copy).splitlines() if "cost.js" in line]
    assert len(errors) == len(wrong)

"""The page's scripts agree with the types that their comments name: TypeScript's checker finds nothing."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from analysis.index_page import assemble
from analysis.rows import cohorts
from tests.analysis import synthetic
from tests.analysis.conftest import frame_of
from tests.analysis.explorer_page import POINTS, results_of

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


@pytest.fixture
def templates(tmp_path: Path) -> Path:
    """A copy of the scripts."""
    return shutil.copytree(TEMPLATES, tmp_path / "templates", ignore=shutil.ignore_patterns("vendor"))


@pytest.fixture
def data(tmp_path: Path) -> dict[str, Any]:
    """What Python gives to the scripts."""
    results = results_of(frame_of(synthetic.attempts(POINTS)), tmp_path)
    return assemble.data(results, cohorts.split(results.attempts), tmp_path, 2.5)


def give(data: dict[str, Any], templates: Path) -> None:
    text = f"/** @type {{RunsData}} */\nconst given = {json.dumps(data)};\n"
    (templates / "page" / "given.js").write_text(text)


@pytest.mark.slow(seconds=5)
def test_the_scripts_keep_their_types_and_python_gives_what_they_say(
    compiler: list[str], templates: Path, data: dict[str, Any]
) -> None:
    give(data, templates)
    assert checked(compiler, templates) == ""


@pytest.mark.slow(seconds=5)
def test_wrong_types_of_scripts_and_of_data_are_found(
    compiler: list[str], templates: Path, data: dict[str, Any]
) -> None:
    data["page"]["parts"][0] |= {"capacity": "80 GiB", "unknown": 1}
    give(data, templates)
    script = templates / "page" / "cost.js"
    wrong = [
        "/** @type {(part: Part) => number} */ const wrongName = (part) => part.capacty;",
        "/** @type {(column: Column) => string} */ const wrongKind = (column) => column.numbers;",
        "/** @type {(packed: PackedPart) => string} */ const wrongValue = (packed) => packed.points;",
    ]
    script.write_text("\n".join([script.read_text(), *wrong]))
    lines = checked(compiler, templates).splitlines()
    assert len([line for line in lines if "cost.js" in line]) == len(wrong)
    assert any("given.js" in line for line in lines)

"""What is declared in pyproject.toml is what the code uses, and a wheel holds all that a run needs."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import tomllib
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("sweep", "workloads", "launchers", "results", "analysis")
INTERFACE = "ultrasweep"
"""The Python interface, a package in sweep/python."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
MODULE_OF = {
    "hydra-core": "hydra",
    "nvidia-ml-py": "pynvml",
    "pillow": "PIL",
    "pyyaml": "yaml",
}
"""Distributions whose module has another name."""
NOT_IMPORTED = {
    "ipykernel": "nbclient starts it to run the notebooks",
    "mypy": "a command",
    "pandas-stubs": "types for mypy",
    "pre-commit": "a command",
    "pytest-timeout": "a plugin of pytest",
    "pytest-xdist": "a plugin of pytest",
    "ruff": "a command",
    "types-pyyaml": "types for mypy",
}

ENGINES = {"accelerate", "deepspeed", "megatron", "torchtitan", "transformers"}
"""Other engines, installed beside by `tests/sweep/engine_configs/packages`: tests with their parsers skip without."""


def name_of(requirement: str) -> str:
    """The name of a distribution in its normal form, without its versions."""
    found = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert found, requirement
    return re.sub(r"[-_.]+", "-", found.group()).lower()


@cache
def imported(folders: tuple[str, ...]) -> set[str]:
    """Top-level modules that the Python files and notebooks of some folders import."""
    sources = [path.read_text() for folder in folders for path in (ROOT / folder).rglob("*.py")]
    for folder in folders:
        for path in (ROOT / folder).rglob("*.ipynb"):
            cells = json.loads(path.read_text())["cells"]
            code = [line for cell in cells if cell["cell_type"] == "code" for line in cell["source"]]
            sources.append("\n".join(line.rstrip() for line in code if not line.startswith("%")))
    modules: set[str] = set()
    for source in sources:
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                modules |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module:
                modules.add(node.module.split(".")[0])
    return modules


def declared(requirements: list[str]) -> dict[str, str]:
    """Module by distribution."""
    names = map(name_of, requirements)
    return {name: MODULE_OF.get(name, name.replace("-", "_")) for name in names}


EXTRAS: dict[str, list[str]] = PROJECT["optional-dependencies"]
OTHER_ENGINES = ENGINES & {name for extra, needed in EXTRAS.items() for name in (extra, *declared(needed))}
"""Those of them that a point may run on: as an extra of their name, or beside one."""
RUNTIME = declared(PROJECT["dependencies"])
GPU = declared([*EXTRAS["gpu"], *EXTRAS["engine"]])
DEVELOPMENT = declared(PROJECT["optional-dependencies"]["dev"])


@pytest.mark.slow(seconds=2)
def test_every_dependency_is_imported() -> None:
    shipped, tests = imported(PACKAGES), imported(("tests",))
    assert {name for name, module in {**RUNTIME, **GPU}.items() if module not in shipped} == set()
    unused = {name for name, module in DEVELOPMENT.items() if module not in shipped | tests}
    assert unused == set(NOT_IMPORTED), "used by name only: give the reason in NOT_IMPORTED"


@pytest.mark.slow
def test_every_import_is_a_dependency() -> None:
    known = {*sys.stdlib_module_names, *PACKAGES, INTERFACE, "docs", "tests"}
    assert imported(PACKAGES) - known <= {*RUNTIME.values(), *GPU.values(), *OTHER_ENGINES}
    assert imported(("tests",)) - known - ENGINES <= {*RUNTIME.values(), *GPU.values(), *DEVELOPMENT.values()}


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = {name_of(line) for line in lines if line and not line.startswith("#")}
    assert {*RUNTIME, *GPU, *DEVELOPMENT} <= pinned
    assert len(pinned) == len([line for line in lines if "==" in line]), "a package is pinned twice"


@pytest.mark.parametrize("package", (*PACKAGES, "sweep/python/ultrasweep"))
def test_packages_say_that_they_are_typed(package: str) -> None:
    assert (ROOT / package / "py.typed").is_file()


_OF_THE_WHEEL = """
import json, setuptools
from setuptools.config.pyprojecttoml import apply_configuration
wheel = setuptools.Distribution({"src_root": "."})
apply_configuration(wheel, "pyproject.toml", ignore_option_errors=True)
print(json.dumps([wheel.packages, wheel.package_dir]))
"""


def test_a_wheel_has_the_interface_once_and_every_package_of_the_code() -> None:
    """Asked in a process of its own: setuptools replaces distutils, which must not have been imported before."""
    pytest.importorskip("_distutils_hack", reason="needs setuptools")
    done = subprocess.run([sys.executable, "-c", _OF_THE_WHEEL], cwd=ROOT, capture_output=True, text=True, check=True)
    listed, folders = json.loads(done.stdout.splitlines()[-1])
    packages = set(listed)
    assert folders[INTERFACE] == "sweep/python/ultrasweep"
    assert {INTERFACE, *PACKAGES} <= packages
    assert [name for name in packages if name.startswith("sweep.python")] == []
    code = {path.parent for package in PACKAGES for path in (ROOT / package).rglob("__init__.py")}
    names = {".".join(path.relative_to(ROOT).parts) for path in code if ROOT / "sweep" / "python" not in path.parents}
    assert names <= packages


def test_changelog_and_citation_name_the_version() -> None:
    version = PROJECT["version"]
    assert re.search(rf"^## \[{re.escape(version)}\] - (\d{{4}}-\d\d-\d\d)$", (ROOT / "CHANGELOG.md").read_text(), re.M)
    assert re.search(rf"^version: {re.escape(version)}$", (ROOT / "CITATION.cff").read_text(), re.M)


@pytest.mark.parametrize(
    ("module", "name"),
    [("sweep", "results"), ("sweep", "analysis"), ("analysis.report", "results"), ("analysis.compare", "workloads")],
)
def test_a_file_of_the_user_that_hides_a_package_is_named(tmp_path: Path, module: str, name: str) -> None:
    """`python -m` looks into the working folder first. The installed commands do not."""
    (tmp_path / f"{name}.py").write_text("x = 1\n")
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", module, "--help"]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and not done.stdout
    [line] = done.stderr.splitlines()
    assert line.startswith(f"ultrasweep: {tmp_path / name}.py hides ultrasweep's package '{name}': rename the file")


def test_a_folder_of_results_hides_nothing(tmp_path: Path) -> None:
    (tmp_path / "results").mkdir()
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    subprocess.run([sys.executable, "-m", "sweep", "--help"], cwd=tmp_path, env=env, capture_output=True, check=True)

"""Folders import only downwards, and heavy libraries stay in their rooms (see CONTRIBUTING.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("results", "workloads", "launchers", "sweep")
"""From the lowest to the highest; each may import itself and what stands before it."""
ANALYSIS_MAY_IMPORT = (
    "workloads.experiment",
    "workloads.model_spec",
    "workloads.costs",
    "workloads.checks",
    "workloads.cluster",
    "workloads.engine_support",
    "workloads.errors",
    "workloads.expressions",
    "workloads.mesh",
    "workloads.recomputation",
    "workloads.record",
    "workloads.rules",
    "results",
    "analysis",
)
LAUNCHERS = ("settings", "interrupts", "state", "node", "attempt", "pilot", "status", "slurm", "local")
"""Rooms and files of ``launchers``, from the lowest to the highest."""
ANALYSIS = {
    "rows": (),
    "memory": ("rows",),
    "figures": ("rows", "memory"),
    "claims": ("rows",),
    "page": ("rows", "figures", "claims"),
    "explorer": ("rows", "page"),
    "index_page": ("rows", "figures", "claims", "page", "explorer"),
    "compare": ("rows", "figures", "page"),
    "training_curves": ("figures",),
    "search_regret": ("figures",),
    "options": (),
    "report": ("rows", "figures", "page", "claims", "explorer", "index_page", "options"),
}
"""Rooms and files of ``analysis``, from the lowest to the highest, and what each imports of the others."""
TORCH_FREE = (
    "workloads/beats.py",
    "workloads/checks.py",
    "workloads/clock.py",
    "workloads/costs",
    "workloads/predict",
    "workloads/cluster.py",
    "workloads/engine_support.py",
    "workloads/errors.py",
    "workloads/experiment.py",
    "workloads/model_spec.py",
    "workloads/expressions.py",
    "workloads/mesh.py",
    "workloads/protocol.py",
    "workloads/recipe.py",
    "workloads/curves/runs.py",
    "workloads/record.py",
    "workloads/rules.py",
    "workloads/stages.py",
    "workloads/units.py",
)
CONFINED = {
    "torch": ("workloads",),
    "triton": ("workloads",),
    "submitit": ("launchers/slurm/batch_file.py",),
    "hydra": ("sweep",),
    "omegaconf": ("sweep",),
    "matplotlib": ("analysis",),
}
SOURCES = sorted(p for room in (*ROOMS, "analysis") for p in (ROOT / room).rglob("*.py") if "recorded" not in p.parts)


def imports(path: Path) -> set[str]:
    """Every module that a file imports anywhere, also inside functions and for annotations alone."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            found |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def below(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


@pytest.mark.parametrize("path", SOURCES, ids=lambda p: str(p.relative_to(ROOT)))
def test_imports_point_downwards(path: Path) -> None:
    relative = path.relative_to(ROOT)
    room = relative.parts[0]
    for module in imports(path):
        top = module.split(".")[0]
        if room == "analysis":
            if top in (*ROOMS, "analysis") and module != "workloads":
                assert any(below(module, allowed) for allowed in ANALYSIS_MAY_IMPORT), f"{relative} imports {module}"
        elif top in (*ROOMS, "analysis"):
            assert top in ROOMS[: ROOMS.index(room) + 1], f"{relative} imports {module}"
        for library, homes in CONFINED.items():
            if below(module, library):
                assert any(str(relative).startswith(home) for home in homes), f"{relative} imports {module}"
        if any(str(relative).startswith(free) for free in TORCH_FREE):
            assert not below(module, "torch"), f"{relative} imports {module}"


def modules_of(path: Path) -> str:
    return ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "launchers")], ids=modules_of)
def test_launchers_rooms_point_downwards(path: Path) -> None:
    parts = modules_of(path).split(".")
    if len(parts) == 1:
        return
    for module in imports(path):
        if module.startswith("launchers."):
            room = module.split(".")[1]
            assert LAUNCHERS.index(room) <= LAUNCHERS.index(parts[1]), f"{modules_of(path)} imports {module}"


@pytest.mark.parametrize("path", [p for p in SOURCES if p.is_relative_to(ROOT / "analysis")], ids=modules_of)
def test_analysis_rooms_point_downwards(path: Path) -> None:
    parts = modules_of(path).split(".")
    for module in imports(path) - {"analysis"}:
        if len(parts) > 1 and module.startswith("analysis."):
            room = module.split(".")[1]
            assert room == parts[1] or room in ANALYSIS[parts[1]], f"{modules_of(path)} imports {module}"


def test_analysis_rooms_have_an_order() -> None:
    rooms = list(ANALYSIS)
    assert all(rooms.index(below_it) < rooms.index(room) for room in rooms for below_it in ANALYSIS[room])


def test_no_ring_of_modules() -> None:
    """No module imports itself through others, anywhere: imports inside functions and for annotations count too."""
    names = {modules_of(path): path for path in SOURCES}
    arrows = {name: {m for m in imports(path) if m in names} - {name} for name, path in names.items()}
    done: set[str] = set()

    def visit(name: str, above: tuple[str, ...]) -> None:
        assert name not in above, " -> ".join([*above[above.index(name) :], name])
        if name not in done:
            for below_it in sorted(arrows[name]):
                visit(below_it, (*above, name))
            done.add(name)

    for name in sorted(names):
        visit(name, ())


def test_a_local_run_needs_nothing_of_slurm() -> None:
    code = "import sys, launchers.local, launchers.pilot.pilot; print([m for m in sys.modules if 'slurm' in m.lower()])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.parametrize("module", ["sweep.__main__", "analysis.report", "launchers.local", "workloads.costs.memory"])
def test_planner_and_report_start_without_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_test_of_arrows_sees_files() -> None:
    assert len(SOURCES) > 30


def test_files_of_the_engine_can_be_read_in_one_sitting() -> None:
    """At most 300 lines each, and each says first what it is for."""
    for path in (ROOT / "workloads" / "engine").rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        assert ast.get_docstring(ast.parse(text)), f"{path} does not say what it is for"

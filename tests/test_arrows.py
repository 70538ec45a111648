"""Folders import only downwards, and heavy libraries stay in their rooms (see docs/architecture.md)."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = ("results", "workloads", "launchers", "sweep", "analysis")
"""From the lowest to the highest; each may import itself and those before it; for `analysis` see below."""
INTERFACE = "ultrasweep"
"""The Python interface, a package in `sweep/python`: the highest of all."""
LEVELS = (*PACKAGES, INTERFACE)
ORDER = {
    "results": ("errors", "shared_filesystem", "text", "tables", "statistics", "export", "upgrade"),
    "workloads": (
        "spec",
        "costs.shape",
        "rules",
        "costs.memory",
        "costs.traffic",
        "costs.time",
        "predict",
        "contract",
        "engine.ops",
        "engine.kind_ops",
        "engine.update_ops",
        "engine.collectives",
        "engine.layers",
        "engine.training",
        "engine.observing",
        "measuring",
        "adapters",
        "parity",
        "probe",
        "rehearse",
        "worker",
    ),
    "launchers": ("settings", "interrupts", "state", "node", "attempt", "pilot", "status", "slurm", "doctor", "local"),
    "sweep": (
        "grids",
        "composing",
        "predicting",
        "planning",
        "inspecting",
        "engine_configs",
        "advising",
        "running",
        "cards",
        "searching",
        "cli",
        "__main__",
    ),
    "analysis": (
        "options",
        "drawing",
        "rows",
        "claims",
        "memory",
        "figures",
        "page",
        "compare",
        "to_javascript",
        "explorer",
        "index_page",
        "report",
    ),
    INTERFACE: ("given", "advice", "layout_memory", "measured", "plans", "predictions"),
}
"""Rooms and files of each package, from the lowest to the highest. A room imports only itself and rooms before it."""
ANALYSIS_MAY_IMPORT = ("workloads.costs", "workloads.rules", "workloads.spec", "results", "analysis")
"""Of the packages below it; `analysis` imports neither `launchers` nor `sweep`."""
TORCH_FREE = ("workloads/contract", "workloads/costs", "workloads/predict", "workloads/rules", "workloads/spec")
CONFINED = {
    "torch": ("workloads",),
    "triton": ("workloads",),
    "submitit": ("launchers/slurm/sbatch.py", "launchers/slurm/submitit_names.py"),
    "hydra": ("sweep",),
    "omegaconf": ("sweep",),
    "matplotlib": ("analysis",),
}
MOST_MODULES = 25
"""In one folder; `analysis/figures` has one file a figure."""
SOURCES = sorted(p for room in PACKAGES for p in (ROOT / room).rglob("*.py") if "recorded" not in p.parts)


def statements(tree: ast.Module) -> Iterator[ast.AST]:
    """Every statement of a file: an import is never a part of an expression, and most of a tree is expressions."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        yield node
        for field in ("body", "orelse", "finalbody", "handlers", "cases"):
            below = getattr(node, field, ())
            waiting += below if isinstance(below, list) else ()


@cache
def imports(path: Path) -> frozenset[str]:
    """Every module that a file imports anywhere, also inside functions and for annotations alone."""
    modules: set[str] = set()
    for node in statements(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            assert node.module is not None
            modules |= {node.module} | {f"{node.module}.{alias.name}" for alias in node.names}
    return frozenset(modules)


def below(module: str, package: str) -> bool:
    return module == package or module.startswith(package + ".")


def module_of(path: Path) -> str:
    module = ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    return module.removeprefix("sweep.python.")


def room_of(module: str) -> str | None:
    """The room or file of `ORDER` that holds a module of this project; None for a package itself."""
    package, _, rest = module.partition(".")
    return next((room for room in ORDER[package] if below(rest, room)), None)


def wrong_imports(path: Path) -> list[str]:
    """What a file imports although it lies in a higher package or room, or belongs to another room."""
    relative, module = path.relative_to(ROOT).as_posix(), module_of(path)
    package, room = module.split(".")[0], room_of(module)
    order = ORDER[package]
    wrong: list[str] = []
    for name in sorted(imports(path)):
        top = name.split(".")[0]
        if top == package and (other := room_of(name)) is not None:
            if room is not None and order.index(other) > order.index(room):
                wrong.append(name)
        elif package == "analysis" and top in LEVELS and name != "workloads":
            if not any(below(name, allowed) for allowed in ANALYSIS_MAY_IMPORT):
                wrong.append(name)
        elif top in LEVELS and LEVELS.index(top) > LEVELS.index(package):
            wrong.append(name)
        for library, homes in CONFINED.items():
            if below(name, library) and not relative.startswith(homes):
                wrong.append(name)
        if below(name, "torch") and relative.startswith(TORCH_FREE):
            wrong.append(name)
    return wrong


def test_imports_point_downwards() -> None:
    assert len(SOURCES) > 300, "the test does not see the files"
    wrong = {str(path.relative_to(ROOT)): names for path in SOURCES if (names := wrong_imports(path))}
    assert wrong == {}


def test_every_file_lies_in_a_room_of_the_order() -> None:
    modules = [m for m in map(module_of, SOURCES) if "." in m and m != "sweep.conf"]
    homeless = [m for m in modules if room_of(m) is None and not is_parent(m)]
    assert homeless == []


def is_parent(module: str) -> bool:
    """Whether rooms lie below a package without code of its own, such as `workloads.costs`."""
    package, _, rest = module.partition(".")
    return any(room.startswith(rest + ".") for room in ORDER[package])


def test_an_import_that_points_upwards_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys.modules[__name__], "ROOT", tmp_path)
    cases = {
        "workloads/spec/units.py": ("import launchers.local", "from workloads.costs.shape import flops"),
        "workloads/rules/layout_rules.py": ("import torch",),
        "launchers/node/agent.py": ("from launchers import pilot", "import sweep", "import submitit"),
        "sweep/grids/grid.py": ("from sweep.planning.plan import Plan",),
        "analysis/rows/load.py": ("from analysis.report import main", "import launchers.local", "import ultrasweep"),
        "sweep/planning/plan.py": ("import ultrasweep", "from analysis.rows.load import load"),
        "sweep/python/ultrasweep/given.py": ("import torch", "from ultrasweep.plans import plan"),
    }
    for name, lines in cases.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True)
        for line in lines:
            path.write_text(line)
            imports.cache_clear()
            assert wrong_imports(path), f"{name}: {line}"
    imports.cache_clear()


@pytest.mark.slow
def test_no_ring_of_modules() -> None:
    """No module imports itself through others, anywhere: imports inside functions and for annotations count too."""
    names = {module_of(path): path for path in SOURCES}
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


def test_no_folder_has_more_modules_than_a_reader_can_keep_apart() -> None:
    modules: dict[Path, int] = {}
    for path in SOURCES:
        if path.name != "__init__.py":
            modules[path.parent] = modules.get(path.parent, 0) + 1
    del modules[ROOT / "analysis" / "figures"]
    assert {str(folder): count for folder, count in modules.items() if count > MOST_MODULES} == {}


@pytest.mark.slow
def test_a_local_run_needs_nothing_of_slurm() -> None:
    code = "import sys, launchers.local, launchers.pilot.pilot; print([m for m in sys.modules if 'slurm' in m.lower()])"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"


@pytest.mark.slow
@pytest.mark.parametrize(
    "module", ["sweep.__main__", "analysis.report", "launchers.local", "workloads.costs.memory.estimate"]
)
def test_planner_and_report_start_without_torch(module: str) -> None:
    code = f"import sys, {module}; print('torch' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


@pytest.mark.slow
def test_status_starts_without_pandas() -> None:
    code = "import sys, sweep.inspecting.status; print('pandas' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "False"


def test_files_of_the_engine_can_be_read_in_one_sitting() -> None:
    """At most 300 lines each, and each says first what it is for."""
    for path in (ROOT / "workloads" / "engine").rglob("*.py"):
        text = path.read_text()
        assert len(text.splitlines()) <= 300, path
        assert ast.get_docstring(ast.parse(text)), f"{path} does not say what it is for"

"""Sources of modules as syntax trees, and the definition that a name in them stands for."""

from __future__ import annotations

import ast
import importlib.util
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path


class NotPortable(Exception):
    """Raised for Python outside the subset that is translated: one line with file, line and the construct."""


@dataclass(frozen=True)
class Definition:
    """A function, a class or a constant of a module."""

    module: str
    name: str
    node: ast.AST

    @property
    def key(self) -> tuple[str, str]:
        return self.module, self.name


@dataclass(frozen=True)
class Module:
    """A module's source: its own definitions, and what it imports."""

    name: str
    path: Path
    defined: dict[str, ast.AST] = field(default_factory=dict)
    imported: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """(module, name in it) by local name; without a name for a module itself."""

    def refuse(self, node: ast.AST, what: str) -> NotPortable:
        where = "/".join(self.path.parts[-self.name.count(".") - 1 :])
        return NotPortable(f"{where}:{getattr(node, 'lineno', 0)}: {what} has no translation to JavaScript")


@cache
def load(name: str) -> Module:
    """The module of this name, parsed but not imported."""
    spec = importlib.util.find_spec(name)
    assert spec is not None and spec.origin is not None, name
    module = Module(name, Path(spec.origin))
    _collect(module, ast.parse(module.path.read_text(encoding="utf-8")).body)
    return module


def _collect(module: Module, body: list[ast.stmt]) -> None:
    for node in body:
        match node:
            case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
                module.defined[name] = node
            case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
                module.defined.setdefault(name, node)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                for target, value in zip(targets, values, strict=True):
                    if isinstance(target, ast.Name):
                        module.defined[target.id] = ast.copy_location(ast.Assign([target], value), node)
            case ast.Assign(targets=[ast.Tuple(elts=targets)], value=value):
                for place, target in enumerate(targets):
                    if isinstance(target, ast.Name):
                        one = ast.Subscript(value, ast.Constant(place), ast.Load())
                        module.defined[target.id] = ast.copy_location(ast.Assign([target], one), node)
            case ast.Import(names=names):
                for alias in names:
                    module.imported[alias.asname or alias.name.split(".")[0]] = (alias.name, None)
            case ast.ImportFrom(module=str(source), names=names):
                for alias in names:
                    module.imported[alias.asname or alias.name] = (source, alias.name)
            case ast.If(body=inner, orelse=others):
                _collect(module, [*inner, *others])
            case _:
                pass


def is_ours(module: str) -> bool:
    """Whether a module is part of this program, and not a library."""
    return module.split(".")[0] in ("results", "workloads", "analysis", "tests")


def is_there(module: str) -> bool:
    """Whether there is a module of this name, in a package that there is."""
    package = module.rpartition(".")[0]
    return (not package or is_there(package)) and importlib.util.find_spec(module) is not None


@cache
def find(module: str, name: str) -> Definition | tuple[str, str | None] | None:
    """What ``name`` stands for in a module: a definition of this program; (library, name in it); a module of this
    program as (module, None); None if it is neither defined nor imported there."""
    own = load(module)
    if name in own.defined:
        return Definition(module, name, own.defined[name])
    if name not in own.imported:
        return None
    source, original = own.imported[name]
    if not is_ours(source):
        return source, original
    if original is None:
        return source, None
    found = find(source, original)
    if found is None and importlib.util.find_spec(f"{source}.{original}") is not None:
        return f"{source}.{original}", None
    return found

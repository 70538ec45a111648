"""The page docs/reference/python.md: functions and dataclasses of the package ultrasweep, from their docstrings."""

from __future__ import annotations

import ast
import inspect
import re
import textwrap
from collections.abc import Iterator
from types import FunctionType
from typing import Any

import ultrasweep

_WIDTH = 100
_NAMES = {"Conf": "str | Path | Sequence[str | Path]"}
"""Names of types in the code, and what they stand for."""


def interface_parts() -> list[str]:
    """The page's paragraphs in Markdown: every function with the dataclass that it returns."""
    public = [getattr(ultrasweep, name) for name in ultrasweep.__all__]
    parts = [_prose(inspect.getdoc(ultrasweep) or "")]
    for one in sorted((one for one in public if isinstance(one, FunctionType)), key=lambda one: one.__name__):
        parts += [f"## {one.__name__}", f"```python\n{_signature(one)}\n```", _prose(inspect.getdoc(one) or "")]
        answer = getattr(ultrasweep, one.__annotations__["return"])
        parts += [f"It returns the dataclass `{one.__annotations__['return']}`:", _fields(answer)]
    return parts


def undocumented() -> list[str]:
    """Fields, parameters, functions and dataclasses of the interface that the page does not explain."""
    public = {name: getattr(ultrasweep, name) for name in ultrasweep.__all__}
    functions = {name: one for name, one in public.items() if isinstance(one, FunctionType)}
    silent = [name for name, one in public.items() if not inspect.getdoc(one)]
    for name, one in functions.items():
        text = inspect.getdoc(one) or ""
        silent += [f"{name}({p})" for p in inspect.signature(one).parameters if not re.search(rf"``{p}``", text)]
        answer = one.__annotations__["return"]
        silent += [f"{answer}.{field}" for field, _, meaning in _fields_of(public[answer]) if not meaning]
    return silent


def _signature(function: FunctionType) -> str:
    """The signature as it is written, one parameter a line if it is long."""
    parameters = [_parameter(one) for one in inspect.signature(function).parameters.values()]
    if (by_name := function.__code__.co_kwonlyargcount) > 0:
        parameters.insert(len(parameters) - by_name, "*")
    begin, end = f"ultrasweep.{function.__name__}(", f") -> {function.__annotations__['return']}"
    line = begin + ", ".join(parameters) + end
    return line if len(line) <= _WIDTH else "\n".join([begin, *(f"    {one}," for one in parameters), end])


def _parameter(one: inspect.Parameter) -> str:
    default = "" if one.default is inspect.Parameter.empty else f" = {one.default!r}"
    return f"{one.name}: {_NAMES.get(one.annotation, one.annotation)}{default}"


def _fields(kind: type[Any]) -> str:
    rows = [f"| `{name}` | `{annotation}` | {meaning} |" for name, annotation, meaning in _fields_of(kind)]
    return "\n".join(["| field | type | meaning |", "|---|---|---|", *rows])


def _fields_of(kind: type[Any]) -> Iterator[tuple[str, str, str]]:
    """Name, type and the text below each field of a dataclass."""
    definition = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(definition, ast.ClassDef)
    for statement, after in zip(definition.body, [*definition.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            said = isinstance(after, ast.Expr) and isinstance(after.value, ast.Constant)
            meaning = str(after.value.value) if said else ""  # type: ignore[union-attr]
            annotation = ast.unparse(statement.annotation).replace("|", "\\|")
            yield statement.target.id, annotation, _prose(meaning).replace("|", "\\|").replace("\n\n", " ")


def _prose(text: str) -> str:
    """Paragraphs of a docstring on one line each, in Markdown."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text))
    return "\n\n".join(" ".join(one.split()).replace("``", "`") for one in paragraphs)

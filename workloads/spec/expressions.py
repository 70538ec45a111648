"""A small language of arithmetic and comparisons over names, for a grid's ``derive`` and ``where`` and the planner's
rules.

Python parses an expression, and every node is checked against a list of allowed ones. Only checked nodes become the
source of a function, which is compiled once and then runs as fast as Python. Attributes, subscripts, powers, and calls
of all but a few functions are refused, and no builtin can be reached. `as_data` gives an expression as JSON, for
readers in other languages.
"""

from __future__ import annotations

import ast
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from workloads.spec.checks import LARGEST, shown
from workloads.spec.errors import InvalidSweep

Evaluator = Callable[[Mapping[str, Any]], Any]
Functions = Mapping[str, Callable[..., Any]]
Data = str | int | float | list[Any]
"""An expression as JSON, see `as_data`."""


@dataclass(frozen=True, slots=True)
class Expression:
    text: str
    names: frozenset[str]
    """Variables that the expression uses."""
    evaluate: Evaluator
    """Takes the values of the variables by name and returns the value of the expression. Raises the errors of Python's
    operators (ZeroDivisionError, TypeError)."""


@dataclass(frozen=True, slots=True)
class Template:
    """A sentence with expressions in braces: ``tp={tp} does not divide {num_heads // 2}``."""

    parts: tuple[str | Expression, ...]
    """Plain text and expressions, in their order."""

    def fill(self, values: Mapping[str, Any]) -> str:
        """The sentence with these values of its variables. A list is written with commas between its members."""
        return "".join(part if isinstance(part, str) else _shown(part.evaluate(values)) for part in self.parts)


def parse(text: object, label: str, functions: Functions | None = None) -> Expression:
    """Parses the expression in ``text``; ``label`` says in messages where it stands. Raises `InvalidSweep` if something
    in it is not allowed.

    ``functions``: the functions that may be called, by name; by default ``min``, ``max`` and ``abs``.
    """
    functions = _FUNCTIONS if functions is None else functions
    if isinstance(text, (bool, int)):
        if abs(text) > LARGEST:
            raise InvalidSweep(f"{label}: {shown(text)} is above {LARGEST:g}")
        text = str(text)  # YAML reads an expression that is a single number as a number
    if not isinstance(text, str):
        raise InvalidSweep(f"{label}: {shown(text)} is not an expression; write it as text")
    names: set[str] = set()

    def variable(name: str) -> str:
        names.add(name)
        return f"env[{name!r}]"

    deep = f"{label}: the expression is nested too deeply"
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise InvalidSweep(f"{label}: cannot read {shown(text)}; an example: world_size / (tp * pp)") from None
    except (RecursionError, MemoryError):
        raise InvalidSweep(deep) from None
    try:
        evaluate = _compiled(f"lambda env: {_source(tree.body, functions, variable)}", functions)
    except _NotAllowed as error:
        raise InvalidSweep(
            f"{label}: {error} in {shown(text)} is not allowed; use names, numbers, + - * / // %, comparisons, in, "
            f"and, or, not, if-else, {', '.join(sorted(functions))}"
        ) from None
    except (RecursionError, MemoryError, SyntaxError):  # more brackets than Python's parser accepts
        raise InvalidSweep(deep) from None
    return Expression(text.strip(), frozenset(names), evaluate)


def parse_template(text: str, label: str, functions: Functions | None = None) -> Template:
    """Parses the sentence ``text`` with its expressions in braces; raises as `parse` does."""
    pieces = re.split(r"\{([^{}]*)\}", text)
    return Template(tuple(parse(piece, label, functions) if i % 2 else piece for i, piece in enumerate(pieces)))


def compile_tests(
    names: Sequence[str], derived: Mapping[str, Expression], tests: Sequence[Expression], functions: Functions
) -> Callable[..., list[int]]:
    """Compiles many expressions into one function. It takes the values of ``names`` in their order and returns the
    positions of the ``tests`` that hold.

    ``derived``: expressions that the tests may use by name; each may use the ones before it. All expressions must have
    been parsed with these ``functions``.
    """

    def local(name: str) -> str:
        return f"v_{name}"

    def source(expression: Expression) -> str:
        return _source(ast.parse(expression.text, mode="eval").body, functions, local)

    lines = [f"def tests({', '.join(map(local, names))}):", "    holding = []"]
    lines += [f"    {local(name)} = {source(expression)}" for name, expression in derived.items()]
    lines += [f"    if {source(test)}: holding.append({number})" for number, test in enumerate(tests)]
    space = _space(functions)
    exec("\n".join([*lines, "    return holding"]), space)
    compiled: Callable[..., list[int]] = space["tests"]
    return compiled


def source_of(expression: Expression, variable: Callable[[str], str]) -> str:
    """Python source of an expression, to be part of a larger function; ``variable`` writes its variables. The
    expression must have been parsed with the functions of a grid, and its source needs the names of `namespace`."""
    return _source(ast.parse(expression.text, mode="eval").body, _FUNCTIONS, variable)


def namespace() -> dict[str, Any]:
    """Names that the source of `source_of` uses in addition to its variables; no builtins."""
    return _space(_FUNCTIONS)


def as_data(expression: Expression) -> Data:
    """The expression as JSON: a number; a name as text; an operation as a list of its sign and its operands.

    Signs are Python's (``"//"``, ``"not in"``, ``"and"``) and the names of functions; ``["text", T]`` is the text T,
    ``["list", ...]`` a list, ``["if", test, then, otherwise]`` a choice, and a minus sign may have one operand.
    """
    return _data(ast.parse(expression.text, mode="eval").body)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


_LONGEST_TEXT = 1000
"""Most characters of a text that an expression joins."""


class _NotAllowed(Exception):
    pass


def _add(left: Any, right: Any) -> Any:
    """The sum of two numbers, or two short texts joined. Derived values could double a text again and again."""
    total = left + right
    if isinstance(total, str) and len(total) > _LONGEST_TEXT:
        raise OverflowError(f"a text of {len(total):,} characters is longer than {_LONGEST_TEXT:,}")
    return total


def _divide(left: Any, right: Any) -> Any:
    """``left / right``, as an integer where the result is whole, so that degrees stay integers."""
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right


def _multiply(left: Any, right: Any) -> Any:
    """The product of two numbers. ``*`` on texts repeats them, and derived values could square a number again and
    again, which could fill the memory."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        product = left * right
        if product.__class__ is int and not -LARGEST <= product <= LARGEST:
            raise OverflowError(f"{shown(left)} * {shown(right)} is above {LARGEST:g}")
        return product
    raise TypeError(f"{left!r} and {right!r} are not both numbers")


def _modulo(left: Any, right: Any) -> Any:
    """The remainder of two numbers. ``%`` on texts formats them, which could fill the memory."""
    if isinstance(left, (int, float)) and isinstance(right, (int, float)):
        return left % right
    raise TypeError(f"{left!r} and {right!r} are not both numbers")


_CHECKED_OPERATIONS: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: _add,
    ast.Div: _divide,
    ast.Mult: _multiply,
    ast.Mod: _modulo,
}
"""Operations that are written as a call of a function; all others are Python's own."""
_FUNCTIONS: Functions = {"min": min, "max": max, "abs": abs}
_SIGNS: dict[type[ast.AST], str] = dict(
    [
        *((ast.Add, "+"), (ast.Sub, "-"), (ast.Mult, "*"), (ast.Div, "/"), (ast.FloorDiv, "//"), (ast.Mod, "%")),
        *((ast.Eq, "=="), (ast.NotEq, "!="), (ast.Lt, "<"), (ast.LtE, "<="), (ast.Gt, ">"), (ast.GtE, ">=")),
        *((ast.In, "in"), (ast.NotIn, "not in"), (ast.And, "and"), (ast.Or, "or"), (ast.Not, "not"), (ast.USub, "-")),
    ]
)
"""Everything that is allowed between operands."""


def _source(node: ast.expr, functions: Functions, variable: Callable[[str], str]) -> str:
    """Python source of a checked expression. ``variable`` writes a variable; `_space` holds every other name."""

    def inner(part: ast.expr) -> str:
        return _source(part, functions, variable)

    match node:
        case ast.Constant(value=float() as value) if math.isinf(value):
            return "1e999"
        case ast.Constant(value=int() as value) if not -LARGEST <= value <= LARGEST:
            raise _NotAllowed(f"a number above {LARGEST:g}")
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return repr(value)
        case ast.Name(id=name):
            return variable(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _CHECKED_OPERATIONS:
            return f"{_CHECKED_OPERATIONS[type(op)].__name__}({inner(left)}, {inner(right)})"
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _SIGNS:
            return f"({inner(left)} {_SIGNS[type(op)]} {inner(right)})"
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _SIGNS:
            return f"({_SIGNS[type(op)]} {inner(operand)})"
        case ast.BoolOp(op=op, values=values):
            return f"({f' {_SIGNS[type(op)]} '.join(map(inner, values))})"
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _SIGNS for op in ops):
            steps = [f"{_SIGNS[type(op)]} {inner(term)}" for op, term in zip(ops, comparators, strict=True)]
            return f"({inner(left)} {' '.join(steps)})"
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return f"({inner(body)} if {inner(test)} else {inner(orelse)})"
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return f"[{', '.join(map(inner, elements))}]"
        case ast.Call(func=ast.Name(id=function), args=[_, *_] as arguments, keywords=[]) if function in functions:
            return f"f_{function}({', '.join(map(inner, arguments))})"
    raise _NotAllowed(repr(ast.unparse(node)))


def _space(functions: Functions) -> dict[str, Any]:
    """Names that compiled source may use in addition to its variables."""
    checked = {function.__name__: function for function in _CHECKED_OPERATIONS.values()}
    return {"__builtins__": {}, **checked, **{f"f_{name}": function for name, function in functions.items()}}


def _compiled(source: str, functions: Functions) -> Evaluator:
    evaluator: Evaluator = eval(source, _space(functions))
    return evaluator


def _data(node: ast.expr) -> Data:
    match node:
        case ast.Constant(value=str() as text):
            return ["text", text]
        case ast.Constant(value=int() | float() as value):
            return value
        case ast.Name(id=name):
            return name
        case ast.BinOp(left=left, op=op, right=right):
            return [_SIGNS[type(op)], _data(left), _data(right)]
        case ast.UnaryOp(op=op, operand=operand):
            return [_SIGNS[type(op)], _data(operand)]
        case ast.BoolOp(op=op, values=values):
            return [_SIGNS[type(op)], *map(_data, values)]
        case ast.Compare(left=left, ops=ops, comparators=comparators):
            terms = [_data(term) for term in (left, *comparators)]
            steps = [[_SIGNS[type(op)], *pair] for op, *pair in zip(ops, terms[:-1], terms[1:], strict=True)]
            return steps[0] if len(steps) == 1 else ["and", *steps]
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return ["if", _data(test), _data(body), _data(orelse)]
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return ["list", *map(_data, elements)]
        case ast.Call(func=ast.Name(id=function), args=arguments):
            return [function, *map(_data, arguments)]
    raise AssertionError(f"{ast.unparse(node)}: an expression that was parsed holds nothing else")

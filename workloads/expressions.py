"""A small language of arithmetic and comparisons over names: a grid's ``derive`` and ``where``, the planner's rules.

Python parses an expression; every node is checked against what is allowed and becomes a closure. ``eval`` is never
used. Attributes, subscripts, powers, and calls of all but a few functions are refused. `as_data` gives an expression as
JSON, for readers in other languages.
"""

from __future__ import annotations

import ast
import operator
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workloads.errors import InvalidSweep

Evaluator = Callable[[Mapping[str, Any]], Any]
Data = str | int | float | list[Any]
"""An expression as JSON, see `as_data`."""


@dataclass(frozen=True, slots=True)
class Expression:
    text: str
    names: frozenset[str]
    """The variables that it uses."""
    evaluate: Evaluator
    """Takes the variables' values by name and returns the expression's value. Raises what Python's operators raise
    (ZeroDivisionError, TypeError)."""


@dataclass(frozen=True, slots=True)
class Template:
    """A sentence with expressions in braces: ``tp={tp} does not divide {num_heads // 2}``."""

    parts: tuple[str | Expression, ...]
    """Plain text and expressions, in the order in which they stand."""

    def fill(self, values: Mapping[str, Any]) -> str:
        """The sentence for these values by name. A list is written with commas between its members."""
        return "".join(part if isinstance(part, str) else _shown(part.evaluate(values)) for part in self.parts)


def parse(text: object, label: str, functions: Mapping[str, Callable[..., Any]] | None = None) -> Expression:
    """The expression in ``text``; ``label`` says where it stands. Raises `InvalidSweep` naming what is not allowed.

    ``functions``: what may be called, by name; ``min``, ``max`` and ``abs`` when nothing is given.
    """
    functions = _FUNCTIONS if functions is None else functions
    if isinstance(text, (bool, int)):
        text = str(text)  # YAML reads an expression that is a single number as a number
    if not isinstance(text, str):
        raise InvalidSweep(f"{label}: {text!r} is not an expression; write it as text")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise InvalidSweep(f"{label}: cannot read {text!r}; an example: world_size / (tp * pp)") from None
    names: set[str] = set()
    try:
        evaluate = _compile(tree.body, names, functions)
    except _NotAllowed as error:
        raise InvalidSweep(
            f"{label}: {error} in {text!r} is not allowed; use names, numbers, + - * / // %, comparisons, in, "
            f"and, or, not, if-else, {', '.join(sorted(functions))}"
        ) from None
    except RecursionError:
        raise InvalidSweep(f"{label}: the expression is nested too deeply") from None
    return Expression(text.strip(), frozenset(names), evaluate)


def parse_template(text: str, label: str, functions: Mapping[str, Callable[..., Any]] | None = None) -> Template:
    """The sentence ``text`` with its expressions in braces parsed; raises as `parse` does."""
    pieces = re.split(r"\{([^{}]*)\}", text)
    return Template(tuple(parse(piece, label, functions) if i % 2 else piece for i, piece in enumerate(pieces)))


def as_data(expression: Expression) -> Data:
    """The expression as JSON: a number; a name as text; an operation as a list of its sign and its operands.

    Signs are Python's (``"//"``, ``"not in"``, ``"and"``) and the names of functions; ``["text", T]`` is the text T,
    ``["list", ...]`` a list, ``["if", test, then, otherwise]`` a choice, and a minus sign may have one operand.
    """
    return _data(ast.parse(expression.text, mode="eval").body)


def _shown(value: Any) -> str:
    return ", ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)


class _NotAllowed(Exception):
    pass


def _divide(left: Any, right: Any) -> Any:
    """``left / right``, as an integer where the result is whole, so that degrees stay integers."""
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right


def _numbers_only(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``op`` for numbers alone. On texts ``*`` repeats and ``%`` formats, which could fill the memory."""

    def checked(left: Any, right: Any) -> Any:
        if isinstance(left, (int, float)) and isinstance(right, (int, float)):
            return op(left, right)
        raise TypeError(f"{left!r} and {right!r} are not both numbers")

    return checked


_BINARY: dict[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: _numbers_only(operator.mul),
    ast.Div: _divide,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: _numbers_only(operator.mod),
}
_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
    ast.In: lambda left, right: left in right,
    ast.NotIn: lambda left, right: left not in right,
}
_UNARY: dict[type[ast.unaryop], Callable[[Any], Any]] = {ast.Not: operator.not_, ast.USub: operator.neg}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"min": min, "max": max, "abs": abs}


def _compile(node: ast.expr, names: set[str], functions: Mapping[str, Callable[..., Any]]) -> Evaluator:
    def inner(part: ast.expr) -> Evaluator:
        return _compile(part, names, functions)

    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return lambda env: value
        case ast.Name(id=name):
            names.add(name)
            return operator.itemgetter(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _binary(_BINARY[type(op)], inner(left), inner(right))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _unary(_UNARY[type(op)], inner(operand))
        case ast.BoolOp(op=op, values=values):
            return _boolean(isinstance(op, ast.And), [inner(value) for value in values])
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
            terms = [inner(term) for term in (left, *comparators)]
            return _chain([_COMPARE[type(op)] for op in ops], terms)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _choice(inner(test), inner(body), inner(orelse))
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return _sequence([inner(element) for element in elements])
        case ast.Call(func=ast.Name(id=function), args=[_, *_] as arguments, keywords=[]) if function in functions:
            return _call(functions[function], [inner(argument) for argument in arguments])
    raise _NotAllowed(repr(ast.unparse(node)))


def _binary(op: Callable[[Any, Any], Any], left: Evaluator, right: Evaluator) -> Evaluator:
    return lambda env: op(left(env), right(env))


def _unary(op: Callable[[Any], Any], operand: Evaluator) -> Evaluator:
    return lambda env: op(operand(env))


def _boolean(is_and: bool, terms: list[Evaluator]) -> Evaluator:
    """``and`` or ``or`` of all terms, as nested pairs: several times faster than ``all`` over a generator, and it runs
    millions of times."""
    first, rest = terms[0], terms[1:]
    if not rest:
        return first
    second = _boolean(is_and, rest)
    if is_and:
        return lambda env: first(env) and second(env)
    return lambda env: first(env) or second(env)


def _chain(ops: list[Callable[[Any, Any], Any]], terms: list[Evaluator]) -> Evaluator:
    if len(ops) == 1:
        return _binary(ops[0], terms[0], terms[1])
    pairs = list(zip(ops, terms[:-1], terms[1:], strict=True))
    return lambda env: all(op(left(env), right(env)) for op, left, right in pairs)


def _choice(test: Evaluator, body: Evaluator, orelse: Evaluator) -> Evaluator:
    return lambda env: body(env) if test(env) else orelse(env)


def _sequence(elements: list[Evaluator]) -> Evaluator:
    return lambda env: [element(env) for element in elements]


def _call(function: Callable[..., Any], arguments: list[Evaluator]) -> Evaluator:
    return lambda env: function(*(argument(env) for argument in arguments))


_SIGNS: dict[type[ast.AST], str] = dict(
    [
        *((ast.Add, "+"), (ast.Sub, "-"), (ast.Mult, "*"), (ast.Div, "/"), (ast.FloorDiv, "//"), (ast.Mod, "%")),
        *((ast.Eq, "=="), (ast.NotEq, "!="), (ast.Lt, "<"), (ast.LtE, "<="), (ast.Gt, ">"), (ast.GtE, ">=")),
        *((ast.In, "in"), (ast.NotIn, "not in"), (ast.And, "and"), (ast.Or, "or"), (ast.Not, "not"), (ast.USub, "-")),
    ]
)


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

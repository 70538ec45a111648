"""The small language of a grid's ``derive`` and ``where``: arithmetic and comparisons over names, nothing else.

An expression is parsed by Python, checked node by node against what is allowed, and turned into nested closures. It is
never handed to ``eval``: attributes, subscripts, calls of anything but a few functions, and powers are refused.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from workloads.errors import InvalidSweep

Evaluator = Callable[[Mapping[str, Any]], Any]


@dataclass(frozen=True, slots=True)
class Expression:
    text: str
    names: frozenset[str]
    """Variables it reads."""
    evaluate: Evaluator
    """From values by name to the value. Raises what Python's operators raise (ZeroDivisionError, TypeError)."""


def parse(text: object, label: str) -> Expression:
    """The expression in ``text``; ``label`` says where it stands. Raises `InvalidSweep` naming what is not allowed."""
    if isinstance(text, (bool, int)):
        text = str(text)  # YAML has read it as a number already
    if not isinstance(text, str):
        raise InvalidSweep(f"{label}: {text!r} is not an expression; write it as text")
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError):
        raise InvalidSweep(f"{label}: cannot read {text!r}; an example: world_size / (tp * pp)") from None
    names: set[str] = set()
    try:
        evaluate = _compile(tree.body, names)
    except _NotAllowed as error:
        raise InvalidSweep(
            f"{label}: {error} in {text!r} is not allowed; use names, numbers, + - * / // %, comparisons, in, "
            f"and, or, not, if-else, {', '.join(sorted(_FUNCTIONS))}"
        ) from None
    except RecursionError:
        raise InvalidSweep(f"{label}: the expression is nested too deeply") from None
    return Expression(text.strip(), frozenset(names), evaluate)


class _NotAllowed(Exception):
    pass


def _divide(left: Any, right: Any) -> Any:
    """``left / right``, a whole number where it is one, so that degrees stay integers."""
    if isinstance(left, int) and isinstance(right, int) and left % right == 0:
        return left // right
    return left / right


def _numbers_only(op: Callable[[Any, Any], Any]) -> Callable[[Any, Any], Any]:
    """``*`` repeats a text and ``%`` formats it, both without bound: here they are arithmetic."""

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


def _compile(node: ast.expr, names: set[str]) -> Evaluator:
    match node:
        case ast.Constant(value=bool() | int() | float() | str() as value):
            return lambda env: value
        case ast.Name(id=name):
            names.add(name)
            return operator.itemgetter(name)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _BINARY:
            return _binary(_BINARY[type(op)], _compile(left, names), _compile(right, names))
        case ast.UnaryOp(op=op, operand=operand) if type(op) in _UNARY:
            return _unary(_UNARY[type(op)], _compile(operand, names))
        case ast.BoolOp(op=op, values=values):
            return _boolean(isinstance(op, ast.And), [_compile(value, names) for value in values])
        case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
            terms = [_compile(term, names) for term in (left, *comparators)]
            return _chain([_COMPARE[type(op)] for op in ops], terms)
        case ast.IfExp(test=test, body=body, orelse=orelse):
            return _choice(_compile(test, names), _compile(body, names), _compile(orelse, names))
        case ast.List(elts=elements) | ast.Tuple(elts=elements):
            return _sequence([_compile(element, names) for element in elements])
        case ast.Call(func=ast.Name(id=function), args=[_, *_] as arguments, keywords=[]) if function in _FUNCTIONS:
            return _call(_FUNCTIONS[function], [_compile(argument, names) for argument in arguments])
    raise _NotAllowed(repr(ast.unparse(node)))


def _binary(op: Callable[[Any, Any], Any], left: Evaluator, right: Evaluator) -> Evaluator:
    return lambda env: op(left(env), right(env))


def _unary(op: Callable[[Any], Any], operand: Evaluator) -> Evaluator:
    return lambda env: op(operand(env))


def _boolean(is_and: bool, terms: list[Evaluator]) -> Evaluator:
    """Nested pairs: several times faster than ``all`` over a generator, and this runs millions of times."""
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

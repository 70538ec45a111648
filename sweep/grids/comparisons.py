"""Comparisons in expressions that can never hold: of a number with a text, or with a word that a field never has.

Python finds ``tp == "2"`` false for every ``tp``, so that a condition would drop every point without a word.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from workloads.spec.checks import Values
from workloads.spec.expressions import Expression

Kind = Literal["number", "flag", "text"]
"""What a name or a part of an expression is. A flag is true or false; it may be compared with numbers."""
_NOUNS: Mapping[Kind, str] = {"number": "a number", "flag": "true or false", "text": "a text"}
_EQUALITY = (ast.Eq, ast.NotEq, ast.In, ast.NotIn)


def kind_of_value(value: object) -> Kind | None:
    """The kind of one value; None for null and for what expressions do not have."""
    if isinstance(value, bool):
        return "flag"
    if isinstance(value, (int, float)):
        return "number"
    return "text" if isinstance(value, str) else None


def kind_of(expression: Expression, kinds: Mapping[str, Kind]) -> Kind | None:
    """The kind of an expression's value, by the kinds of the names in it; None if it cannot be told."""
    return _kind(_tree(expression), kinds)


def impossible(expression: Expression, kinds: Mapping[str, Kind], words: Mapping[str, Values]) -> str | None:
    """What is wrong with the first comparison that can never hold, and what to write; None without one.

    ``kinds``: of names, as far as they are known. ``words``: the rules of fields, for those that are texts.
    """
    return next(_impossible(_tree(expression), kinds, words), None)


def _tree(expression: Expression) -> ast.expr:
    return ast.parse(expression.text, mode="eval").body


def _impossible(tree: ast.expr, kinds: Mapping[str, Kind], words: Mapping[str, Values]) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Compare):
            for left, op, right in zip((node.left, *node.comparators), node.ops, node.comparators, strict=False):
                members = right.elts if isinstance(right, (ast.List, ast.Tuple)) else [right]
                for member in members:
                    if _differ(left, member, kinds):
                        yield _of_other_kind(left, member, kinds, words)
                    elif isinstance(op, _EQUALITY) and not (isinstance(op, (ast.In, ast.NotIn)) and member is right):
                        yield from _unknown_word(left, member, words)


def _differ(left: ast.expr, right: ast.expr, kinds: Mapping[str, Kind]) -> bool:
    one, other = _kind(left, kinds), _kind(right, kinds)
    return one is not None and other is not None and (one == "text") != (other == "text")


def _of_other_kind(left: ast.expr, right: ast.expr, kinds: Mapping[str, Kind], words: Mapping[str, Values]) -> str:
    described = [f"{_written(one)} is {_NOUNS[kind]}" for one in (left, right) if (kind := _kind(one, kinds))]
    hints = (_hint(literal, other, kinds, words) for literal, other in ((left, right), (right, left)))
    return f"{' and '.join(described)}, which are never equal{next(filter(None, hints), '')}"


def _hint(literal: ast.expr, other: ast.expr, kinds: Mapping[str, Kind], words: Mapping[str, Values]) -> str:
    """What to write instead of a literal that is compared with something of another kind."""
    value = literal.value if isinstance(literal, ast.Constant) else None
    wanted, rule = _kind(other, kinds), words.get(other.id) if isinstance(other, ast.Name) else None
    if value is None:
        return ""
    if wanted == "text":
        return f'; write "{value!s}"' if rule is None or rule.accepts(str(value)) else f"; it may be {rule.must}"
    if isinstance(value, str) and wanted == "flag" and value.strip().lower() in ("true", "false"):
        return f"; write {value.strip().title()} without quotes"
    if isinstance(value, str) and wanted == "number" and _is_number(value):
        return f"; write {value.strip()} without quotes"
    return ""


def _unknown_word(left: ast.expr, right: ast.expr, words: Mapping[str, Values]) -> Iterator[str]:
    for name, literal in ((left, right), (right, left)):
        if isinstance(name, ast.Name) and isinstance(literal, ast.Constant) and isinstance(literal.value, str):
            rule = words.get(name.id)
            if rule is not None and not rule.accepts(literal.value):
                yield rule.refusal(name.id, literal.value)


def _kind(node: ast.expr, kinds: Mapping[str, Kind]) -> Kind | None:
    match node:
        case ast.Constant(value=value):
            return kind_of_value(value)
        case ast.Name(id=name):
            return kinds.get(name)
        case ast.Compare() | ast.UnaryOp(op=ast.Not()):
            return "flag"
        case ast.UnaryOp():
            return "number"
        case ast.BinOp(op=ast.Add(), left=left, right=right):
            found = [_kind(left, kinds), _kind(right, kinds)]
            return "text" if "text" in found else _common(found)
        case ast.BinOp():
            return "number"
        case ast.BoolOp(values=parts) | ast.Call(func=ast.Name(id="min" | "max" | "abs"), args=parts):
            return _common([_kind(part, kinds) for part in parts])
        case ast.IfExp(body=body, orelse=orelse):
            return _common([_kind(body, kinds), _kind(orelse, kinds)])
    return None


def _common(kinds: Sequence[Kind | None]) -> Kind | None:
    """The kind of all; numbers and flags together are numbers."""
    if len({*kinds}) == 1:
        return kinds[0]
    return "number" if {*kinds} == {"number", "flag"} else None


def _written(node: ast.expr) -> str:
    return f'"{node.value}"' if isinstance(node, ast.Constant) and isinstance(node.value, str) else ast.unparse(node)


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True

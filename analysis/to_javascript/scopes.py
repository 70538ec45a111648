"""Where a function's names are declared in JavaScript: as far inside as all their uses allow."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass, field

_Place = tuple[tuple[int, int, int], ...]
"""The way to a statement: identity of each block, index of the statement there, identity of the statement."""


@dataclass
class Scopes:
    """Declarations of one function, parameters excluded."""

    at: dict[int, set[str]] = field(default_factory=dict)
    """Names that an assignment, or the head of a loop, declares, by the identity of the statement."""
    hoisted: list[str] = field(default_factory=list)
    """Names that are declared at the top of the function."""
    often: set[str] = field(default_factory=set)
    """Names with more than one assignment."""


@dataclass
class _Mention:
    place: _Place
    stores: bool
    node: ast.stmt


def scopes(body: list[ast.stmt], parameters: set[str]) -> Scopes:
    found: dict[str, list[_Mention]] = {}
    for name, mention in _mentions(body, ()):
        if name not in parameters and (name != "_" or isinstance(mention.node, ast.For)):
            found.setdefault(name, []).append(mention)
    result = Scopes()
    for name, mentions in found.items():
        stores = [one for one in mentions if one.stores]
        if not stores:
            continue
        if len(stores) > 1 or isinstance(stores[0].node, ast.AugAssign):
            result.often.add(name)
        loops = {id(one.node) for one in stores if isinstance(one.node, ast.For)}
        if loops and all(any(step[2] in loops for step in one.place) for one in mentions):
            for loop in loops:
                result.at.setdefault(loop, set()).add(name)
            inner = [one for one in stores if id(one.node) not in loops]
            result.often -= set() if inner else {name}
        elif (first := _first(name, mentions)) is not None:
            result.at.setdefault(id(first), set()).add(name)
        else:
            result.hoisted.append(name)
            result.often.add(name)
    return result


def _first(name: str, mentions: list[_Mention]) -> ast.stmt | None:
    """The assignment that comes first in the innermost block with all mentions, if there is one."""
    depth = 0
    while all(len(one.place) > depth + 1 for one in mentions) and len({one.place[depth] for one in mentions}) == 1:
        depth += 1
    if len({one.place[depth][0] for one in mentions}) > 1:
        return None
    start = min(one.place[depth][1] for one in mentions)
    here = [one for one in mentions if one.place[depth][1] == start]
    is_assignment = isinstance(here[0].node, (ast.Assign, ast.AnnAssign)) and len(here[0].place) == depth + 1
    return here[0].node if is_assignment and all(one.stores for one in here) else None


def _mentions(block: list[ast.stmt], above: _Place) -> Iterator[tuple[str, _Mention]]:
    for index, node in enumerate(block):
        place = (*above, (id(block), index, id(node)))
        if isinstance(node, ast.FunctionDef):
            names = {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
            inner = scopes(node.body, names)
            own = names | set(inner.hoisted) | {name for declared in inner.at.values() for name in declared}
            for line in node.body:
                yield from ((name, _Mention(place, False, node)) for name in _loaded(line) if name not in own)
            continue
        for one in ast.iter_child_nodes(node):
            if isinstance(one, ast.expr):
                yield from ((name, _Mention(place, False, node)) for name in _loaded(one))
                yield from ((name, _Mention(place, True, node)) for name in _stored(one))
        for inner_block in (getattr(node, "body", []), getattr(node, "orelse", [])):
            if isinstance(node, (ast.If, ast.For, ast.While)):
                yield from _mentions(inner_block, place)
        if isinstance(node, ast.AugAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, _Mention(place, False, node)


def _stored(node: ast.AST) -> Iterator[str]:
    """Names that an expression or a target assigns."""
    if isinstance(node, ast.NamedExpr):
        yield node.target.id
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        yield node.id
    if isinstance(node, (ast.Lambda, ast.ListComp, ast.GeneratorExp, ast.SetComp, ast.DictComp)):
        return
    for child in ast.iter_child_nodes(node):
        yield from _stored(child)


def _loaded(node: ast.AST) -> Iterator[str]:
    """Names that an expression uses, without those that it binds itself."""
    match node:
        case ast.Name(id=name, ctx=ast.Load()):
            yield name
        case ast.Lambda(args=args, body=body):
            own = {one.arg for one in args.args}
            yield from (name for name in _loaded(body) if name not in own)
        case ast.ListComp() | ast.GeneratorExp() | ast.SetComp() | ast.DictComp():
            own = {name for one in node.generators for name in _stored(one.target)}
            yield from _loaded(node.generators[0].iter)
            inner = [one for one in ast.iter_child_nodes(node) if not isinstance(one, ast.comprehension)]
            inner += [one for each in node.generators for one in each.ifs]
            inner += [each.iter for each in node.generators[1:]]
            yield from (name for one in inner for name in _loaded(one) if name not in own)
        case ast.NamedExpr(target=target, value=value):
            yield target.id  # it is a value, too
            yield from _loaded(value)
        case _:
            for child in ast.iter_child_nodes(node):
                yield from _loaded(child)

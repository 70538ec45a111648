"""Types of expressions, as far as JavaScript's operators depend on them, read from annotations."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, Protocol

from analysis.to_javascript.modules import Definition, NotPortable, find


@dataclass(frozen=True)
class Type:
    """A type: ``number``, ``text``, ``flag``, ``none``, ``list`` (of one type, or one for each place), ``iterator``,
    ``set``, ``map`` (keys, values), ``object`` (of a class), ``union`` (of objects), ``function`` (its result),
    ``class`` or ``unknown``."""

    kind: str
    of: tuple[Type, ...] = ()
    owner: Definition | None = None
    """Class of an ``object``; of a ``class``, itself."""

    @property
    def item(self) -> Type:
        """Type of what an iteration gives."""
        if self.kind in ("list", "iterator", "set") and self.of:
            return self.of[0] if all(one == self.of[0] for one in self.of) else UNKNOWN
        if self.kind == "map" and self.of:
            return self.of[0]
        return TEXT if self.kind == "text" else UNKNOWN


NUMBER, TEXT, FLAG, NONE, UNKNOWN = (Type(kind) for kind in ("number", "text", "flag", "none", "unknown"))


class Js(NamedTuple):
    """An expression in JavaScript: its text, its type, and how strongly its outermost operator binds."""

    text: str
    type: Type = UNKNOWN
    binds: int = 20

    def within(self, least: int) -> str:
        """The text, in parentheses if it binds less strongly than ``least``."""
        return self.text if self.binds >= least else f"({self.text})"


PLAIN = ("number", "text", "flag", "none")
"""Kinds whose values are compared by JavaScript's `===`."""
_NAMES = {"int": NUMBER, "float": NUMBER, "str": TEXT, "bool": FLAG, "None": NONE, "range": Type("list", (NUMBER,))}
_LISTS = ("list", "tuple", "Sequence", "Collection")
_ITERATORS = ("Iterable", "Iterator", "Generator")
_MAPS = ("dict", "Mapping", "Counter", "defaultdict")


def list_of(item: Type) -> Type:
    return Type("list", (item,))


def either(first: Type, second: Type) -> Type:
    """Type of a value that has one of two types; None beside another type leaves no trace."""
    if first == second or second.kind == "none":
        return first
    if first.kind == "none":
        return second
    if {first.kind, second.kind} == {"number", "flag"}:
        return NUMBER
    if {first.kind, second.kind} <= {"object", "union"}:
        alternatives = [*(first.of or (first,)), *(second.of or (second,))]
        return Type("union", tuple(dict.fromkeys(alternatives)))
    return list_of(either(first.item, second.item)) if first.kind == second.kind == "list" else UNKNOWN


def of_annotation(node: ast.AST | None, module: str) -> Type:
    """Type that an annotation in a module names; ``unknown`` for what makes no difference to the translation."""
    match node:
        case ast.Constant(value=None):
            return NONE
        case ast.Constant(value=str(text)):
            return of_annotation(ast.parse(text, mode="eval").body, module)
        case ast.BinOp(op=ast.BitOr(), left=left, right=right):
            return either(of_annotation(left, module), of_annotation(right, module))
        case ast.Name(id=name) if name in _NAMES:
            return _NAMES[name]
        case ast.Name(id=name):
            return _named(name, module)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=choices):
            first = choices.elts[0] if isinstance(choices, ast.Tuple) and choices.elts else choices
            return TEXT if isinstance(first, ast.Constant) and isinstance(first.value, str) else UNKNOWN
        case ast.Subscript(value=ast.Name(id=name), slice=inner):
            given = inner.elts if isinstance(inner, ast.Tuple) else [inner]
            return _generic(name, [one for one in given if not _is_ellipsis(one)], module)
    return UNKNOWN


def _is_ellipsis(node: ast.AST) -> bool:
    return isinstance(node, ast.Constant) and node.value is ...


def _generic(name: str, given: list[ast.expr], module: str) -> Type:
    if name == "Callable":
        return Type("function", (of_annotation(given[-1], module),))
    inner = tuple(of_annotation(one, module) for one in given)
    if name in _LISTS:
        return Type("list", inner)
    if name in _ITERATORS:
        return Type("iterator", inner[:1])
    if name in ("set", "frozenset"):
        return Type("set", inner)
    if name in _MAPS:
        return Type("map", inner if len(inner) == 2 else (*inner, NUMBER))
    return inner[0] if name in ("Final", "ClassVar") else UNKNOWN


def _named(name: str, module: str) -> Type:
    found = find(module, name)
    if not isinstance(found, Definition):
        bare = {**dict.fromkeys(_LISTS, "list"), **dict.fromkeys(_MAPS, "map"), "set": "set"}
        return Type(bare.get(name, "unknown"))
    match found.node:
        case ast.ClassDef():
            return NUMBER if is_enum(found.node) else Type("object", owner=found)
        case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
            return of_annotation(value, found.module)
    return UNKNOWN


def is_enum(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id in ("IntEnum", "StrEnum", "Enum") for base in node.bases)


def is_named_tuple(node: ast.ClassDef) -> bool:
    return any(isinstance(base, ast.Name) and base.id == "NamedTuple" for base in node.bases)


def is_record(node: ast.ClassDef) -> bool:
    """Whether the class is a dataclass or a named tuple: its annotated fields are what its constructor takes."""
    names = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
    return is_named_tuple(node) or any(isinstance(one, ast.Name) and one.id == "dataclass" for one in names)


@cache
def fields_of(owner: Definition) -> dict[str, ast.AnnAssign]:
    """Fields of a dataclass or named tuple by name, in the order of its constructor, inherited ones first."""
    node = owner.node
    assert isinstance(node, ast.ClassDef)
    found: dict[str, ast.AnnAssign] = {}
    for base in bases_of(owner):
        found |= fields_of(base)
    for one in node.body:
        if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name) and is_record(node):
            found[one.target.id] = one
    return found


def bases_of(owner: Definition) -> list[Definition]:
    """Base classes of this program."""
    assert isinstance(owner.node, ast.ClassDef)
    named = [find(owner.module, base.id) for base in owner.node.bases if isinstance(base, ast.Name)]
    return [base for base in named if isinstance(base, Definition)]


@cache
def member(owner: Definition, name: str) -> tuple[Definition, ast.FunctionDef] | None:
    """The method or property of this name, with the class that defines it."""
    assert isinstance(owner.node, ast.ClassDef)
    for one in owner.node.body:
        if isinstance(one, ast.FunctionDef) and one.name == name:
            return owner, one
    for base in bases_of(owner):
        if (found := member(base, name)) is not None:
            return found
    return None


def decorators(node: ast.FunctionDef) -> list[str]:
    """Names of a function's decorators."""
    names = [one.func if isinstance(one, ast.Call) else one for one in node.decorator_list]
    return [ast.unparse(one).rpartition(".")[2] for one in names]


class Translator(Protocol):
    """What the translation of a call needs of the translation of the function around it."""

    module: str
    locals: dict[str, Type]
    """Types of local names."""
    this: dict[str, str]
    """``self`` and ``cls`` in JavaScript."""

    def js(self, node: ast.expr) -> Js: ...

    def test(self, node: ast.expr) -> str:
        """The truth of a value, as an operand of ``&&``."""

    def items(self, nodes: list[ast.expr]) -> tuple[str, list[Type]]:
        """Elements of a list or arguments of a call, and their types."""

    def array(self, value: Js) -> str:
        """A value that is iterated as an array."""

    def comprehension(self, node: ast.GeneratorExp, method: str) -> Js: ...

    def global_(self, found: Definition) -> Js:
        """A function, class or constant of this program."""

    def touch(self, name: str) -> None:
        """Notes the name of a method or property that is used."""

    def refuse(self, node: ast.AST, what: str | None = None) -> NotPortable: ...

"""One script of all that some functions and classes need, translated definition by definition."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass, field

from analysis.to_javascript.layout import wrapped
from analysis.to_javascript.modules import Definition, NotPortable, find, is_there, load
from analysis.to_javascript.statements import Statements, is_cached
from analysis.to_javascript.types import (
    UNKNOWN,
    Type,
    bases_of,
    decorators,
    fields_of,
    is_enum,
    is_named_tuple,
    is_record,
    of_annotation,
)
from analysis.to_javascript.values import safe

_INDENT = "  "
_KNOWN_DECORATORS = {"dataclass", "property", "cached_property", "classmethod", "staticmethod", "lru_cache", "cache"}


@dataclass
class Piece:
    """The translation of one definition."""

    definition: Definition
    name: str = ""
    head: str = ""
    members: dict[str, str] = field(default_factory=dict)
    tail: str = ""
    needs: dict[Definition, None] = field(default_factory=dict)
    """What it uses; of a class what its fields use."""
    later: dict[Definition, None] = field(default_factory=dict)
    """What the methods of a class use, which run later."""

    @property
    def text(self) -> str:
        return "\n".join(part for part in (self.head, *self.members.values(), self.tail) if part)


class Bundle:
    """Translates definitions and, in turn, all that they use: of a class the methods whose names are used anywhere."""

    def __init__(self, tags: tuple[str, str] | None, *, comments: bool) -> None:
        self.comments = comments
        found = find(*tags) if tags is not None and is_there(tags[0]) else None
        self.tags = found if isinstance(found, Definition) else None
        """A dict of classes by the name that plain data has in ``kind``, for fields of several classes."""
        self.pieces: dict[Definition, Piece] = {}
        self.names: dict[str, Definition] = {}
        self.touched: set[str] = set()
        self.types: dict[Definition, Type] = {}
        self.waiting: list[Definition] = []
        self.exported: list[str] = []

    def add(self, module: str, name: str) -> None:
        found = find(module, name)
        if not isinstance(found, Definition):
            raise NotPortable(f"{module} does not define {name}")
        self.exported.append(self.name_of(found))
        self._finish()

    def script(self, variable: str) -> str:
        """The script: a constant that holds each definition that was added, by its name."""
        ordered: dict[Definition, None] = {}
        for one in list(self.pieces):
            self._after_its_needs(one, ordered, set())
        texts = [self.pieces[one].text for one in ordered]
        inner = "\n\n".join(texts).replace("\n", f"\n{_INDENT}").replace(f"\n{_INDENT}\n", "\n\n")
        exported = ", ".join(self.exported)
        body = f"{_INDENT}{inner}\n\n{_INDENT}return {{ {exported} }};"
        return wrapped(f'"use strict";\nconst {variable} = (() => {{\n{body}\n}})();\n')

    def _after_its_needs(self, one: Definition, ordered: dict[Definition, None], above: set[Definition]) -> None:
        if one in ordered or one in above:
            return
        for other in self.pieces[one].needs:
            self._after_its_needs(other, ordered, above | {one})
        ordered[one] = None
        for other in self.pieces[one].later:
            self._after_its_needs(other, ordered, above | {one})

    def name_of(self, one: Definition) -> str:
        """The definition's name in the script. It is translated before the script is written."""
        if one not in self.pieces:
            self.pieces[one] = Piece(one)
            self.waiting.append(one)
            name = safe(one.name)
            while name in self.names:  # the same name in another module
                name = f"{one.module.rpartition('.')[2]}_{name.lstrip('_')}"
            self.names[name] = one
            self.pieces[one].name = name
        return self.pieces[one].name

    def _finish(self) -> None:
        """Translates what is waiting, until nothing more is needed."""
        while True:
            before = len(self.touched)
            while self.waiting:
                self._translate(self.waiting.pop(0))
            for piece in list(self.pieces.values()):
                if isinstance(piece.definition.node, ast.ClassDef) and not is_enum(piece.definition.node):
                    self._members(piece)
            if len(self.touched) == before and not self.waiting:
                return

    def translator(self, piece: Piece, *, of_method: bool = False) -> Statements:
        def need(other: Definition) -> str:
            (piece.later if of_method else piece.needs)[other] = None
            return self.name_of(other)

        return Statements(piece.definition.module, need, self.touched.add, self.result_of)

    def result_of(self, one: Definition) -> Type:
        """Type of a constant, or of what a function returns."""
        if one not in self.types:
            self.types[one] = UNKNOWN
            match one.node:
                case ast.FunctionDef(returns=returns):
                    self.types[one] = of_annotation(returns, one.module)
                case ast.AnnAssign(annotation=annotation):
                    self.types[one] = of_annotation(annotation, one.module)
                case ast.Assign(value=value):
                    self.types[one] = (
                        Statements(one.module, self.name_of, self.touched.add, self.result_of).js(value).type
                    )
        return self.types[one]

    def _translate(self, one: Definition) -> None:
        piece = self.pieces[one]
        match one.node:
            case ast.FunctionDef():
                self._function(piece, one.node)
            case ast.ClassDef() if is_enum(one.node):
                values = [
                    f"{_target(line)}: {self.translator(piece).js(line.value).text}"
                    for line in one.node.body
                    if isinstance(line, ast.Assign)
                ]
                piece.head = (
                    f"{self._comment(one)}const {self.name_of(one)} = py.enumeration({{ {', '.join(values)} }});"
                )
            case ast.ClassDef():
                self._class(piece, one.node)
            case ast.Assign(value=value) | ast.AnnAssign(value=ast.expr() as value):
                piece.head = (
                    f"{self._comment(one)}const {self.name_of(one)} = {self.translator(piece).js(value).within(2)};"
                )

    def _function(self, piece: Piece, node: ast.FunctionDef) -> None:
        if set(decorators(node)) - _KNOWN_DECORATORS:
            raise load(piece.definition.module).refuse(node, f"the decorator {', '.join(decorators(node))}")
        parameters, body, generator = self.translator(piece).function(node)
        name, inner = self.name_of(piece.definition), _indented(body)
        text = f"function{'*' * generator} {name}({parameters}) {{\n{inner}\n}}"
        if is_cached(node):
            text = f"const {name} = py.cached({text});"
        piece.head = self._comment(piece.definition) + text

    def _class(self, piece: Piece, node: ast.ClassDef) -> None:
        bases = [base for base in bases_of(piece.definition) if fields_of(base)]
        base = "py.Tuple" if is_named_tuple(node) else "py.Record" if is_record(node) else ""
        if bases:
            piece.needs[bases[0]] = None
            base = self.name_of(bases[0])
        name = self.name_of(piece.definition)
        opening = f"class {name} extends {base} {{" if base else f"class {name} {{"
        piece.head, piece.tail = self._comment(piece.definition) + opening, "}"
        own = fields_of(piece.definition)
        if not own:
            return
        names = []
        for name, one in own.items():
            default = self.translator(piece).js(one.value).within(3) if one.value is not None else None
            if default is not None and default.startswith("py."):
                raise load(piece.definition.module).refuse(one, "a default that is no plain value")
            names.append(safe(name) + (f" = {default}" if default is not None else ""))
        call = f"super({', '.join(safe(name) for name in fields_of(bases[0]))});" if bases else "super();"
        stored = ", ".join(name if safe(name) == name else f"{name}: {safe(name)}" for name in own)
        body = _indented(f"{call}\nObject.assign(this, {{ {stored} }});")
        piece.members["__init__"] = _indented(f"constructor({', '.join(names)}) {{\n{body}\n}}")
        parts = []
        for name, one in own.items():
            kind = of_annotation(one.annotation, piece.definition.module)
            kind = kind.item if kind.kind == "list" else kind
            if kind.kind == "object" and kind.owner is not None:
                parts.append(f"{name}: () => {self.name_of(kind.owner)}")
            elif kind.kind == "union" and self.tags is not None:
                parts.append(f"{name}: ({{ kind }}) => {self.name_of(self.tags)}.at(kind)")
        if parts:
            piece.members["parts"] = f"{_INDENT}static parts = {{ {', '.join(parts)} }};"

    def _members(self, piece: Piece) -> None:
        """Translates the methods of a class whose names are used by now."""
        node = piece.definition.node
        assert isinstance(node, ast.ClassDef)
        for one in node.body:
            if not isinstance(one, ast.FunctionDef) or one.name in piece.members:
                continue
            made = one.name == "__init__" and not is_record(node)
            if not made and one.name not in self.touched:
                continue
            kinds = set(decorators(one))
            if kinds - _KNOWN_DECORATORS:
                raise load(piece.definition.module).refuse(one, f"the decorator {', '.join(kinds)}")
            translator = self.translator(piece, of_method=True)
            translator.owner = piece.definition
            if "staticmethod" not in kinds:
                translator.this = {one.args.args[0].arg: "this"}
            piece.members[one.name] = ""  # a method may use itself
            parameters, body, generator = translator.function(one, drop_first="staticmethod" not in kinds)
            prefix = (
                "get "
                if {"property", "cached_property"} & kinds
                else "static "
                if {"classmethod", "staticmethod"} & kinds
                else ""
            )
            name = "constructor" if made else one.name
            text = f"{prefix}{'*' * generator}{name}({parameters}) {{\n{_indented(body)}\n}}"
            piece.members[one.name] = _indented(text)

    def _comment(self, one: Definition) -> str:
        if not self.comments:
            return ""
        said = ast.get_docstring(one.node) if isinstance(one.node, (ast.FunctionDef, ast.ClassDef)) else None
        sentence = " ".join(said.split("\n\n")[0].split()) if said else ""
        where = f"{one.module.partition('.')[2]}.{one.name}"
        return f"/** {where}{f': {sentence}' if sentence else ''} */\n".replace("*/ ", "* / ")


def _target(node: ast.Assign) -> str:
    assert isinstance(node.targets[0], ast.Name)
    return node.targets[0].id


def _indented(text: str) -> str:
    return "\n".join(_INDENT + line if line else line for line in text.split("\n"))


def translated(
    variable: str,
    roots: Iterable[tuple[str, str]],
    members: Iterable[str] = (),
    *,
    tags: tuple[str, str] | None = None,
    comments: bool = True,
) -> str:
    """A script that defines ``variable``, an object with the ``roots``, each a module and a name in it.

    All that they use comes along; of classes also the methods and properties named in ``members``. ``tags``: a dict of
    classes by the name that plain data has in ``kind``, for fields of several classes. Raises `NotPortable` for Python
    outside the subset.
    """
    bundle = Bundle(tags, comments=comments)
    bundle.touched |= set(members)
    for module, name in roots:
        bundle.add(module, name)
    return bundle.script(variable)

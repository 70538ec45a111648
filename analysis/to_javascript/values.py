"""Translation of constants, names, attributes, displays and comprehensions."""

from __future__ import annotations

import ast
import json
from collections.abc import Callable
from functools import reduce

from analysis.to_javascript import calls
from analysis.to_javascript.modules import Definition, NotPortable, find, is_ours, load
from analysis.to_javascript.types import (
    FLAG,
    NONE,
    NUMBER,
    TEXT,
    UNKNOWN,
    Js,
    Type,
    decorators,
    either,
    fields_of,
    is_enum,
    is_named_tuple,
    list_of,
    member,
    of_annotation,
)

_WORDS = """
    arguments await case catch class const default delete do enum eval export extends false finally function if
    implements import instanceof interface let new null package private protected public py return static super switch
    this throw true try typeof undefined var void with yield Math Number String Array Object Map Set Error
"""
RESERVED = frozenset(_WORDS.split())
"""Names of Python that get a trailing underscore in JavaScript."""


def safe(name: str) -> str:
    """A name that is legal in JavaScript."""
    return f"{name}_" if name in RESERVED else name


def is_unused(target: ast.expr) -> bool:
    """Whether a part of a pattern has no use: `_`, which a pattern may have several times."""
    return isinstance(target, ast.Name) and target.id == "_"


class Values:
    """Translates values of one function or constant. ``need`` is told each definition that they use, and ``touch``
    the name of each attribute; ``named`` gives a definition's name in JavaScript."""

    def __init__(
        self,
        module: str,
        need: Callable[[Definition], str],
        touch: Callable[[str], None],
        result_of: Callable[[Definition], Type],
    ) -> None:
        self.module = module
        self.need = need
        self.touch = touch
        self.result_of = result_of
        self.locals: dict[str, Type] = {}
        self.owner: Definition | None = None
        """Class of ``self``."""
        self.says = False
        """Whether a text is the message of an error, in which formats have no effect."""
        self.this: dict[str, str] = {}
        """`self` and `cls` by their names in Python."""

    def test(self, node: ast.expr) -> str:
        """The truth of a value, as an operand of ``&&``."""
        raise NotImplementedError

    def refuse(self, node: ast.AST, what: str | None = None) -> NotPortable:
        return load(self.module).refuse(node, what or type(node).__name__)

    # ---- values ----

    def js(self, node: ast.expr) -> Js:
        translate = getattr(self, f"on_{type(node).__name__.lower()}", None)
        if translate is None:
            raise self.refuse(node)
        found: Js = translate(node)
        return found

    def on_constant(self, node: ast.Constant) -> Js:
        match node.value:
            case None:
                return Js("null", NONE)
            case bool(value):
                return Js("true" if value else "false", FLAG)
            case int(value):
                return Js(str(value), NUMBER)
            case float(value):
                return Js("Infinity" if value == float("inf") else repr(value), NUMBER)
            case str(value):
                return Js(json.dumps(value, ensure_ascii=False), TEXT)
        raise self.refuse(node)

    def on_joinedstr(self, node: ast.JoinedStr) -> Js:
        parts = []
        for one in node.values:
            match one:
                case ast.Constant(value=str(text)):
                    parts.append(text.replace("\\", "\\\\").replace("`", "\\`").replace("${", "\\${"))
                case ast.FormattedValue(value=value) if self.says or (one.format_spec is None and one.conversion == -1):
                    parts.append(f"${{{self.js(value).text}}}")
                case _:
                    raise self.refuse(one, "a format of a value")
        return Js(f"`{''.join(parts)}`", TEXT)

    def on_name(self, node: ast.Name) -> Js:
        name = node.id
        if name in self.this:
            return Js(self.this[name], Type("object" if name == "self" else "class", owner=self.owner))
        if name in self.locals:
            return Js(safe(name), self.locals[name])
        found = find(self.module, name)
        if isinstance(found, Definition):
            return self.global_(found)
        if found is not None:
            return calls.of_library(self, node, *found)
        if name in calls.BUILTINS:
            return Js(f"Math.{name}" if name in ("max", "min") else f"py.{safe(name)}", Type("function"))
        raise self.refuse(node, f"the name {name}")

    def global_(self, found: Definition) -> Js:
        if isinstance(found.node, ast.ClassDef):
            return Js(self.need(found), Type("class", owner=found))
        if isinstance(found.node, ast.FunctionDef):
            return Js(self.need(found), Type("function", (self.result_of(found),), found))
        return Js(self.need(found), self.result_of(found))

    def on_attribute(self, node: ast.Attribute) -> Js:
        if isinstance(node.value, ast.Name) and node.value.id not in self.locals:
            found = find(self.module, node.value.id)
            if isinstance(found, tuple):
                if found[1] is not None:
                    raise self.refuse(node, f"{node.value.id}.{node.attr}")
                own = find(found[0], node.attr) if is_ours(found[0]) else None
                return (
                    self.global_(own)
                    if isinstance(own, Definition)
                    else calls.of_library(self, node, found[0], node.attr)
                )
        value = self.js(node.value)
        self.touch(node.attr)
        kind = self.attribute(value.type, node.attr)
        if value.type.kind == "list" and node.attr == "append":
            return Js(f"(one) => {value.within(18)}.push(one)", Type("function"), 2)
        owner = value.type.owner
        if owner is not None and value.type.kind == "object" and kind.kind == "function":
            return Js(f"(...given) => {value.within(18)}.{node.attr}(...given)", kind, 2)
        return Js(f"{value.within(18)}.{node.attr}", kind)

    def attribute(self, of: Type, name: str) -> Type:
        """Type of an attribute of a value."""
        if of.kind == "union":
            return reduce(either, (self.attribute(one, name) for one in of.of))
        if of.owner is None or not isinstance(of.owner.node, ast.ClassDef):
            return UNKNOWN
        if is_enum(of.owner.node):
            return NUMBER if of.kind == "class" else UNKNOWN
        if name in (own := fields_of(of.owner)):
            return of_annotation(own[name].annotation, of.owner.module)
        if (found := member(of.owner, name)) is not None:
            result = of_annotation(found[1].returns, found[0].module)
            is_value = {"property", "cached_property"} & set(decorators(found[1]))
            return result if is_value else Type("function", (result,))
        for one in ast.walk(of.owner.node):  # annotated in a method: self.actions: list[Action] = []
            match one:
                case ast.AnnAssign(target=ast.Attribute(attr=attr), annotation=annotation) if attr == name:
                    return of_annotation(annotation, of.owner.module)
        return UNKNOWN

    # ---- displays ----

    def items(self, nodes: list[ast.expr]) -> tuple[str, list[Type]]:
        """Elements of a list or arguments of a call, and their types."""
        texts, types = [], []
        for node in nodes:
            if isinstance(node, ast.Starred):
                value = self.js(node.value)
                texts.append(f"...{value.within(3)}")
                types.append(value.type.item)
            else:
                value = self.js(node)
                texts.append(value.within(3))
                types.append(value.type)
        return ", ".join(texts), types

    def on_tuple(self, node: ast.Tuple | ast.List) -> Js:
        text, types = self.items(node.elts)
        fixed = isinstance(node, ast.Tuple) and not any(isinstance(one, ast.Starred) for one in node.elts)
        if not fixed and types:
            common = types[0]
            for one in types[1:]:
                common = either(common, one)
            types = [common]
        return Js(f"[{text}]", Type("list", tuple(types)))

    on_list = on_tuple

    def on_set(self, node: ast.Set) -> Js:
        text, types = self.items(node.elts)
        return Js(f"py.set([{text}])", Type("set", tuple(types[:1])))

    def on_dict(self, node: ast.Dict) -> Js:
        pairs, types = [], (UNKNOWN, UNKNOWN)
        for key, value in zip(node.keys, node.values, strict=True):
            right = self.js(value)
            if key is None:
                pairs.append(f"...{right.within(18)}.items()")
            else:
                left = self.js(key)
                pairs.append(f"[{left.within(3)}, {right.within(3)}]")
                types = left.type, right.type
        return Js(f"py.dict([{', '.join(pairs)}])", Type("map", types))

    # ---- comprehensions ----

    def array(self, value: Js) -> str:
        """A value that is iterated as an array."""
        return value.within(18) if value.type.kind == "list" else f"[...{value.within(3)}]"

    def bind(self, target: ast.expr, item: Type) -> str:
        """A pattern that takes apart one item of an iteration; its names are local from now on."""
        match target:
            case ast.Name(id=name):
                self.locals[name] = item
                return safe(name)
            case ast.Tuple(elts=parts) | ast.List(elts=parts):
                whole = item.kind == "list" and len(item.of) == len(parts)
                owner = item.owner.node if item.kind == "object" and item.owner is not None else None
                if isinstance(owner, ast.ClassDef) and is_named_tuple(owner) and item.owner is not None:
                    types = [of_annotation(one.annotation, item.owner.module) for one in fields_of(item.owner).values()]
                else:
                    types = list(item.of) if whole else [item.item] * len(parts)
                pairs = zip(parts, types, strict=False)
                return f"[{', '.join('' if is_unused(one) else self.bind(one, kind) for one, kind in pairs)}]"
            case ast.Starred(value=value):
                return f"...{self.bind(value, list_of(item))}"
        raise self.refuse(target, "this target")

    def comprehension(
        self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp | ast.DictComp, method: str = "map"
    ) -> Js:
        """The items as an array; ``method`` is what the innermost iteration does with them: map, some or every."""
        before = dict(self.locals)
        chain, pattern = "", ""
        opened = 0
        for place, one in enumerate(node.generators):
            if one.is_async:
                raise self.refuse(one.iter)
            values = self.js(one.iter)
            source = self.array(values)
            pattern = self.bind(one.target, values.type.item)
            for condition in one.ifs:
                source += f".filter(({pattern}) => {self.test(condition)})"
            chain += source
            if place < len(node.generators) - 1:
                chain += f".flatMap(({pattern}) => "
                opened += 1
        if isinstance(node, ast.DictComp):
            key, value = self.js(node.key), self.js(node.value)
            item = Js(f"[{key.within(3)}, {value.within(3)}]", Type("list", (key.type, value.type)))
        else:
            item = self.js(node.elt)
        text = self.test(node.elt) if method != "map" and not isinstance(node, ast.DictComp) else item.within(3)
        if text.startswith("{"):
            text = f"({text})"
        if method != "map" and opened:
            raise self.refuse(node, "any or all over nested iterations")
        if method != "map" or text != pattern:
            chain += f".{method}(({pattern}) => {text})"
        self.locals = before
        return Js(chain + ")" * opened, list_of(item.type))

    def on_listcomp(self, node: ast.ListComp) -> Js:
        return self.comprehension(node)

    def on_generatorexp(self, node: ast.GeneratorExp) -> Js:
        return self.comprehension(node)

    def on_setcomp(self, node: ast.SetComp) -> Js:
        found = self.comprehension(node)
        return Js(f"py.set({found.text})", Type("set", found.type.of))

    def on_dictcomp(self, node: ast.DictComp) -> Js:
        found = self.comprehension(node)
        return Js(f"py.dict({found.text})", Type("map", found.type.item.of))

    def on_lambda(self, node: ast.Lambda) -> Js:
        before = dict(self.locals)
        names = [one.arg for one in node.args.args]
        self.locals |= dict.fromkeys(names, UNKNOWN)
        body = self.js(node.body)
        self.locals = before
        return Js(f"({', '.join(map(safe, names))}) => {body.within(3)}", Type("function", (body.type,)), 2)

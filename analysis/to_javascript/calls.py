"""Translation of calls: of this program's functions and classes, of Python's built-in ones, and of methods."""

from __future__ import annotations

import ast

from analysis.to_javascript.modules import Definition, find, is_ours
from analysis.to_javascript.types import (
    FLAG,
    NUMBER,
    TEXT,
    UNKNOWN,
    Js,
    Translator,
    Type,
    fields_of,
    is_enum,
    is_record,
    list_of,
    member,
    of_annotation,
)

_AS_LIST = Type("list")
BUILTINS: dict[str, Type] = {
    **dict.fromkeys(("abs", "float", "int", "len", "round"), NUMBER),
    **dict.fromkeys(("all", "any", "bool"), FLAG),
    **dict.fromkeys(("divmod",), Type("list", (NUMBER, NUMBER))),
    **dict.fromkeys(
        ("dict", "frozenset", "list", "map", "max", "min", "next", "range", "reversed", "set", "sorted"), UNKNOWN
    ),
    **dict.fromkeys(("filter", "getattr", "type", "isinstance", "sum", "tuple", "zip", "enumerate"), UNKNOWN),
    "str": TEXT,
}
"""Built-in functions with a counterpart, and what they return where that does not depend on their arguments."""
_CONSTANTS = {("math", "inf"): "Infinity", ("math", "pi"): "Math.PI"}
_LIBRARY: dict[tuple[str, str], tuple[str, Type]] = {
    **{("math", name): (f"Math.{name}", NUMBER) for name in ("ceil", "floor", "sqrt", "log2", "exp", "hypot", "trunc")},
    ("math", "log"): ("Math.log", NUMBER),
    ("math", "prod"): ("py.prod", NUMBER),
    ("math", "gcd"): ("py.gcd", NUMBER),
    ("operator", "mul"): ("py.multiply", NUMBER),
    ("operator", "add"): ("py.add", UNKNOWN),
    ("operator", "attrgetter"): ("py.attrgetter", Type("function")),
    ("dataclasses", "fields"): ("py.fields", UNKNOWN),
    ("dataclasses", "replace"): ("py.replace", UNKNOWN),
    ("itertools", "accumulate"): ("py.accumulate", Type("list", (NUMBER,))),
    ("operator", "itemgetter"): ("py.itemgetter", Type("function")),
    ("itertools", "pairwise"): ("py.pairwise", UNKNOWN),
    ("bisect", "bisect_left"): ("py.bisect_left", NUMBER),
    ("bisect", "bisect_right"): ("py.bisect_right", NUMBER),
    ("functools", "reduce"): ("py.reduce", UNKNOWN),
    ("itertools", "chain"): ("py.chain", UNKNOWN),
    ("re", "compile"): ("py.pattern", UNKNOWN),
    ("collections", "Counter"): ("py.Counter", Type("map", (UNKNOWN, NUMBER))),
    ("typing", "get_args"): ("", UNKNOWN),
    ("typing", "cast"): ("", UNKNOWN),
}
_METHODS = {
    "append": "push",
    "startswith": "startsWith",
    "endswith": "endsWith",
    "lower": "toLowerCase",
    "upper": "toUpperCase",
}
"""Methods of built-in types with other names in JavaScript."""
_SAME = ("add", "clear", "get", "items", "keys", "pop", "setdefault", "split", "update", "values", "copy")
"""Methods that have the same name there, or in `py.Dict`."""
_OF_TEXT = ("startswith", "endswith", "lower", "upper", "replace", "join")


def of_library(at: Translator, node: ast.AST, module: str, name: str | None) -> Js:
    """A name that is imported from a library."""
    if name is not None and (module, name) in _CONSTANTS:
        return Js(_CONSTANTS[module, name], NUMBER)
    if name is None or (module, name) not in _LIBRARY or not _LIBRARY[module, name][0]:
        raise at.refuse(node, f"{module}.{name}" if name else module)
    text, result = _LIBRARY[module, name]
    return Js(text, Type("function", (result,)))


def call(at: Translator, node: ast.Call) -> Js:
    if any(one.arg is None for one in node.keywords):
        raise at.refuse(node, "an argument **")
    match node.func:
        case ast.Name(id=name) if name not in at.locals and name not in at.this:
            found = find(at.module, name)
            if isinstance(found, Definition):
                return _own(at, node, found)
            if found is not None:
                return _library(at, node, *found)
            return _builtin(at, node, name)
        case ast.Attribute(value=ast.Name(id=name), attr=attr) if name not in at.locals:
            found = find(at.module, name)
            if isinstance(found, tuple) and found[1] is None:
                if is_ours(found[0]):
                    own = find(found[0], attr)
                    if isinstance(own, Definition):
                        return _own(at, node, own)
                return _library(at, node, found[0], attr)
            if name == "dict" and attr == "fromkeys":
                return _from_keys(at, node)
    if isinstance(node.func, ast.Attribute):
        return _method(at, node, node.func)
    return _applied(at, node)


def _applied(at: Translator, node: ast.Call) -> Js:
    """A call of a value: a local name, an element, a result."""
    value = at.js(node.func)
    if value.type.owner is not None and isinstance(value.type.owner.node, ast.FunctionDef):
        given = _arguments(at, node, _parameters(value.type.owner.node.args))
        return Js(f"{value.within(18)}({given})", value.type.of[0])
    if value.type.kind == "class" and value.type.owner is not None:
        return Js(
            f"new {value.text}({_arguments(at, node, _constructor(value.type.owner))})",
            Type("object", owner=value.type.owner),
        )
    if node.keywords:
        raise at.refuse(node, "an argument by name of a function in a variable")
    return Js(f"{value.within(18)}({at.items(node.args)[0]})", value.type.of[0] if value.type.of else UNKNOWN)


def _own(at: Translator, node: ast.Call, found: Definition) -> Js:
    """A call of a function or a class of this program."""
    value = at.global_(found)
    match found.node:
        case ast.ClassDef() if is_enum(found.node):
            return at.js(node.args[0])
        case ast.ClassDef():
            made = f"new {value.text}({_arguments(at, node, _constructor(found))})"
            return Js(made, Type("object", owner=found))
        case ast.FunctionDef(args=names):
            return Js(f"{value.text}({_arguments(at, node, _parameters(names))})", value.type.of[0])
    return _applied(at, node)


def _constructor(owner: Definition) -> list[str]:
    assert isinstance(owner.node, ast.ClassDef)
    if is_record(owner.node) or fields_of(owner):
        return list(fields_of(owner))
    made = member(owner, "__init__")
    return _parameters(made[1].args)[1:] if made is not None else []


def _parameters(names: ast.arguments) -> list[str]:
    rest = [f"*{names.vararg.arg}"] if names.vararg is not None else []
    return [one.arg for one in (*names.posonlyargs, *names.args)] + rest + [one.arg for one in names.kwonlyargs]


def _arguments(at: Translator, node: ast.Call, names: list[str]) -> str:
    """Arguments in the order of the parameters; those that keep their default are left out or undefined."""
    by_name = {one.arg: at.js(one.value).within(3) for one in node.keywords}
    if not by_name:
        return at.items(node.args)[0]
    if any(isinstance(one, ast.Starred) for one in node.args):
        raise at.refuse(node, "an argument * beside arguments by name")
    given = [at.js(one).within(3) for one in node.args]
    for name in names[len(given) :]:
        if not by_name:
            break
        given.append(by_name.pop(name, "undefined"))
    if by_name:
        raise at.refuse(node, f"the argument {next(iter(by_name))}")
    return ", ".join(given)


def _builtin(at: Translator, node: ast.Call, name: str) -> Js:
    if name not in BUILTINS:
        raise at.refuse(node, name)
    named = {one.arg or "": one.value for one in node.keywords if one.arg != "strict"}
    if name in ("any", "all") and isinstance(node.args[0], ast.GeneratorExp) and len(node.args[0].generators) == 1:
        found = at.comprehension(node.args[0], "some" if name == "any" else "every")
        return Js(found.text, FLAG)
    if name in ("max", "min"):
        return _extreme(at, node, name, named)
    if name == "isinstance":
        return _isinstance(at, node)
    if name == "bool":
        return Js(f"Boolean({at.test(node.args[0])})", FLAG)
    if name == "sum" and len(node.args) > 1:
        at.touch("__add__")
    text, types = at.items(node.args)
    first = types[0] if types else UNKNOWN
    match name:
        case "len" if first.kind in ("list", "text"):
            return Js(f"{at.js(node.args[0]).within(18)}.length", NUMBER)
        case "len" if first.kind in ("map", "set"):
            return Js(f"{at.js(node.args[0]).within(18)}.size", NUMBER)
        case "type":
            return Js(f"{at.js(node.args[0]).within(18)}.constructor", Type("class"))
        case "getattr":
            owner, field = at.js(node.args[0]), at.js(node.args[1])
            if isinstance(node.args[1], ast.Constant):
                at.touch(str(node.args[1].value))
            return Js(f"{owner.within(18)}[{field.text}]")
        case "map" | "filter":
            doing, source = at.js(node.args[0]), at.js(node.args[1])
            item = (
                doing.type.of[0] if name == "map" and doing.type.of else UNKNOWN if name == "map" else source.type.item
            )
            if len(node.args) > 2:
                return Js(
                    f"py.zip({at.items(node.args[1:])[0]}).map((given) => {doing.within(18)}(...given))", list_of(item)
                )
            return Js(f"{at.array(source)}.{name}((one) => {doing.within(18)}(one))", list_of(item))
        case "sorted":
            options = ", ".join(f"{key}: {at.js(value).within(3)}" for key, value in named.items())
            return Js(f"py.sorted({text}{f', {{ {options} }}' if options else ''})", list_of(first.item))
        case "int" if first.kind == "flag":
            return Js(f"Number({text})", NUMBER)
        case "int":
            return Js(f"Math.trunc({text})", NUMBER)
        case "abs":
            return Js(f"Math.abs({text})", NUMBER)
        case "float":
            return Js(f"Number({text})", NUMBER)
        case "tuple" | "list":
            if not node.args:
                return Js("[]", _AS_LIST)
            if isinstance(node.args[0], (ast.GeneratorExp, ast.ListComp)):
                return Js(text, Type("list", first.of))
            return Js(f"[...{text}]", Type("list", first.of if first.kind == "list" else (first.item,)))
    if named and name not in ("sum", "enumerate"):
        raise at.refuse(node, f"{name} with {', '.join(named)}")
    text = ", ".join([*([text] if text else []), *(at.js(value).within(3) for value in named.values())])
    return Js(f"py.{name.removeprefix('frozen')}({text})", _result(name, types, BUILTINS[name]))


def _result(name: str, types: list[Type], usual: Type) -> Type:
    first = types[0] if types else UNKNOWN
    match name:
        case "range":
            return list_of(NUMBER)
        case "zip":
            return list_of(Type("list", tuple(one.item for one in types)))
        case "enumerate":
            return list_of(Type("list", (NUMBER, first.item)))
        case "reversed":
            return list_of(first.item)
        case "sum":
            item = types[1] if len(types) > 1 else first.item
            return NUMBER if item.kind in ("number", "flag") else item
        case "next":
            return first.item
        case "set" | "frozenset":
            return Type("set", (first.item,))
        case "dict":
            return first if first.kind == "map" else Type("map", first.item.of)
    return usual


def _extreme(at: Translator, node: ast.Call, name: str, named: dict[str, ast.expr]) -> Js:
    text, types = at.items(node.args)
    several = len(node.args) > 1 or isinstance(node.args[0], ast.Starred)
    item = types[0] if several else types[0].item
    if several and item.kind == "none":
        item = types[-1]
    numbers = all(one.kind in ("number", "flag") for one in (types if several else [item]))
    if numbers and not named:
        return Js(f"Math.{name}({text if several else f'...{text}'})", NUMBER)
    options = ", ".join(
        f"{'otherwise' if key == 'default' else key}: {at.js(value).within(3)}" for key, value in named.items()
    )
    return Js(f"py.{name}({f'[{text}]' if several else text}{f', {{ {options} }}' if options else ''})", item)


def _isinstance(at: Translator, node: ast.Call) -> Js:
    value, kinds = at.js(node.args[0]), node.args[1]
    tests = []
    for one in _alternatives(kinds):
        owner = at.js(one).type.owner
        if owner is not None and isinstance(owner.node, ast.ClassDef) and is_enum(owner.node):
            raise at.refuse(node, "isinstance of an enumeration")
        of = {"int": "number", "float": "number", "str": "string", "bool": "boolean"}.get(ast.unparse(one))
        tests.append(
            f'typeof {value.within(14)} === "{of}"' if of else f"{value.within(10)} instanceof {at.js(one).text}"
        )
    return Js(" || ".join(dict.fromkeys(tests)), FLAG, 4)


def _alternatives(node: ast.expr) -> list[ast.expr]:
    """The classes of an isinstance: a tuple of them, or several with ``|``."""
    if isinstance(node, ast.BinOp):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    return node.elts if isinstance(node, ast.Tuple) else [node]


def _library(at: Translator, node: ast.Call, module: str, name: str | None) -> Js:
    match module, name:
        case "typing", "get_args":
            return _choices(at, node)
        case "typing", "cast":
            return at.js(node.args[1])
        case "collections", "Counter" | "defaultdict":
            if name == "Counter" and node.args:
                values = at.js(node.args[0])
                return Js(f"py.counted({values.within(3)})", Type("map", (values.type.item, NUMBER)))
            empty = {"list": "[]", "dict": "py.dict()", "set": "py.set()"}
            missing = empty.get(ast.unparse(node.args[0]), "0") if node.args else "0"
            return Js(
                f"new py.Dict([], () => {missing})", Type("map", (UNKNOWN, NUMBER if missing == "0" else UNKNOWN))
            )
        case "dataclasses", "replace":
            return _replaced(at, node, at.js(node.args[0]))
    value = of_library(at, node, module, name)
    if node.keywords:
        raise at.refuse(node, f"{module}.{name} with an argument by name")
    return Js(f"{value.text}({at.items(node.args)[0]})", value.type.of[0] if value.type.of else UNKNOWN)


def _choices(at: Translator, node: ast.Call) -> Js:
    """The texts of a Literal."""
    found = find(at.module, ast.unparse(node.args[0]))
    match found:
        case Definition(node=ast.Assign(value=ast.Subscript(value=ast.Name(id="Literal"), slice=choices))):
            values = choices.elts if isinstance(choices, ast.Tuple) else [choices]
            return Js(f"[{', '.join(at.js(one).text for one in values)}]", list_of(TEXT))
    raise at.refuse(node, "get_args of this")


def _replaced(at: Translator, node: ast.Call, value: Js) -> Js:
    changes = ", ".join(f"{one.arg}: {at.js(one.value).within(3)}" for one in node.keywords)
    return Js(f"py.replace({value.within(3)}, {{ {changes} }})", value.type)


def _from_keys(at: Translator, node: ast.Call) -> Js:
    keys = at.js(node.args[0])
    value = at.js(node.args[1]) if len(node.args) > 1 else Js("null")
    return Js(
        f"py.dict({at.array(keys)}.map((key) => [key, {value.within(3)}]))", Type("map", (keys.type.item, value.type))
    )


def _method(at: Translator, node: ast.Call, func: ast.Attribute) -> Js:
    name, value = func.attr, at.js(func.value)
    owner = value.type.owner
    if value.type.kind == "union":  # its classes have the same methods
        owner = next((one.owner for one in value.type.of if one.owner is not None and member(one.owner, name)), None)
    if owner is not None and value.type.kind != "function" and (found := member(owner, name)) is not None:
        at.touch(name)
        names = _parameters(found[1].args)[1:]
        result = of_annotation(found[1].returns, found[0].module)
        return Js(f"{value.within(18)}.{name}({_arguments(at, node, names)})", result)
    if name == "_replace":
        return _replaced(at, node, value)
    if owner is not None and name in fields_of(owner):
        return _applied(at, node)
    if node.keywords:
        raise at.refuse(node, f"an argument by name of the method {name}")
    text, _ = at.items(node.args)
    receiver, kind = value.within(18), value.type
    of = kind.of if len(kind.of) == 2 else (UNKNOWN, UNKNOWN)
    match name:
        case "join":
            joined = at.array(at.js(node.args[0]))
            return Js(f"{joined}.join({value.text})", TEXT)
        case "extend":
            return Js(f"{receiver}.push(...{text})")
        case "insert":
            return Js(f"{receiver}.splice({at.js(node.args[0]).within(3)}, 0, {at.js(node.args[1]).within(3)})")
        case "index" | "remove" | "rpartition":
            result = {"index": NUMBER, "rpartition": list_of(TEXT)}.get(name, UNKNOWN)
            return Js(f"py.{name}({value.within(3)}, {text})", result)
        case "replace" if kind.kind in ("text", "unknown"):
            return Js(f"{receiver}.replaceAll({text})", TEXT)
        case "removeprefix":
            return Js(f"{receiver}.replace(new RegExp(`^${{{text}}}`), '')", TEXT)
        case "items":
            return Js(f"{receiver}.items()", list_of(Type("list", of)))
        case "keys" | "values":
            return Js(f"{receiver}.{name}()", list_of(of[name == "values"]))
        case "get" | "setdefault" | "pop" if kind.kind != "list":
            return Js(f"{receiver}.{name}({text})", of[1])
        case "pop" if not node.args:
            return Js(f"{receiver}.pop()", kind.item)
        case "count":
            return Js(f"{at.array(value)}.filter((one) => py.equal(one, {text})).length", NUMBER)
        case "split":
            return Js(f"{receiver}.split({text})", list_of(TEXT))
        case "copy" if kind.kind in ("map", "set"):
            return Js(f"py.{'dict' if kind.kind == 'map' else 'set'}({receiver})", kind)
        case "copy":
            return Js(f"[...{receiver}]", kind)
    if name in _METHODS:
        result = FLAG if name in ("startswith", "endswith") else TEXT if name in _OF_TEXT else UNKNOWN
        return Js(f"{receiver}.{_METHODS[name]}({text})", result)
    if name in _SAME or (kind.kind in ("unknown", "object") and not name.startswith("__")):
        at.touch(name)
        return Js(f"{receiver}.{name}({text})")
    raise at.refuse(node, f"the method {name} of {kind.kind}")

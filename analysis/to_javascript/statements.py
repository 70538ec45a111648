"""Translation of statements, functions and classes."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from analysis.to_javascript.expressions import Expressions
from analysis.to_javascript.modules import Definition
from analysis.to_javascript.scopes import Scopes, scopes
from analysis.to_javascript.types import (
    UNKNOWN,
    Js,
    Type,
    decorators,
    either,
    list_of,
    of_annotation,
)
from analysis.to_javascript.values import safe

_INDENT = "  "
_LEFT_OUT = (ast.Pass, ast.Assert, ast.Delete, ast.Import, ast.ImportFrom)
"""Statements without effect on a result."""


class Statements(Expressions):
    """Translates the body of one function. Names are declared where they are first assigned if that is outside of
    branches and loops, and otherwise at the top of the function."""

    def function(self, node: ast.FunctionDef, *, drop_first: bool = False) -> tuple[str, str, bool]:
        """(parameters, body, whether it is a generator) of a function; ``drop_first`` leaves out ``self``."""
        before = dict(self.locals)
        parameters = self.parameters(node.args, drop_first)
        kept, names = self.scopes, {one.arg for one in ast.walk(node.args) if isinstance(one, ast.arg)}
        self.scopes = scopes(node.body, names)
        hoisted = self.scopes.hoisted
        self.locals |= dict.fromkeys(hoisted, UNKNOWN)
        lines = self.block(node.body)
        if hoisted:
            lines.insert(0, f"let {', '.join(map(safe, hoisted))};")
        self.locals, self.scopes = before, kept
        generator = any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in _own_nodes(node.body))
        return parameters, "\n".join(lines), generator

    def parameters(self, args: ast.arguments, drop_first: bool) -> str:
        if args.kwarg is not None:
            raise self.refuse(args.kwarg, "a parameter **")
        plain = [*args.posonlyargs, *args.args]
        defaults: list[ast.expr | None] = [*([None] * (len(plain) - len(args.defaults))), *args.defaults]
        pairs = list(zip(plain, defaults, strict=True))[1 if drop_first else 0 :]
        pairs += list(zip(args.kwonlyargs, args.kw_defaults, strict=True))
        texts = []
        for one, default in pairs:
            self.locals[one.arg] = of_annotation(one.annotation, self.module)
            texts.append(safe(one.arg) + (f" = {self.js(default).within(3)}" if default is not None else ""))
        if args.vararg is not None:
            self.locals[args.vararg.arg] = list_of(of_annotation(args.vararg.annotation, self.module))
            if args.kwonlyargs:
                raise self.refuse(args.vararg, "a parameter after *")
            texts.append(f"...{safe(args.vararg.arg)}")
        return ", ".join(texts)

    def block(self, body: Iterable[ast.stmt]) -> list[str]:
        lines: list[str] = []
        for node in body:
            if isinstance(node, _LEFT_OUT) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)):
                continue
            translate = getattr(self, f"on_{type(node).__name__.lower()}", None)
            if translate is None:
                raise self.refuse(node)
            self.statement = node
            lines += translate(node)
        return lines

    def inner(self, body: Iterable[ast.stmt]) -> list[str]:
        return [_INDENT + line for text in self.block(body) for line in text.split("\n")]

    def on_return(self, node: ast.Return) -> list[str]:
        return [f"return {self.js(node.value).text};" if node.value is not None else "return;"]

    def on_raise(self, node: ast.Raise) -> list[str]:
        said = node.exc.args[0] if isinstance(node.exc, ast.Call) and node.exc.args else None
        if said is None:
            raise self.refuse(node, "raise without a message")
        self.says = True
        message = self.js(said).text
        self.says = False
        return [f"throw new Error({message});"]

    def on_expr(self, node: ast.Expr) -> list[str]:
        match node.value:
            case ast.Yield(value=value):
                return [f"yield {self.js(value).text if value is not None else 'null'};"]
            case ast.YieldFrom(value=value):
                return [f"yield* {self.js(value).text};"]
        return [f"{self.js(node.value).text};"]

    # ---- assignments ----

    def declare(self, names: set[str]) -> str:
        """The keyword before an assignment of these names."""
        new = self.scopes.at.get(id(self.statement), set()) & names
        keyword = "let" if new & self.scopes.often else "const"
        if new and new != names:
            return f"let {', '.join(map(safe, sorted(new)))};\n"
        return f"{keyword} " if new else ""

    def learn(self, name: str, kind: Type) -> None:
        """Notes the type of a value that a name gets."""
        earlier = self.locals.get(name, UNKNOWN)
        new = name in self.scopes.at.get(id(self.statement), set())
        self.locals[name] = kind if new or earlier.kind == "unknown" else either(earlier, kind)

    def on_assign(self, node: ast.Assign) -> list[str]:
        names = [one for one in node.targets if isinstance(one, ast.Name)]
        if len(node.targets) == 1:
            return [self.assigned(node.targets[0], self.js(node.value))]
        if not names:
            raise self.refuse(node, "an assignment to several places")
        lines = [self.assigned(names[0], self.js(node.value))]
        return lines + [self.assigned(one, self.js(names[0])) for one in node.targets if one is not names[0]]

    def assigned(self, target: ast.expr, value: Js, kind: Type | None = None) -> str:
        match target:
            case ast.Name(id=name):
                self.learn(name, kind or value.type)
                return f"{self.declare({name})}{safe(name)} = {value.within(2)};"
            case ast.Attribute():
                return f"{self.js(target).text} = {value.within(2)};"
            case ast.Subscript(value=owner, slice=place) if not isinstance(place, ast.Slice):
                held, at = self.js(owner), self.js(place)
                if held.type.kind == "list":
                    return f"{held.within(18)}[{at.text}] = {value.within(2)};"
                if held.type.kind == "map":
                    return f"{held.within(18)}.set({at.within(3)}, {value.within(3)});"
            case ast.Tuple(elts=parts):
                return self.unpacked(target, parts, value)
        raise self.refuse(target, f"an assignment to {ast.unparse(target)}")

    def unpacked(self, target: ast.Tuple, parts: list[ast.expr], value: Js) -> str:
        stored = {one.id for one in ast.walk(target) if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        names = stored - {"_"}
        keyword = self.declare(names)
        for place, one in enumerate(parts[:-1]):
            if isinstance(one, ast.Starred):  # JavaScript takes the rest at the end alone
                after = len(parts) - place - 1
                item = value.type.item
                around = (*[item] * place, list_of(item), *[item] * after)
                value = Js(f"py.starred({value.within(3)}, {place}, {after})", Type("list", around))
                parts = [*parts[:place], one.value, *parts[place + 1 :]]
                target = ast.copy_location(ast.Tuple(parts, ast.Store()), target)
        kinds = list(value.type.of) if len(value.type.of) == len(parts) else [value.type.item] * len(parts)
        if all(isinstance(one, (ast.Name, ast.Starred, ast.Tuple)) for one in parts):
            earlier = {name: self.locals.get(name, UNKNOWN) for name in names}
            pattern = self.bind(target, value.type)
            found = {name: self.locals[name] for name in names}
            self.locals |= earlier
            for name, kind in found.items():
                self.learn(name, kind)
            return f"{keyword}{pattern} = {value.within(2)};"
        targets = []
        for one, kind in zip(parts, kinds, strict=True):
            match one:
                case ast.Subscript(value=owner, slice=at) if self.js(owner).type.kind == "list":
                    targets.append(f"{self.js(owner).within(18)}[{self.js(at).text}]")
                case ast.Name(id=name):
                    self.learn(name, kind)
                    targets.append(safe(name))
                case _:
                    raise self.refuse(target, f"an assignment to {ast.unparse(target)}")
        if names and keyword.startswith(("const", "let ")) and ";" not in keyword:
            keyword = f"let {', '.join(map(safe, sorted(names)))};\n"
        return f"{keyword}[{', '.join(targets)}] = {value.within(2)};"

    def on_annassign(self, node: ast.AnnAssign) -> list[str]:
        kind = of_annotation(node.annotation, self.module)
        if node.value is None:
            return []
        value = self.js(node.value)
        if kind.kind == "map" and value.text.startswith("py.dict([") and "Counter" in ast.unparse(node.annotation):
            raise self.refuse(node)
        return [self.assigned(node.target, value, kind if kind != UNKNOWN else value.type)]

    def on_augassign(self, node: ast.AugAssign) -> list[str]:
        target = node.target
        held = self.js(ast.parse(ast.unparse(target), mode="eval").body)
        value = self.js(node.value)
        if held.type.kind == "list" and isinstance(node.op, ast.Add):
            return [f"{held.within(18)}.push(...{value.within(3)});"]
        if held.type.kind == "map" and isinstance(node.op, ast.BitOr):
            return [f"{held.within(18)}.update({value.within(3)});"]
        plain = {ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/"}.get(type(node.op))
        numbers = held.type.kind in ("number", "text") and value.type.kind in ("number", "text", "flag", "unknown")
        if plain and numbers and isinstance(target, (ast.Name, ast.Attribute)):
            return [f"{held.text} {plain}= {value.within(2)};"]
        return [self.assigned(target, self.binary(node, node.op, held, value))]

    # ---- branches and loops ----

    def on_if(self, node: ast.If) -> list[str]:
        lines = [f"if ({_bare(self.test(node.test))}) {{", *self.inner(node.body)]
        while len(node.orelse) == 1 and isinstance(node.orelse[0], ast.If):
            node = node.orelse[0]
            lines += [f"}} else if ({_bare(self.test(node.test))}) {{", *self.inner(node.body)]
        if node.orelse:
            lines += ["} else {", *self.inner(node.orelse)]
        return [*lines, "}"]

    def on_while(self, node: ast.While) -> list[str]:
        if node.orelse:
            raise self.refuse(node, "while with else")
        return [f"while ({_bare(self.test(node.test))}) {{", *self.inner(node.body), "}"]

    def on_for(self, node: ast.For) -> list[str]:
        if node.orelse:
            raise self.refuse(node, "for with else")
        values = self.js(node.iter)
        targets = {one.id for one in ast.walk(node.target) if isinstance(one, ast.Name)}
        targets -= {"_"} if len(targets) > 1 else set()
        declared = self.scopes.at.get(id(node), set())
        if declared - {"_"} and declared - {"_"} != targets:
            raise self.refuse(node, "a loop with some names that are used outside of it")
        keyword = ("let " if targets & self.scopes.often else "const ") if declared else ""
        pattern = self.bind(node.target, values.type.item)
        return [f"for ({keyword}{pattern} of {values.within(3)}) {{", *self.inner(node.body), "}"]

    def on_continue(self, node: ast.Continue) -> list[str]:
        return ["continue;"]

    def on_break(self, node: ast.Break) -> list[str]:
        return ["break;"]

    def on_functiondef(self, node: ast.FunctionDef) -> list[str]:
        if node.decorator_list:
            raise self.refuse(node, "a decorator of an inner function")
        own = Definition(self.module, node.name, node)
        self.locals[node.name] = Type("function", (of_annotation(node.returns, self.module),), own)
        parameters, body, generator = self.function(node)
        if generator:
            raise self.refuse(node, "an inner generator")
        return [f"const {safe(node.name)} = ({parameters}) => {{", *(_INDENT + line for line in body.split("\n")), "};"]

    scopes = Scopes()
    statement: ast.stmt


def _own_nodes(body: list[ast.stmt]) -> Iterable[ast.AST]:
    for node in body:
        if not isinstance(node, ast.FunctionDef):
            yield node
            for child in ast.iter_child_nodes(node):
                yield from _own_nodes([child]) if isinstance(child, ast.stmt) else ast.walk(child)


def _bare(text: str) -> str:
    """A test without the parentheses around it."""
    return text[1:-1] if Expressions._closed(text) else text


def is_cached(node: ast.FunctionDef) -> bool:
    return bool({"lru_cache", "cache"} & set(decorators(node)))

"""Translation of expressions. Operators that differ between the languages depend on the types of their operands; where
these are unknown, a function of ``templates/explorer/python.js`` decides at run time."""

from __future__ import annotations

import ast

from analysis.to_javascript import calls
from analysis.to_javascript.types import FLAG, NUMBER, PLAIN, TEXT, Js, either, list_of, member
from analysis.to_javascript.values import Values, safe

_ARITHMETIC = {
    ast.Add: ("+", 11, "add"),
    ast.Sub: ("-", 11, "sub"),
    ast.Mult: ("*", 12, "mul"),
    ast.Div: ("/", 12, "div"),
}
_ORDER = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


class Expressions(Values):
    """Translates expressions of one function or constant."""

    def test(self, node: ast.expr) -> str:
        """The truth of a value, as an operand of ``&&``."""
        match node:
            case ast.UnaryOp(op=ast.Not(), operand=inner):
                return self.on_not(inner).text
            case ast.BoolOp(op=op, values=values):
                sign = " && " if isinstance(op, ast.And) else " || "
                return f"({sign.join(self.test(one) for one in values)})"
            case ast.BinOp(op=ast.Mod(), left=left, right=right):
                return f"{self.js(left).within(12)} % {self.js(right).within(13)}"
        return self.truth(self.js(node))

    def truth(self, value: Js) -> str:
        kind = value.type.kind
        if kind in (*PLAIN, "object", "union", "function", "class"):
            return value.within(6)
        if kind == "list":
            return f"{value.within(18)}.length > 0"
        return f"{value.within(18)}.size > 0" if kind in ("map", "set") else f"py.truth({value.text})"

    def on_not(self, inner: ast.expr) -> Js:
        text = self.test(inner)
        bare = text.replace(".", "").replace("_", "").isalnum() or (
            text.startswith("py.truth(") and text.count("(") == 1
        )
        return Js(f"!{text}" if bare or self._closed(text) else f"!({text})", FLAG, 14)

    @staticmethod
    def _closed(text: str) -> bool:
        """Whether the text is one pair of parentheses."""
        depth = 0
        for place, sign in enumerate(text):
            depth += {"(": 1, ")": -1}.get(sign, 0)
            if depth == 0 and place < len(text) - 1:
                return False
        return text.startswith("(")

    def on_unaryop(self, node: ast.UnaryOp) -> Js:
        if isinstance(node.op, ast.Not):
            return self.on_not(node.operand)
        if not isinstance(node.op, ast.USub):
            raise self.refuse(node)
        return Js(f"-{self.js(node.operand).within(15)}", NUMBER, 14)

    def on_boolop(self, node: ast.BoolOp) -> Js:
        values = [self.js(one) for one in node.values]
        is_and = isinstance(node.op, ast.And)
        common = values[0].type
        for one in values[1:]:
            common = either(common, one.type)
        if all(one.type.kind in (*PLAIN, "object", "union") for one in values[:-1]):
            sign, binds = ("&&", 5) if is_and else ("||", 4)
            return Js(f" {sign} ".join(one.within(6) for one in values), common, binds)
        text = values[-1].within(3)
        for one in reversed(values[:-1]):
            text = f"py.{'and' if is_and else 'or'}({one.within(3)}, () => {text})"
        return Js(text, common)

    def on_ifexp(self, node: ast.IfExp) -> Js:
        test, then, otherwise = self.test(node.test), self.js(node.body), self.js(node.orelse)
        return Js(f"{test} ? {then.within(3)} : {otherwise.within(3)}", either(then.type, otherwise.type), 2)

    def on_binop(self, node: ast.BinOp) -> Js:
        return self.binary(node, node.op, self.js(node.left), self.js(node.right))

    def binary(self, node: ast.AST, op: ast.operator, left: Js, right: Js) -> Js:
        kinds = {left.type.kind, right.type.kind}
        if isinstance(op, ast.FloorDiv):
            return Js(f"Math.floor({left.within(12)} / {right.within(13)})", NUMBER)
        if isinstance(op, ast.Mod) and left.type.kind != "text":
            return Js(f"py.mod({left.within(3)}, {right.within(3)})", NUMBER)
        if isinstance(op, ast.Pow):
            return Js(f"{left.within(15)} ** {right.within(13)}", NUMBER, 13)
        if isinstance(op, ast.BitOr) and left.type.kind == "map":
            return Js(f"py.merged({left.within(3)}, {right.within(3)})", left.type)
        if type(op) not in _ARITHMETIC:
            raise self.refuse(node, f"the operator {type(op).__name__} of {left.type.kind} and {right.type.kind}")
        sign, binds, name = _ARITHMETIC[type(op)]
        if left.type.kind == "object" and left.type.owner is not None and member(left.type.owner, f"__{name}__"):
            self.touch(f"__{name}__")
            return Js(
                f"{left.within(18)}.__{name}__({right.within(3)})", self.attribute(left.type, f"__{name}__").of[0]
            )
        if isinstance(op, ast.Add) and kinds == {"list"}:
            return Js(f"[...{left.within(3)}, ...{right.within(3)}]", either(left.type, right.type))
        if isinstance(op, ast.Mult) and left.type.kind == "list":
            return Js(f"py.repeat({left.within(3)}, {right.within(3)})", list_of(left.type.item))
        if isinstance(op, ast.Mult) and left.type.kind == "text":
            return Js(f"{left.within(18)}.repeat({right.within(3)})", TEXT)
        if kinds <= {"number", "flag", "none"} or isinstance(op, (ast.Sub, ast.Div)) or kinds == {"text"}:
            return Js(
                f"{left.within(binds)} {sign} {right.within(binds + 1)}", TEXT if kinds == {"text"} else NUMBER, binds
            )
        self.touch(f"__{name}__")
        return Js(f"py.{'add' if name == 'add' else 'multiply'}({left.within(3)}, {right.within(3)})")

    def on_compare(self, node: ast.Compare) -> Js:
        operands = [node.left, *node.comparators]
        parts = [self.compared(*pair) for pair in zip(operands, node.ops, operands[1:], strict=False)]
        return parts[0] if len(parts) == 1 else Js(" && ".join(one.within(6) for one in parts), FLAG, 5)

    def compared(self, first: ast.expr, op: ast.cmpop, second: ast.expr) -> Js:
        left, right = self.js(first), self.js(second)
        if (
            isinstance(first, ast.BinOp)
            and isinstance(first.op, ast.Mod)
            and isinstance(second, ast.Constant)
            and second.value == 0
        ):
            left = Js(self.test(first), NUMBER, 12)  # a remainder of 0 has no sign
        negated = isinstance(op, (ast.NotEq, ast.IsNot, ast.NotIn))
        if isinstance(op, (ast.Is, ast.IsNot)) or (isinstance(op, (ast.Eq, ast.NotEq)) and self.are_plain(left, right)):
            return Js(f"{left.within(9)} {'!==' if negated else '==='} {right.within(9)}", FLAG, 8)
        if isinstance(op, (ast.Eq, ast.NotEq)):
            return Js(f"{'!' * negated}py.equal({left.within(3)}, {right.within(3)})", FLAG, 14)
        if isinstance(op, (ast.In, ast.NotIn)):
            return Js(f"{'!' * negated}{self.contained(left, right)}", FLAG, 14)
        if {left.type.kind, right.type.kind} & {"list", "object", "unknown"} and "number" not in (
            left.type.kind,
            right.type.kind,
        ):
            return Js(f"py.compare({left.within(3)}, {right.within(3)}) {_ORDER[type(op)]} 0", FLAG, 9)
        return Js(f"{left.within(10)} {_ORDER[type(op)]} {right.within(10)}", FLAG, 9)

    @staticmethod
    def are_plain(left: Js, right: Js) -> bool:
        """Whether `===` compares the two values."""
        kinds = left.type.kind, right.type.kind
        return "text" in kinds or "none" in kinds or kinds in (("number", "number"), ("flag", "flag"))

    def contained(self, left: Js, right: Js) -> str:
        if right.type.kind in ("map", "set"):
            return f"{right.within(18)}.has({left.within(3)})"
        if left.type.kind in ("number", "text") and right.type.kind in ("list", "text"):
            return f"{right.within(18)}.includes({left.within(3)})"
        return f"py.within({left.within(3)}, {right.within(3)})"

    # ---- parts ----

    def on_subscript(self, node: ast.Subscript) -> Js:
        value = self.js(node.value)
        if isinstance(node.slice, ast.Slice):
            return self.sliced(node, value, node.slice)
        place = self.js(node.slice)
        kind = value.type.of[1] if value.type.kind == "map" and len(value.type.of) > 1 else value.type.item
        match node.slice:
            case ast.Constant(value=int(number)) if value.type.kind == "list":
                of = value.type.of
                return Js(f"{value.within(18)}[{number}]", of[number] if len(of) > max(number, 1) else kind)
            case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int(back))) if len(value.type.of) > 1:
                kind = value.type.of[-back]
        return Js(f"{value.within(18)}.at({place.text})", kind)

    def sliced(self, node: ast.AST, value: Js, part: ast.Slice) -> Js:
        if part.step is not None:
            if ast.unparse(part.step) != "-1" or part.lower or part.upper:
                raise self.refuse(node, "a slice with a step")
            return Js(f"py.reversed({value.text})", list_of(value.type.item))
        bounds = [self.js(part.lower).within(3) if part.lower is not None else "0"]
        if part.upper is not None:
            bounds.append(self.js(part.upper).within(3))
        return Js(
            f"{value.within(18)}.slice({', '.join(bounds)})",
            TEXT if value.type.kind == "text" else list_of(value.type.item),
        )

    def on_namedexpr(self, node: ast.NamedExpr) -> Js:
        value = self.js(node.value)
        self.locals[node.target.id] = value.type
        return Js(f"({safe(node.target.id)} = {value.within(3)})", value.type)

    def on_call(self, node: ast.Call) -> Js:
        return calls.call(self, node)

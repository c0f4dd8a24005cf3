"""Expressions of Python → JavaScript's, with the reference counts of what they make.

In: the syntax tree of an expression, and what the module and its functions bind. Out: text. A new object belongs to
nobody until somebody takes it, so its use (an attribute, an item, a call with its parts) holds it for as long.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping

from vramprobe.report.page.translation.names import (
    Scope,
    Signatures,
    TranslationError,
    is_made,
    is_super,
    js_name,
    quoted,
)

BUILTINS = frozenset({
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "frozenset", "getattr", "int", "isinstance", "iter",
    "len", "list", "max", "min", "next", "range", "repr", "reversed", "round", "set", "sorted", "str", "sum", "tuple",
    "zip",
})  # fmt: skip
_OPERATORS: dict[type, str] = {
    ast.Add: "$add",
    ast.Sub: "$sub",
    ast.Mult: "$mul",
    ast.FloorDiv: "$floordiv",
    ast.Mod: "$mod",
    ast.BitOr: "$union",
    ast.BitAnd: "$intersection",
    ast.LShift: "$lshift",
    ast.RShift: "$rshift",
}
_COMPARISONS: dict[type, str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


class Expressions:
    """Translates expressions: a method ``_Name`` for each kind. Its lines are those of the module being written."""

    def __init__(self, module: str, signatures: Signatures, given: Mapping[str, str]) -> None:
        self.module_name, self.signatures, self.given = module, signatures, given
        self.imports: dict[str, str] = {}  # a local name → dotted name of what it stands for
        self.top: set[str] = set()  # names that the module binds
        self.lines: list[str] = []
        self.scopes: list[Scope] = []
        self.num_temporaries = 0
        self.counts = True  # references, of what the module holds
        self.base: ast.expr | None = None  # of the class that is being written

    def _expression(self, node: ast.expr) -> str:
        rule: Callable[[ast.expr], str] | None = getattr(self, f"_{type(node).__name__}", None)
        if rule is None:
            raise self._unknown(node)
        return rule(node)

    def _test(self, node: ast.expr) -> str:
        """An expression that JavaScript may take as a condition."""
        match node:
            case ast.Compare() | ast.UnaryOp(op=ast.Not()):
                return self._expression(node)
            case ast.BoolOp(op=op, values=values):
                return f"({(' && ' if isinstance(op, ast.And) else ' || ').join(map(self._test, values))})"
        return f"$true({self._expression(node)})"

    def _Constant(self, node: ast.Constant) -> str:
        match node.value:
            case None:
                return "null"
            case bool():
                return str(node.value).lower()
            case str():
                return quoted(node.value)
            case int() | float():
                return repr(node.value)
        raise self._unknown(node)

    def _Name(self, node: ast.Name) -> str:
        name = node.id
        if any(name in scope.names for scope in self.scopes) or name in self.top or name == "self":
            return js_name(name)
        if name in self.imports:
            return self._imported(self.imports[name])
        if name in BUILTINS:
            return f"$py.{js_name(name)}"
        if name.endswith("Error") or name == "Exception":
            return "$Error"
        raise TranslationError(f"{self.module_name}: the name {name} is unknown")

    def _imported(self, dotted: str) -> str:
        dotted = self.signatures.home_of(dotted)
        if dotted in self.given:
            return self.given[dotted]
        module, _, name = dotted.rpartition(".")
        return f"{js_module(module)}.{js_name(name)}"

    def _Attribute(self, node: ast.Attribute) -> str:
        if isinstance(node.value, ast.Name) and (module := self._module_of(node.value)):
            return self._imported(f"{module}.{node.attr}")
        if is_super(node.value):
            return f"super.{node.attr}"
        if is_made(node.value):
            return f"$of({self._expression(node.value)}, $it => $it.{node.attr})"
        return f"{self._expression(node.value)}.{node.attr}"

    def _module_of(self, node: ast.Name) -> str | None:
        """The dotted name of a module that this name stands for."""
        if any(node.id in scope.names for scope in self.scopes):
            return None
        dotted = self.imports.get(node.id)
        is_module = dotted is not None and (
            dotted in ("math", "operator") or any(m == dotted for m, _ in self.signatures.functions)
        )
        return dotted if is_module else None

    def _Subscript(self, node: ast.Subscript) -> str:
        if isinstance(node.slice, ast.Slice):
            bounds = [node.slice.lower, node.slice.upper, node.slice.step]
            given = ", ".join("null" if one is None else self._expression(one) for one in bounds)
            return f"$slice({self._expression(node.value)}, {given})"
        owner, key = self._expression(node.value), self._key(node.slice)
        return f"$of({owner}, $it => $get($it, {key}))" if is_made(node.value) else f"$get({owner}, {key})"

    def _key(self, node: ast.expr) -> str:
        """A subscript; a tuple stays a plain array, for it is only looked up."""
        if isinstance(node, ast.Tuple):
            return f"[{', '.join(map(self._expression, node.elts))}]"
        return self._expression(node)

    def _List(self, node: ast.List | ast.Tuple | ast.Set) -> str:
        return self._made(f"[{self._elements(node.elts)}]")

    _Tuple = _List

    def _made(self, items: str) -> str:
        """A list of the items of a plain array."""
        return f"$list({items})" if self.counts else items

    def _Set(self, node: ast.Set) -> str:
        return f"$py.set({self._List(node)})"

    def _elements(self, nodes: Iterable[ast.expr]) -> str:
        return ", ".join(
            f"...$items({self._expression(one.value)})" if isinstance(one, ast.Starred) else self._expression(one)
            for one in nodes
        )

    def _Dict(self, node: ast.Dict) -> str:
        entries = [
            f"...$entries({self._expression(value)})"
            if key is None
            else f"[{self._expression(key)}, {self._expression(value)}]"
            for key, value in zip(node.keys, node.values, strict=True)
        ]
        return f"$dict([{', '.join(entries)}])"

    def _JoinedStr(self, node: ast.JoinedStr) -> str:
        parts = []
        for part in node.values:
            match part:
                case ast.Constant(value=text):
                    parts.append(quoted(text))
                case ast.FormattedValue(value=value, conversion=conversion, format_spec=spec):
                    how = "" if spec is None else "".join(one.value for one in spec.values)
                    shown = f"$py.repr({self._expression(value)})" if conversion == 114 else self._expression(value)
                    parts.append(f"$format({shown}, {quoted(how)})")
        return " + ".join(["''", *parts])

    def _UnaryOp(self, node: ast.UnaryOp) -> str:
        match node.op:
            case ast.Not():
                return (
                    f"!{self._test(node.operand)}"
                    if not isinstance(node.operand, ast.Compare)
                    else f"!({self._test(node.operand)})"
                )
            case ast.USub():
                return f"(-{self._expression(node.operand)})"
            case ast.Invert():
                return f"(-{self._expression(node.operand)} - 1)"
        raise self._unknown(node)

    def _BinOp(self, node: ast.BinOp) -> str:
        left, right = self._expression(node.left), self._expression(node.right)
        match node.op:
            case ast.Pow():
                return f"$pow({left}, {right})"
            case ast.Div():
                return f"(({left}) / ({right}))"
        return f"{self._operator(node.op)}({left}, {right})"

    def _operator(self, op: ast.operator) -> str:
        if type(op) not in _OPERATORS:
            raise self._unknown(op)
        return _OPERATORS[type(op)]

    def _BoolOp(self, node: ast.BoolOp) -> str:
        chosen = "$and" if isinstance(node.op, ast.And) else "$or"
        text = self._expression(node.values[-1])
        for value in reversed(node.values[:-1]):
            text = f"{chosen}({self._expression(value)}, () => {text})"
        return text

    def _IfExp(self, node: ast.IfExp) -> str:
        return f"({self._test(node.test)} ? {self._expression(node.body)} : {self._expression(node.orelse)})"

    def _Compare(self, node: ast.Compare) -> str:
        sides = [node.left, *node.comparators]
        pairs = [self._compared(left, op, right) for left, op, right in zip(sides, node.ops, sides[1:], strict=False)]
        return pairs[0] if len(pairs) == 1 else f"({' && '.join(pairs)})"

    def _compared(self, left: ast.expr, op: ast.cmpop, right: ast.expr) -> str:
        a, b = self._expression(left), self._expression(right)
        match op:
            case ast.Eq():
                return f"$equal({a}, {b})"
            case ast.NotEq():
                return f"!$equal({a}, {b})"
            case ast.Is():
                return f"$same({a}, {b})"
            case ast.IsNot():
                return f"!$same({a}, {b})"
            case ast.In():
                return f"$in({a}, {b})"
            case ast.NotIn():
                return f"!$in({a}, {b})"
        if isinstance(left, ast.Tuple) or isinstance(right, ast.Tuple):  # JavaScript would compare their texts
            return {
                ast.Lt: f"$less({a}, {b})",
                ast.LtE: f"!$less({b}, {a})",
                ast.Gt: f"$less({b}, {a})",
                ast.GtE: f"!$less({a}, {b})",
            }[type(op)]
        return f"({a} {_COMPARISONS[type(op)]} {b})"

    def _NamedExpr(self, node: ast.NamedExpr) -> str:
        name = js_name(node.target.id)
        value = self._expression(node.value)
        return f"({name} = $set({name}, {value}))" if self.counts else f"({name} = {value})"

    def _temporary(self) -> str:
        self.num_temporaries += 1
        return f"${self.num_temporaries}"

    def _unknown(self, node: ast.AST) -> TranslationError:
        where = getattr(node, "lineno", "?")
        return TranslationError(f"{self.module_name}, line {where}: no rule for {ast.unparse(node)[:80]!r}")


def js_module(name: str) -> str:
    """The JavaScript name of a translated module."""
    return "$" + name.removeprefix("vramprobe.").replace(".", "$")

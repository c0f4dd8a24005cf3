"""Expressions of Python → JavaScript's, with the reference counts of what they make.

In: the syntax tree of an expression, and what the module and its functions bind. Out: text. A new object belongs to
nobody until somebody takes it, so its use (an attribute, an item, a call with its parts) holds it for as long.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Mapping, Sequence

from vramprobe.report.page.translation.names import (
    Scope,
    Signatures,
    TranslationError,
    defaults_of,
    is_class_name,
    is_made,
    is_super,
    js_name,
    locals_of,
    parameters_of,
    quoted,
    target_names,
)

#: Methods of Python's own str, list, dict and set: runtime.js has them, for objects that have none of this name.
BUILTIN_METHODS = frozenset({
    "add", "append", "bit_length", "clear", "copy", "count", "endswith", "extend", "fromkeys", "get", "index", "items",
    "join", "keys", "lower", "partition", "pop", "removeprefix", "removesuffix", "replace", "rpartition", "rstrip",
    "setdefault", "split", "startswith", "strip", "subtract", "title", "update", "upper", "values",
})  # fmt: skip
#: Methods of what runtime.js has in place of a module's own class.
_RUNTIME_METHODS = frozenset({"_replace", "covers", "digits", "model_copy", "resolved"})
BUILTINS = frozenset({
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "frozenset", "getattr", "int", "isinstance", "iter",
    "len", "list", "max", "min", "next", "range", "repr", "reversed", "round", "set", "sorted", "str", "sum", "tuple",
    "zip",
})  # fmt: skip
_OPERATORS: dict[type, str] = {
    ast.Add: "$add", ast.Sub: "$sub", ast.Mult: "$mul", ast.FloorDiv: "$floordiv", ast.Mod: "$mod", ast.BitOr: "$union",
    ast.BitAnd: "$intersection",
}  # fmt: skip
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

    def _body(self, node: ast.FunctionDef, names: Sequence[str]) -> None:
        raise NotImplementedError  # of the statements' translation, which a function in an expression needs

    def _unpack(self, target: ast.expr, value: str) -> None:
        raise NotImplementedError

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
        return f"$list([{self._elements(node.elts)}])"

    _Tuple = _List

    def _Set(self, node: ast.Set) -> str:
        return f"$py.set({self._List(node)})"

    def _elements(self, nodes: Iterable[ast.expr]) -> str:
        return ", ".join(
            f"...$items({self._expression(one.value)})" if isinstance(one, ast.Starred) else self._expression(one)
            for one in nodes
        )

    def _Dict(self, node: ast.Dict) -> str:
        entries = [
            f"...$entries({self._expression(value)})" if key is None
            else f"[{self._expression(key)}, {self._expression(value)}]"
            for key, value in zip(node.keys, node.values, strict=True)
        ]  # fmt: skip
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
        return f"({a} {_COMPARISONS[type(op)]} {b})"

    def _NamedExpr(self, node: ast.NamedExpr) -> str:
        name = js_name(node.target.id)
        return f"({name} = $set({name}, {self._expression(node.value)}))"

    def _Lambda(self, node: ast.Lambda) -> str:
        return self._closure(node)

    def _closure(self, node: ast.Lambda | ast.FunctionDef) -> str:
        """A function within one: it holds what it uses of the enclosing one, and its defaults."""
        names, defaults = parameters_of(node), defaults_of(node)
        used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - set(names)
        body = [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body
        used -= locals_of(body)
        held = sorted(name for name in used if any(name in scope.kept for scope in self.scopes))
        values = {name: self._temporary() for name in defaults}
        opening = "".join(f"const {values[name]} = {self._expression(default)}; " for name, default in defaults.items())
        outer, self.lines = self.lines, []
        function = ast.FunctionDef(name="", args=node.args, body=body, decorator_list=[])
        self._body(function, names)
        inner, self.lines = "\n".join(self.lines), outer
        given = ", ".join(f"{js_name(name)} = {values[name]}" if name in values else js_name(name) for name in names)
        kept = ", ".join([*map(js_name, held), *values.values()])
        closure = f"$closure(({given}) => {{\n{inner}\n}}, [{kept}])"
        return f"(() => {{ {opening}return {closure}; }})()" if opening else closure

    def _ListComp(self, node: ast.ListComp | ast.GeneratorExp | ast.SetComp) -> str:
        return f"$list({self._comprehension(node.generators, node.elt)})"

    _GeneratorExp = _ListComp

    def _SetComp(self, node: ast.SetComp) -> str:
        return f"$py.set({self._ListComp(node)})"

    def _DictComp(self, node: ast.DictComp) -> str:
        pair = ast.Tuple(elts=[node.key, node.value])
        return f"$dict({self._comprehension(node.generators, pair)})"

    def _comprehension(self, generators: Sequence[ast.comprehension], element: ast.expr) -> str:
        """A plain array: its items belong to nobody yet."""
        bound = frozenset(name for one in generators for name in target_names(one.target))
        found, outer = self._temporary(), self.lines
        self.lines = []
        # The source of the first loop is evaluated outside, where its names may mean something else.
        source = self._expression(generators[0].iter)
        self.scopes.append(Scope(bound))
        for index, one in enumerate(generators):
            item = self._temporary()
            over = "$source" if index == 0 else self._expression(one.iter)
            self.lines.append(f"for (const {item} of $items({over})) {{")
            self.lines += [f"let {js_name(name)};" for name in sorted(target_names(one.target))]
            self._unpack(one.target, item)
            self.lines += [f"if (!({self._test(test)})) continue;" for test in one.ifs]
        # A pair of a dict stays a plain array.
        text = (
            self._key(element)
            if isinstance(element, ast.Tuple) and not hasattr(element, "lineno")
            else self._expression(element)
        )
        self.lines.append(f"{found}.push({text});" + " }" * len(generators))
        self.scopes.pop()
        inner, self.lines = " ".join(self.lines), outer
        return f"(($source) => {{ const {found} = []; {inner} return {found}; }})({source})"

    def _Call(self, node: ast.Call) -> str:
        name = node.func.id if isinstance(node.func, ast.Name) else None
        if name == "isinstance":
            return f"$isinstance({self._expression(node.args[0])}, {self._type(node.args[1])})"
        if any(isinstance(one, ast.Starred) for one in node.args):
            called = self._expression(node.func)
            new = "new " if is_class_name(called) else ""
            return f"$of($list([{self._elements(node.args)}]), $all => {new}{called}(...$all))"
        builtin = name in BUILTINS and name not in self.top and not any(name in scope.names for scope in self.scopes)
        if builtin:
            return self._builtin(node)
        arguments = ", ".join(self._arguments(node))
        if isinstance(node.func, ast.Attribute) and not self._is_of_module(node.func):
            return self._method_call(node.func, arguments)
        called = self._expression(node.func)
        return f"new {called}({arguments})" if is_class_name(called) else f"{called}({arguments})"

    def _is_of_module(self, node: ast.Attribute) -> bool:
        return isinstance(node.value, ast.Name) and self._module_of(node.value) is not None

    def _method_call(self, func: ast.Attribute, arguments: str) -> str:
        if is_super(func.value):
            return f"super.{func.attr}({arguments})"
        owner = f"$py.{func.value.id}" if isinstance(func.value, ast.Name) and func.value.id == "dict" else None
        owner = owner or self._expression(func.value)
        if func.attr in BUILTIN_METHODS:
            return f"$method.{func.attr}({', '.join([owner, *([arguments] if arguments else [])])})"
        known = self.signatures.methods.keys() | self.signatures.attributes | _RUNTIME_METHODS
        if func.attr not in known:
            raise self._unknown(func)
        if is_made(func.value):
            return f"$of({owner}, $it => $it.{func.attr}({arguments}))"
        return f"{owner}.{func.attr}({arguments})"

    def _builtin(self, node: ast.Call) -> str:
        """Python's own functions: keywords go in an object, but for zip's ``strict``."""
        given = [self._expression(one) for one in node.args]
        options = {one.arg: self._expression(one.value) for one in node.keywords if one.arg != "strict"}
        if options:
            given.append("{" + ", ".join(f"{key}: {value}" for key, value in options.items()) + "}")
        return f"$py.{js_name(node.func.id)}({', '.join(given)})"

    def _arguments(self, node: ast.Call) -> list[str]:
        given = [self._expression(one) for one in node.args]
        if not node.keywords or (isinstance(node.func, ast.Attribute) and node.func.attr == "model_copy"):
            return given + [self._expression(one.value) for one in node.keywords]
        pairs = [self._keyword(one) for one in node.keywords]
        if isinstance(node.func, ast.Attribute) and node.func.attr == "_replace":
            return [f"$dict([{', '.join(pairs)}])"]
        key = (self.module_name, node.func.id) if isinstance(node.func, ast.Name) else None
        if key in self.signatures.takes_others:
            return [*given, f"$dict([{', '.join(pairs)}])"]
        names = self._parameters_of(node.func, {one.arg for one in node.keywords if one.arg})
        if any(one.arg is None for one in node.keywords):
            return [*given, f"...$named({names[len(given) :]}, [{', '.join(pairs)}])"]
        keywords = {one.arg: self._expression(one.value) for one in node.keywords}
        while keywords:
            if len(given) >= len(names):
                raise TranslationError(f"{ast.unparse(node)}: no place for {', '.join(map(str, keywords))}")
            given.append(keywords.pop(names[len(given)], "undefined"))
        return given

    def _keyword(self, node: ast.keyword) -> str:
        value = self._expression(node.value)
        return f"...$entries({value})" if node.arg is None else f"[{quoted(node.arg)}, {value}]"

    def _parameters_of(self, func: ast.expr, keywords: set[str]) -> list[str]:
        functions = self.signatures.functions
        match func:
            case ast.Name(id=name):
                dotted = self.imports.get(name, f"{self.module_name}.{name}")
                key = tuple(self.signatures.home_of(dotted).rsplit(".", 1))
                if key in functions:
                    return functions[key]
            case ast.Attribute(value=ast.Name() as owner, attr=attribute) if self._module_of(owner):
                return functions[self._module_of(owner), attribute]
            case ast.Attribute(attr=attribute):
                return self.signatures.of_method(attribute, keywords)
        raise TranslationError(f"{self.module_name}: whose are the keywords of {ast.unparse(func)}?")

    def _type(self, node: ast.expr) -> str:
        match node:
            case ast.BinOp(left=left, right=right, op=ast.BitOr()):
                return f"[{self._type(left)}, {self._type(right)}]"
            case ast.Tuple(elts=kinds):
                return f"[{', '.join(map(self._type, kinds))}]"
            case ast.Constant(value=None):
                return "'None'"
            case ast.Name(id="int" | "str" | "bool" | "float" | "Mapping" | "dict" | "list" | "tuple" as name):
                return f"'{name}'"
        return self._expression(node)

    def _temporary(self) -> str:
        self.num_temporaries += 1
        return f"${self.num_temporaries}"

    def _unknown(self, node: ast.AST) -> TranslationError:
        where = getattr(node, "lineno", "?")
        return TranslationError(f"{self.module_name}, line {where}: no rule for {ast.unparse(node)[:80]!r}")


def js_module(name: str) -> str:
    """The JavaScript name of a translated module."""
    return "$" + name.removeprefix("vramprobe.").replace(".", "$")

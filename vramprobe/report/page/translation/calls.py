"""Calls, comprehensions and functions within expressions of Python → JavaScript's.

In: the syntax tree of an expression. Out: text. Keywords get the places of the parameters that they name; a function
within another holds what it uses of it.
"""

from __future__ import annotations

import ast
from abc import ABC, abstractmethod
from collections.abc import Sequence

from vramprobe.report.page.translation.expressions import BUILTINS, Expressions
from vramprobe.report.page.translation.names import (
    Scope,
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

#: Methods of Python's own str, list, dict and set: builtins.js has them, for objects that have none of this name.
BUILTIN_METHODS = frozenset({
    "add", "append", "bit_length", "clear", "copy", "count", "endswith", "extend", "fromkeys", "get", "index", "items",
    "join", "keys", "lower", "partition", "pop", "removeprefix", "removesuffix", "replace", "rpartition", "rstrip",
    "setdefault", "split", "startswith", "strip", "subtract", "title", "update", "upper", "values",
})  # fmt: skip
#: Methods of what runtime.js and builtins.js have in place of a module's own class.
_RUNTIME_METHODS = frozenset(
    {
        "_asdict",
        "_replace",
        "closed",
        "covers",
        "digits",
        "model_copy",
        "other",
        "resolved",
        "with_others",
    }
)


class Calls(Expressions, ABC):
    """Translates calls, and what makes functions: a method ``_Name`` for each kind. A function has statements in it,
    whose translation is a subclass's.
    """

    @abstractmethod
    def _body(self, node: ast.FunctionDef, names: Sequence[str]) -> None:
        """Write the statements of a function of these local names."""

    @abstractmethod
    def _unpack(self, target: ast.expr, value: str) -> None:
        """Write what gives the names of ``target`` the parts of ``value``."""

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
        return self._made(self._comprehension(node.generators, node.elt))

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
            if any(one.arg not in (None, "strict") for one in node.keywords):  # their places are not known
                raise self._unknown(node)
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
        if isinstance(node.func, ast.Name) and self._takes_others(node.func.id):
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

    def _takes_others(self, name: str) -> bool:
        """Return True if a function takes keywords of any name: one of the modules', or dataclasses.replace."""
        dotted = self.signatures.home_of(self.imports.get(name, f"{self.module_name}.{name}"))
        return dotted == "dataclasses.replace" or tuple(dotted.rsplit(".", 1)) in self.signatures.takes_others

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

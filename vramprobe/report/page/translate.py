"""Translate: the Python source of the arithmetic (terms/) -> JavaScript that counts the same bytes in a browser.

In: modules of vramprobe. Out: JavaScript text, to be run beside runtime.js. The page has no second account of any term:
what `predict` counts and what the page counts are one source. The tape's values die when their last reference goes, so
the translation counts references as CPython does: a local holds what is assigned to it until it is assigned anew,
deleted, or its function returns; an argument is the callee's; a result belongs to nobody until somebody takes it.
Only what the arithmetic uses of Python is known here; anything else raises TranslationError, which a test would show.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

#: Methods of Python's own str, list, dict and set: runtime.js has them, for objects that have none of this name.
_BUILTIN_METHODS = frozenset({
    "add", "append", "bit_length", "clear", "copy", "count", "endswith", "extend", "fromkeys", "get", "index", "items",
    "join", "keys", "lower", "partition", "pop", "removeprefix", "removesuffix", "replace", "rpartition", "rstrip",
    "split", "startswith", "strip", "title", "update", "upper", "values",
})  # fmt: skip
_BUILTINS = frozenset({
    "abs", "all", "any", "bool", "dict", "enumerate", "float", "frozenset", "getattr", "int", "isinstance", "iter",
    "len", "list", "max", "min", "next", "range", "repr", "reversed", "round", "set", "sorted", "str", "sum", "tuple",
    "zip",
})  # fmt: skip
#: What a local annotated so never holds a reference to.
_PLAIN_TYPES = frozenset({"int", "str", "bool", "float", "int | None", "str | None", "float | None"})
_RESERVED = frozenset({
    "await", "case", "catch", "const", "debugger", "default", "delete", "do", "enum", "export", "extends",
    "function", "instanceof", "let", "new", "null", "package", "static", "super", "switch", "this", "throw", "typeof",
    "var", "void",
})  # fmt: skip
_OPERATORS: dict[type, str] = {
    ast.Add: "$add", ast.Sub: "$sub", ast.Mult: "$mul", ast.FloorDiv: "$floordiv", ast.Mod: "$mod", ast.BitOr: "$union",
    ast.BitAnd: "$intersection",
}  # fmt: skip
_RECORD_BASES = ("NamedTuple", "BaseModel", "_Frozen")
#: Decorators of what pydantic calls and nobody else.
_VALIDATORS = ("field_validator", "model_validator", "classmethod")
_COMPARISONS: dict[type, str] = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}


class TranslationError(Exception):
    """A piece of Python that has no rule here: give it one, or write the arithmetic without it."""


@dataclass(frozen=True)
class Module:
    """One module to translate: its dotted name, its source, and the top-level names wanted of it (null: all)."""

    name: str
    source: str
    wanted: frozenset[str] | None = None
    unwanted: frozenset[str] = frozenset()  # members of its classes that are left out


@dataclass
class _Scope:
    """A function while it is being translated."""

    names: frozenset[str]  # parameters and locals
    kept: list[str] = field(default_factory=list)  # those that may hold a reference


def translate(modules: Sequence[Module], given: Mapping[str, str]) -> str:
    """JavaScript of all the modules, each an object of its top-level names; ``given`` maps imports that JavaScript has
    of its own (dotted Python name → JavaScript expression). Modules come after those they import.

    Raises TranslationError for Python that has no rule.
    """
    trees = {module.name: ast.parse(module.source) for module in modules}
    signatures = _Signatures(trees)
    return "\n".join(_ModuleTranslator(module, trees[module.name], signatures, given).text() for module in modules)


def js_module(name: str) -> str:
    """The JavaScript name of a translated module."""
    return "$" + name.removeprefix("vramprobe.").replace(".", "$")


class _Signatures:
    """Parameter names of every function, method and class, so that keywords can be put in their places."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.functions: dict[tuple[str, str], list[str]] = {}
        self.methods: dict[str, list[list[str]]] = {}
        for module, tree in trees.items():
            for node in tree.body:
                if isinstance(node, ast.FunctionDef):
                    self.functions[module, node.name] = _parameters(node)
                elif isinstance(node, ast.ClassDef):
                    self._add_class(module, node)

    def _add_class(self, module: str, node: ast.ClassDef) -> None:
        self.functions[module, node.name] = _fields(node)
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                names = _parameters(member)[1:]
                if member.name == "__init__":
                    self.functions[module, node.name] = names
                else:
                    self.methods.setdefault(member.name, []).append(names)

    def of_method(self, name: str, keywords: set[str]) -> list[str]:
        """The parameters of the one kind of method that has this name and takes these keywords."""
        found = [names for names in self.methods.get(name, []) if keywords <= set(names)]
        if not found or any(other != found[0] for other in found):
            raise TranslationError(f"cannot tell which method .{name}({', '.join(sorted(keywords))}=…) is")
        return found[0]


def _parameters(node: ast.FunctionDef | ast.Lambda) -> list[str]:
    return [one.arg for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]


def _fields(node: ast.ClassDef) -> list[str]:
    return [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]


def _is_record(node: ast.ClassDef) -> bool:
    """Whether a class is a frozen record: a dataclass, a NamedTuple, one of pydantic's."""
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list) or any(
        ast.unparse(base) in _RECORD_BASES for base in node.bases
    )


class _ModuleTranslator:
    """The translation of one module. Expressions are methods ``_Name``; statements write lines."""

    def __init__(self, module: Module, tree: ast.Module, signatures: _Signatures, given: Mapping[str, str]) -> None:
        self.module, self.tree, self.signatures, self.given = module, tree, signatures, given
        self.imports: dict[str, str] = {}  # a local name → dotted name of what it stands for
        self.lines: list[str] = []
        self.scopes: list[_Scope] = []
        self.num_temporaries = 0
        self.top = {name for node in tree.body for name in _bound(node) if self._is_wanted(name)}

    def text(self) -> str:
        """``const $module = (() => {…})();``"""
        for node in self.tree.body:
            match node:
                case ast.Import() | ast.ImportFrom():
                    self._import(node)
                case ast.FunctionDef(name=name) if self._is_wanted(name):
                    self._function(node)
                case ast.ClassDef(name=name) if self._is_wanted(name):
                    self._class(node)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if self._is_wanted(name):
                    self._constant(name, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if self._is_wanted(name):
                    self._constant(name, value)
        passed_on = sorted((self.module.wanted or set()) & self.imports.keys())
        exported = [*(_name(one) for one in sorted(self.top)),
                    *(f"{_name(one)}: {self._imported(self.imports[one])}" for one in passed_on)]  # fmt: skip
        body = "\n".join(f"  {line}" for line in self.lines)
        return f"const {js_module(self.module.name)} = (() => {{\n{body}\n  return {{{', '.join(exported)}}};\n}})();"

    def _is_wanted(self, name: str) -> bool:
        return self.module.wanted is None or name in self.module.wanted

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        prefix = "" if isinstance(node, ast.Import) else f"{node.module}."
        for alias in node.names:
            self.imports[alias.asname or alias.name] = prefix + alias.name

    def _constant(self, name: str, value: ast.expr) -> None:
        if isinstance(value, ast.Subscript) or (isinstance(value, ast.Name) and value.id in ("Callable", "Literal")):
            self.top.discard(name)  # a type alias
            return
        self.lines.append(f"const {_name(name)} = $const({self._expression(value)});")

    # -- functions and classes --------------------------------------------------------------------------------------

    def _function(self, node: ast.FunctionDef, *, method_of: str | None = None) -> None:
        """A top-level function or a method."""
        is_generator = any(isinstance(one, ast.Yield) for one in ast.walk(node))
        names = _parameters(node)[1 if method_of else 0 :]
        head = node.name if method_of else f"function{'*' if is_generator else ''} {_name(node.name)}"
        match [ast.unparse(one) for one in node.decorator_list]:
            case ["property"]:
                head = f"get {node.name}"
            case ["cached_property"]:
                made, kept = f"this.$make_{node.name}()", f"this.${node.name}"
                self.lines.append(f"get {node.name}() {{ return {kept} ??= $const({made}); }}")
                head = f"$make_{node.name}"
            case _ if method_of:
                head = "constructor" if node.name == "__init__" else f"{'*' if is_generator else ''}{node.name}"
        self.lines.append(f"{head}({self._parameter_list(node, names)}) {{")
        self.lines += (["super();"] if node.name == "__init__" else []) + (["const self = this;"] if method_of else [])
        self._body(node, names)
        self.lines.append("}")

    def _parameter_list(self, node: ast.FunctionDef | ast.Lambda, names: list[str]) -> str:
        defaults = _defaults(node)
        return ", ".join(
            f"{_name(name)} = {self._expression(defaults[name])}" if name in defaults else _name(name) for name in names
        )

    def _body(self, node: ast.FunctionDef, names: Sequence[str]) -> None:
        """Statements with what the function's names hold: taken at the start and on assignment, let go at the end."""
        plain = {one.arg for one in [*node.args.args, *node.args.kwonlyargs]
                 if one.annotation is not None and ast.unparse(one.annotation) in _PLAIN_TYPES}  # fmt: skip
        own = sorted(_locals(node.body) - set(names))
        scope = _Scope(frozenset([*names, *own]), [name for name in [*names, *own] if name not in plain])
        self.scopes.append(scope)
        if own:
            self.lines.append(f"let {', '.join(map(_name, own))};")
        taken = [name for name in names if name in scope.kept]
        self.lines += [f"$keep({_name(name)});" for name in taken]
        if scope.kept:
            self.lines.append("let $result; try {")
        for statement in node.body:
            self._statement(statement)
        if scope.kept:
            released = " ".join(f"$release({_name(name)});" for name in scope.kept)
            self.lines.append(f"}} finally {{ {released} $float($result); }}")
        self.scopes.pop()

    def _class(self, node: ast.ClassDef) -> None:
        bases = [ast.unparse(base) for base in node.bases]
        is_record = _is_record(node)
        if bases and not is_record and bases[0] != "Protocol":
            self.lines.append(f"class {node.name} extends $Error {{}}")
            return
        self.lines.append(f"class {node.name} extends {'$Frozen' if is_record else '$Object'} {{")
        if is_record:
            self._record_constructor(node)
        for member in node.body:
            match member:
                case ast.FunctionDef(name=name, decorator_list=decorators):
                    for_pydantic = any(ast.unparse(one).startswith(_VALIDATORS) for one in decorators)
                    if not for_pydantic and name not in self.module.unwanted:
                        self._function(member, method_of=node.name)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in ("__slots__", "model_config"):
                    self.lines.append(f"get {_name(name)}() {{ return {self._expression(value)}; }}")
        self.lines.append("}")

    def _record_constructor(self, node: ast.ClassDef) -> None:
        fields = {one.target.id: one.value for one in node.body if isinstance(one, ast.AnnAssign)}
        given = ", ".join(
            _name(name) if value is None else f"{_name(name)} = {self._expression(value)}"
            for name, value in fields.items()
        )
        kept = " ".join(f"this.{name} = $keep({_name(name)});" for name in fields)
        self.lines.append(f"constructor({given}) {{ super(); {kept} }}")

    # -- statements -------------------------------------------------------------------------------------------------

    def _block(self, statements: Iterable[ast.stmt]) -> None:
        for statement in statements:
            self._statement(statement)

    def _statement(self, node: ast.stmt) -> None:
        write = self.lines.append
        match node:
            case ast.Expr(value=ast.Constant()) | ast.Pass() | ast.Assert() | ast.Import() | ast.ImportFrom():
                if isinstance(node, ast.Import | ast.ImportFrom):
                    self._import(node)
            case ast.Expr(value=ast.Yield(value=value)):
                write(f"yield {'null' if value is None else self._expression(value)};")
            case ast.Expr(value=value):
                write(f"$drop({self._expression(value)});")
            case ast.Return(value=value):
                result = "null" if value is None else self._expression(value)
                write(f"return $result = $keep({result});" if self.scopes[-1].kept else f"return {result};")
            case ast.Assign(targets=targets, value=value):
                self._assign(targets, value)
            case ast.AnnAssign(value=None):
                pass
            case ast.AnnAssign(target=target, value=value):
                self._assign([target], value)
            case ast.AugAssign(target=target, op=op, value=value):
                operator = "$extend" if isinstance(op, ast.Add) else self._operator(op)
                self._store(target, f"{operator}({self._expression(target)}, {self._expression(value)})")
            case ast.Delete(targets=targets):
                for target in targets:
                    self._delete(target)
            case ast.If(test=test, body=body, orelse=orelse):
                write(f"if ({self._test(test)}) {{")
                self._block(body)
                if orelse:
                    write("} else {")
                    self._block(orelse)
                write("}")
            case ast.For(target=target, iter=iterable, body=body, orelse=[]):
                item = self._temporary()
                write(f"for (const {item} of $items({self._expression(iterable)})) {{")
                self._unpack(target, item)
                self._block(body)
                write("}")
            case ast.While(test=test, body=body, orelse=[]):
                write(f"while ({self._test(test)}) {{")
                self._block(body)
                write("}")
            case ast.Continue() | ast.Break():
                write(f"{ast.unparse(node)};")
            case ast.Raise(exc=ast.expr() as raised):
                error = self._expression(raised)
                write(f"throw new {error}();" if not isinstance(raised, ast.Call) and _is_class_name(error)
                      else f"throw {error};")  # fmt: skip
            case ast.With(items=items, body=body):
                self._with(items, body)
            case ast.Try(body=body, handlers=[], orelse=[], finalbody=final):
                write("try {")
                self._block(body)
                write("} finally {")
                self._block(final)
                write("}")
            case ast.Match(subject=subject, cases=cases):
                self._match(subject, cases)
            case ast.FunctionDef():
                self._store(ast.Name(id=node.name), self._closure(node))
            case _:
                raise self._unknown(node)

    def _delete(self, target: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self.lines.append(f"$release({_name(name)}); {_name(name)} = undefined;")
            case ast.Subscript(value=value, slice=index):
                self.lines.append(f"$delitem({self._expression(value)}, {self._key(index)});")
            case _:
                raise self._unknown(target)

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        if len(targets) == 1 and not isinstance(targets[0], ast.Tuple | ast.List):
            self._store(targets[0], self._expression(value))
            return
        held = self._temporary()
        self.lines.append(f"const {held} = $keep({self._expression(value)});")
        for target in targets:
            self._unpack(target, held)
        self.lines.append(f"$release({held});")

    def _unpack(self, target: ast.expr, value: str) -> None:
        """Store a JavaScript expression, or its parts, in a target."""
        if not isinstance(target, ast.Tuple | ast.List):
            self._store(target, value)
            return
        parts = self._temporary()
        self.lines.append(f"const {parts} = $parts({value}, {len(target.elts)});")
        for index, part in enumerate(target.elts):
            self._unpack(part, f"{parts}[{index}]")

    def _store(self, target: ast.expr, value: str) -> None:
        match target:
            case ast.Name(id=name):
                is_kept = bool(self.scopes) and name in self.scopes[-1].kept
                self.lines.append(f"{_name(name)} = {f'$set({_name(name)}, {value})' if is_kept else value};")
            case ast.Attribute(value=owner, attr=attribute):
                place = f"{self._expression(owner)}.{attribute}"
                self.lines.append(f"{place} = $set({place}, {value});")
            case ast.Subscript(value=owner, slice=index):
                self.lines.append(f"$setitem({self._expression(owner)}, {self._key(index)}, {value});")
            case _:
                raise self._unknown(target)

    def _with(self, items: Sequence[ast.withitem], body: Sequence[ast.stmt]) -> None:
        if not items:
            self._block(body)
            return
        first, manager = items[0], self._temporary()
        match first.context_expr:
            case ast.Call(func=ast.Name(id="suppress"), args=[error]):
                self.lines.append(f"const {manager} = $watch(); try {{")
                self._with(items[1:], body)
                self.lines.append(f"}} catch (error) {{ $sweep({manager}, error, {self._expression(error)}); }} "
                                  f"finally {{ $unwatch({manager}); }}")  # fmt: skip
            case expression:
                self.lines.append(f"const {manager} = $enter({self._expression(expression)}); try {{")
                if first.optional_vars is not None:
                    self._store(first.optional_vars, f"{manager}.value")
                self._with(items[1:], body)
                self.lines.append(f"}} finally {{ {manager}.exit(); }}")

    def _match(self, subject: ast.expr, cases: Sequence[ast.match_case]) -> None:
        value, label = self._temporary(), self._temporary()
        self.lines.append(f"const {value} = {self._expression(subject)}; {label}: {{")
        for case in cases:
            test, capture = self._pattern(case.pattern, value)
            self.lines.append(f"if ({test}) {{")
            if capture:
                self._store(ast.Name(id=capture), value)
            if case.guard is not None:
                self.lines.append(f"if ({self._test(case.guard)}) {{")
            self._block(case.body)
            self.lines.append(f"break {label};")
            self.lines.append("}" if case.guard is None else "} }")
        self.lines.append("}")

    def _pattern(self, pattern: ast.pattern, value: str) -> tuple[str, str | None]:
        match pattern:
            case ast.MatchValue(value=expected):
                return f"$equal({value}, {self._expression(expected)})", None
            case ast.MatchSingleton(value=None):
                return f"{value} == null", None
            case ast.MatchOr(patterns=patterns):
                return " || ".join(self._pattern(one, value)[0] for one in patterns), None
            case ast.MatchAs(pattern=None, name=name):
                return "true", name
        raise self._unknown(pattern)

    # -- expressions ------------------------------------------------------------------------------------------------

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
                return _quoted(node.value)
            case int() | float():
                return repr(node.value)
        raise self._unknown(node)

    def _Name(self, node: ast.Name) -> str:
        name = node.id
        if any(name in scope.names for scope in self.scopes) or name in self.top or name == "self":
            return _name(name)
        if name in self.imports:
            return self._imported(self.imports[name])
        if name in _BUILTINS:
            return f"$py.{_name(name)}"
        if name.endswith("Error") or name == "Exception":
            return "$Error"
        raise TranslationError(f"{self.module.name}: the name {name} is unknown")

    def _imported(self, dotted: str) -> str:
        if dotted in self.given:
            return self.given[dotted]
        module, _, name = dotted.rpartition(".")
        return f"{js_module(module)}.{_name(name)}" if (module, name) in self.signatures.functions or name else dotted

    def _Attribute(self, node: ast.Attribute) -> str:
        if isinstance(node.value, ast.Name) and (module := self._module_of(node.value)):
            return self._imported(f"{module}.{node.attr}")
        if _is_made(node.value):
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
        access = f"$get({{}}, {self._key(node.slice)})"
        if _is_made(node.value):
            return f"$of({self._expression(node.value)}, $it => {access.format('$it')})"
        return access.format(self._expression(node.value))

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
                    parts.append(_quoted(text))
                case ast.FormattedValue(value=value, conversion=conversion, format_spec=spec):
                    how = "" if spec is None else "".join(one.value for one in spec.values)
                    shown = f"$py.repr({self._expression(value)})" if conversion == 114 else self._expression(value)
                    parts.append(f"$format({shown}, {_quoted(how)})")
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
        name = _name(node.target.id)
        return f"({name} = $set({name}, {self._expression(node.value)}))"

    def _Lambda(self, node: ast.Lambda) -> str:
        return self._closure(node)

    def _closure(self, node: ast.Lambda | ast.FunctionDef) -> str:
        """A function within one: it holds what it uses of the enclosing one, and its defaults."""
        names, defaults = _parameters(node), _defaults(node)
        used = {one.id for one in ast.walk(node) if isinstance(one, ast.Name)} - set(names)
        body = [ast.Return(node.body)] if isinstance(node, ast.Lambda) else node.body
        used -= _locals(body)
        held = sorted(name for name in used if any(name in scope.kept for scope in self.scopes))
        values = {name: self._temporary() for name in defaults}
        opening = "".join(f"const {values[name]} = {self._expression(default)}; " for name, default in defaults.items())
        outer, self.lines = self.lines, []
        function = ast.FunctionDef(name="", args=node.args, body=body, decorator_list=[])
        self._body(function, names)
        inner, self.lines = "\n".join(self.lines), outer
        given = ", ".join(f"{_name(name)} = {values[name]}" if name in values else _name(name) for name in names)
        kept = ", ".join([*map(_name, held), *values.values()])
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
        bound = frozenset(name for one in generators for name in _target_names(one.target))
        found, outer = self._temporary(), self.lines
        self.lines = []
        # The source of the first loop is evaluated outside, where its names may mean something else.
        source = self._expression(generators[0].iter)
        self.scopes.append(_Scope(bound))
        for index, one in enumerate(generators):
            item = self._temporary()
            over = "$source" if index == 0 else self._expression(one.iter)
            self.lines.append(f"for (const {item} of $items({over})) {{")
            self.lines += [f"let {_name(name)};" for name in sorted(_target_names(one.target))]
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
            new = "new " if _is_class_name(called) else ""
            return f"$of($list([{self._elements(node.args)}]), $all => {new}{called}(...$all))"
        builtin = name in _BUILTINS and name not in self.top and not any(name in scope.names for scope in self.scopes)
        if builtin:
            return self._builtin(node)
        arguments = ", ".join(self._arguments(node))
        if isinstance(node.func, ast.Attribute) and not self._is_of_module(node.func):
            return self._method_call(node.func, arguments)
        called = self._expression(node.func)
        return f"new {called}({arguments})" if _is_class_name(called) else f"{called}({arguments})"

    def _is_of_module(self, node: ast.Attribute) -> bool:
        return isinstance(node.value, ast.Name) and self._module_of(node.value) is not None

    def _method_call(self, func: ast.Attribute, arguments: str) -> str:
        owner = f"$py.{func.value.id}" if isinstance(func.value, ast.Name) and func.value.id == "dict" else None
        owner = owner or self._expression(func.value)
        if func.attr in _BUILTIN_METHODS:
            return f"$method.{func.attr}({', '.join([owner, *([arguments] if arguments else [])])})"
        if _is_made(func.value):
            return f"$of({owner}, $it => $it.{func.attr}({arguments}))"
        return f"{owner}.{func.attr}({arguments})"

    def _builtin(self, node: ast.Call) -> str:
        """Python's own functions: keywords go in an object, but for zip's ``strict``."""
        given = [self._expression(one) for one in node.args]
        options = {one.arg: self._expression(one.value) for one in node.keywords if one.arg != "strict"}
        if options:
            given.append("{" + ", ".join(f"{key}: {value}" for key, value in options.items()) + "}")
        return f"$py.{_name(node.func.id)}({', '.join(given)})"

    def _arguments(self, node: ast.Call) -> list[str]:
        given = [self._expression(one) for one in node.args]
        if not node.keywords or (isinstance(node.func, ast.Attribute) and node.func.attr == "model_copy"):
            return given + [self._expression(one.value) for one in node.keywords]
        keywords = {one.arg: self._expression(one.value) for one in node.keywords}
        names = self._parameters_of(node.func, set(keywords))
        while keywords:
            if len(given) >= len(names):
                raise TranslationError(f"{ast.unparse(node)}: no place for {', '.join(map(str, keywords))}")
            given.append(keywords.pop(names[len(given)], "undefined"))
        return given

    def _parameters_of(self, func: ast.expr, keywords: set[str]) -> list[str]:
        functions = self.signatures.functions
        match func:
            case ast.Name(id=name):
                key = tuple(self.imports[name].rsplit(".", 1)) if name in self.imports else (self.module.name, name)
                if key in functions:
                    return functions[key]
            case ast.Attribute(value=ast.Name() as owner, attr=attribute) if self._module_of(owner):
                return functions[self._module_of(owner), attribute]
            case ast.Attribute(attr=attribute):
                return self.signatures.of_method(attribute, keywords)
        raise TranslationError(f"{self.module.name}: whose are the keywords of {ast.unparse(func)}?")

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

    # -- helpers ----------------------------------------------------------------------------------------------------

    def _temporary(self) -> str:
        self.num_temporaries += 1
        return f"${self.num_temporaries}"

    def _unknown(self, node: ast.AST) -> TranslationError:
        where = getattr(node, "lineno", "?")
        return TranslationError(f"{self.module.name}, line {where}: no rule for {ast.unparse(node)[:80]!r}")


def _defaults(node: ast.FunctionDef | ast.Lambda) -> dict[str, ast.expr]:
    positional, given = [*node.args.posonlyargs, *node.args.args], node.args.defaults
    found = dict(zip([one.arg for one in positional[len(positional) - len(given) :]], given, strict=True))
    keyword_only = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return found | {one.arg: default for one, default in keyword_only if default is not None}


def _bound(node: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement of a module binds, imports apart."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            yield name


def _locals(body: Iterable[ast.stmt]) -> set[str]:
    """Names that a function's statements bind, apart from those of functions and comprehensions within it."""
    found: set[str] = set()
    queue: list[ast.AST] = list(body)
    while queue:
        node = queue.pop()
        match node:
            case ast.FunctionDef(name=name):
                found.add(name)
                continue
            case ast.Lambda():
                continue
            case ast.ListComp() | ast.GeneratorExp() | ast.DictComp() | ast.SetComp():
                found |= {one.target.id for one in ast.walk(node) if isinstance(one, ast.NamedExpr)}
                continue
            case ast.Name(id=name, ctx=ast.Store()):
                found.add(name)
            case ast.MatchAs(name=str() as name):
                found.add(name)
        queue.extend(ast.iter_child_nodes(node))
    return found


def _target_names(target: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}


def _is_made(node: ast.expr) -> bool:
    """Whether an expression may be a new object that nobody holds."""
    return not isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Constant)


def _is_class_name(called: str) -> bool:
    last = called.rpartition(".")[2].lstrip("_$")
    return last[:1].isupper() and not last.isupper()


def _name(name: str) -> str:
    return f"{name}$" if name in _RESERVED else name


def _quoted(text: str) -> str:
    import json

    return json.dumps(text)

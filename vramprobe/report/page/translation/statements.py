"""Statements of Python → JavaScript's, and the bodies of functions.

In: the syntax tree of statements. Out: lines. A function's locals hold what is assigned to them until they are assigned
anew, deleted, or it returns; its arguments are its own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Sequence

from vramprobe.report.page.translation.calls import Calls
from vramprobe.report.page.translation.names import (
    Scope,
    is_class_name,
    is_super,
    js_name,
    locals_of,
)

#: What a local annotated so never holds a reference to.
_PLAIN_TYPES = frozenset({"int", "str", "bool", "float", "int | None", "str | None", "float | None"})


class Statements(Calls):
    """Translates statements: each writes its lines."""

    def _body(self, node: ast.FunctionDef, names: Sequence[str]) -> None:
        """Statements with what the function's names hold: taken at the start and on assignment, let go at the end."""
        plain = {
            one.arg
            for one in [*node.args.args, *node.args.kwonlyargs]
            if one.annotation is not None and ast.unparse(one.annotation) in _PLAIN_TYPES
        }
        own = sorted(locals_of(node.body) - set(names))
        kept = [name for name in [*names, *own] if name not in plain] if self.counts else []
        scope = Scope(frozenset([*names, *own]), kept)
        self.scopes.append(scope)
        if own:
            self.lines.append(f"let {', '.join(map(js_name, own))};")
        taken = [name for name in names if name in scope.kept]
        self.lines += [f"$keep({js_name(name)});" for name in taken]
        if scope.kept:
            self.lines.append("let $result; try {")
        for statement in node.body:
            self._statement(statement)
        if scope.kept:
            released = " ".join(f"$release({js_name(name)});" for name in scope.kept)
            self.lines.append(f"}} finally {{ {released} $float($result); }}")
        self.scopes.pop()

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
            case ast.Expr(value=ast.Call(func=ast.Attribute(value=owner, attr="__init__")) as call) if is_super(owner):
                call = ast.Call(func=self.base, args=call.args, keywords=call.keywords) if call.keywords else call
                write(f"super({', '.join(self._arguments(call))}); const self = this;")
            case ast.Expr(value=value):
                write(f"$drop({self._expression(value)});" if self.counts else f"{self._expression(value)};")
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
                write(
                    f"throw new {error}();"
                    if not isinstance(raised, ast.Call) and is_class_name(error)
                    else f"throw {error};"
                )
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

    def _import(self, node: ast.Import | ast.ImportFrom) -> None:
        prefix = "" if isinstance(node, ast.Import) else f"{node.module}."
        for alias in node.names:
            self.imports[alias.asname or alias.name] = prefix + alias.name

    def _delete(self, target: ast.expr) -> None:
        match target:
            case ast.Name(id=name):
                self.lines.append(f"$release({js_name(name)}); {js_name(name)} = undefined;")
            case ast.Subscript(value=value, slice=ast.Slice(lower=ast.expr() as lower, upper=None, step=None)):
                owner = self._expression(value)
                self.lines.append(f"for (const one of {owner}.splice({self._expression(lower)})) $release(one);")
            case ast.Subscript(value=value, slice=index):
                self.lines.append(f"$delitem({self._expression(value)}, {self._key(index)});")
            case _:
                raise self._unknown(target)

    def _assign(self, targets: Sequence[ast.expr], value: ast.expr) -> None:
        if len(targets) == 1 and not isinstance(targets[0], ast.Tuple | ast.List):
            self._store(targets[0], self._expression(value))
            return
        if len(targets) == 1 and (values := _side_by_side(targets[0], value)):
            self._assign_each(targets[0].elts, values)
            return
        held = self._temporary()
        self.lines.append(f"const {held} = {self._kept(self._expression(value))};")
        for target in targets:
            self._unpack(target, held)
        if self.counts:
            self.lines.append(f"$release({held});")

    def _assign_each(self, targets: Sequence[ast.expr], values: Sequence[ast.expr]) -> None:
        """All values, then all targets: no tuple is made for it."""
        held = [self._temporary() for _ in values]
        for name, value in zip(held, values, strict=True):
            self.lines.append(f"const {name} = {self._kept(self._expression(value))};")
        for target, name in zip(targets, held, strict=True):
            self._unpack(target, name)
        if self.counts:
            self.lines += [f"$release({name});" for name in held]

    def _kept(self, value: str) -> str:
        return f"$keep({value})" if self.counts else value

    def _unpack(self, target: ast.expr, value: str) -> None:
        """Store a JavaScript expression, or its parts, in a target."""
        if not isinstance(target, ast.Tuple | ast.List):
            self._store(target, value)
            return
        parts, targets = self._temporary(), target.elts
        starred = next((index for index, part in enumerate(targets) if isinstance(part, ast.Starred)), None)
        cut = f"$parts({value}, {len(targets)})"
        if starred is not None:
            cut = f"$starred({value}, {starred}, {len(targets) - starred - 1})"
        self.lines.append(f"const {parts} = {cut};")
        for index, part in enumerate(targets):
            self._unpack(part.value if isinstance(part, ast.Starred) else part, f"{parts}[{index}]")

    def _store(self, target: ast.expr, value: str) -> None:
        match target:
            case ast.Name(id=name):
                is_kept = bool(self.scopes) and name in self.scopes[-1].kept
                self.lines.append(f"{js_name(name)} = {f'$set({js_name(name)}, {value})' if is_kept else value};")
            case ast.Attribute(value=owner, attr=attribute):
                place = f"{self._expression(owner)}.{attribute}"
                self.lines.append(f"{place} = {f'$set({place}, {value})' if self.counts else value};")
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
                self.lines.append(
                    f"}} catch (error) {{ $sweep({manager}, error, {self._expression(error)}); }} "
                    f"finally {{ $unwatch({manager}); }}"
                )
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


def _side_by_side(target: ast.expr, value: ast.expr) -> list[ast.expr]:
    """The values that a tuple of targets is given one by one; none where either has a star, or is no tuple."""
    if not (isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts)):
        return []
    return [] if any(isinstance(one, ast.Starred) for one in [*target.elts, *value.elts]) else value.elts

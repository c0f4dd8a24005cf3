"""Modules of Python → JavaScript's: their constants, functions and classes.

In: the syntax tree of a module. Out: an object of its top-level names. A function decorated with cache or lru_cache
keeps its results; a class is a record, an exception, or one with a base.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass

from vramprobe.report.page.translation.expressions import js_module
from vramprobe.report.page.translation.names import (
    Signatures,
    bases_of,
    bound_by,
    defaults_of,
    is_error,
    is_record,
    is_super,
    js_name,
    parameters_of,
    quoted,
)
from vramprobe.report.page.translation.statements import Statements

#: Decorators of what pydantic calls and nobody else.
_VALIDATORS = ("field_validator", "model_validator", "classmethod")


@dataclass(frozen=True)
class Module:
    """One module to translate: its dotted name, its source, and the top-level names wanted of it (null: all)."""

    name: str
    source: str
    wanted: frozenset[str] | None = None
    unwanted: frozenset[str] = frozenset()  # members of its classes that are left out
    counts: bool = True  # False: nothing that it holds ends with its last reference, so none are counted


class ModuleTranslation(Statements):
    """The translation of one module; statements write lines."""

    def __init__(self, module: Module, tree: ast.Module, signatures: Signatures, given: Mapping[str, str]) -> None:
        super().__init__(module.name, signatures, given)
        self.module, self.tree, self.counts = module, tree, module.counts
        self.top = {name for node in tree.body for name in bound_by(node) if self._is_wanted(name)}

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
                case ast.Assign(targets=[ast.Tuple(elts=targets)], value=ast.Tuple(elts=values)):
                    for target, value in zip(targets, values, strict=True):
                        if self._is_wanted(target.id):
                            self._constant(target.id, value)
                case ast.AnnAssign(target=ast.Name(id=name), value=ast.expr() as value) if self._is_wanted(name):
                    self._constant(name, value)
        passed_on = sorted((self.module.wanted or set()) & self.imports.keys())
        exported = [
            *(js_name(one) for one in sorted(self.top)),
            *(f"{js_name(one)}: {self._imported(self.imports[one])}" for one in passed_on),
        ]
        body = "\n".join(f"  {line}" for line in self.lines)
        return f"const {js_module(self.module.name)} = (() => {{\n{body}\n  return {{{', '.join(exported)}}};\n}})();"

    def _is_wanted(self, name: str) -> bool:
        return self.module.wanted is None or name in self.module.wanted

    def _constant(self, name: str, value: ast.expr) -> None:
        match value:
            case ast.Subscript(value=ast.Name(id="Literal"), slice=allowed):  # what get_args() gives of it
                value = allowed if isinstance(allowed, ast.Tuple) else ast.Tuple(elts=[allowed])
            case ast.Subscript(value=ast.Name()):
                self.top.discard(name)  # another type alias
                return
        self.lines.append(f"const {js_name(name)} = $const({self._expression(value)});")

    # -- functions and classes --------------------------------------------------------------------------------------

    def _function(self, node: ast.FunctionDef, *, method_of: str | None = None) -> None:
        """A top-level function or a method."""
        is_generator = any(isinstance(one, ast.Yield) for one in ast.walk(node))
        names = parameters_of(node)[1 if method_of else 0 :]
        head = node.name if method_of else f"function{'*' if is_generator else ''} {js_name(node.name)}"
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
        starts_base = node.name == "__init__" and any(is_super(one) for one in ast.walk(node))
        if method_of and not starts_base:  # else self is there once the base's own __init__ is called
            self.lines += (["super();"] if node.name == "__init__" else []) + ["const self = this;"]
        self._body(node, names)
        self.lines.append("}")
        if any(ast.unparse(one).startswith(("lru_cache", "cache")) for one in node.decorator_list if not method_of):
            self.lines.append(f"{head.removeprefix('function ')} = $cached({head.removeprefix('function ')});")

    def _parameter_list(self, node: ast.FunctionDef | ast.Lambda, names: list[str]) -> str:
        defaults, others = defaults_of(node), node.args.vararg and node.args.vararg.arg
        return ", ".join(
            f"{js_name(name)} = {self._expression(defaults[name])}"
            if name in defaults
            else f"{'...' * (name == others)}{js_name(name)}"
            for name in names
        )

    def _class(self, node: ast.ClassDef) -> None:
        bases = bases_of(node)
        record = is_record(node)
        if bases and is_error(ast.unparse(bases[0])):
            self.lines.append(f"class {node.name} extends $Error {{}}")
            return
        base = "$Frozen" if record else "$Object"
        if bases and not record:
            first, *others = [self._expression(one) for one in bases]
            if len(others) > 1:
                raise self._unknown(node)
            base = f"$over({first}, {others[0]})" if others else first
        is_made_anew = node.name in self.signatures.made_anew
        if is_made_anew:
            self.lines.append(f"const $make_{node.name} = ($Base) => {{")
        self.lines.append(f"class {node.name} extends {'$Base' if is_made_anew else base} {{")
        self.base = bases[0] if bases and not record else None
        constants: dict[str, ast.expr] = {}
        if record:
            self._record_constructor(node)
        for member in node.body:
            match member:
                case ast.FunctionDef(name=name, decorator_list=decorators):
                    for_pydantic = any(ast.unparse(one).startswith(_VALIDATORS) for one in decorators)
                    if not for_pydantic and name not in self.module.unwanted:
                        self._function(member, method_of=node.name)
                case ast.Assign(targets=[ast.Name(id=name)], value=value) if name not in ("__slots__", "model_config"):
                    constants[name] = value
        self.lines.append("}")
        for name, value in constants.items():  # an instance may have one of its own
            self.lines.append(
                f"Object.defineProperty({node.name}.prototype, {quoted(name)}, "
                f"{{value: $const({self._expression(value)}), writable: true}});"
            )
        if is_made_anew:
            self.lines.append(f"{node.name}.$make = $make_{node.name};")
            self.lines.append(f"return {node.name}; }};")
            self.lines.append(f"const {node.name} = $make_{node.name}({base});")

    def _record_constructor(self, node: ast.ClassDef) -> None:
        fields = {one.target.id: one.value for one in node.body if isinstance(one, ast.AnnAssign)}
        given = ", ".join(
            js_name(name) if value is None else f"{js_name(name)} = {self._expression(value)}"
            for name, value in fields.items()
        )
        kept = " ".join(f"this.{name} = $keep({js_name(name)});" for name in fields)
        self.lines.append(f"constructor({given}) {{ super(); {kept} }}")

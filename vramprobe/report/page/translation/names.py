"""Collect the facts about Python's names before a line is translated: parameters, locals, records, reserved words.

In: syntax trees. Out: names and answers about them. Never writes JavaScript but for a name.
"""

from __future__ import annotations

import ast
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

_RESERVED = frozenset({
    "arguments", "await", "case", "catch", "const", "debugger", "default", "delete", "do", "enum", "export", "extends",
    "function", "instanceof", "let", "new", "null", "package", "static", "super", "switch", "this", "throw", "typeof",
    "var", "void",
})  # fmt: skip
_RECORD_BASES = ("NamedTuple", "BaseModel", "_Frozen", "Frozen", "FrozenModel", "FiniteModel")


class TranslationError(Exception):
    """A piece of Python that has no rule here: give it one, or write the arithmetic without it."""


@dataclass
class Scope:
    """A function while it is being translated."""

    names: frozenset[str]  # parameters and locals
    kept: list[str] = field(default_factory=list)  # those that may hold a reference


class Signatures:
    """Parameter names of every function, method and class, so that keywords can be put in their places."""

    def __init__(self, trees: Mapping[str, ast.Module]) -> None:
        self.functions: dict[tuple[str, str], list[str]] = {}
        self.methods: dict[str, list[list[str]]] = {}
        self.takes_others: set[tuple[str, str]] = set()  # functions whose last parameter takes all other keywords
        #: Names of attributes that anything is given: what is called by one of these is a function kept there.
        self.attributes = {
            node.attr
            for tree in trees.values()
            for node in ast.walk(tree)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
        }
        self._passed_on: dict[tuple[str, str], str] = {}  # (module, name) → the dotted name that it imports under it
        self.made_anew: set[str] = set()  # classes that another has before a second base
        for module, tree in trees.items():
            for node in tree.body:
                if isinstance(node, ast.ImportFrom):
                    for alias in node.names:
                        self._passed_on[module, alias.asname or alias.name] = f"{node.module}.{alias.name}"
                if isinstance(node, ast.FunctionDef):
                    self.functions[module, node.name] = parameters_of(node)
                    if node.args.kwarg and not node.args.vararg:
                        self.takes_others.add((module, node.name))
                elif isinstance(node, ast.ClassDef):
                    self._add_class(module, node)

    def _add_class(self, module: str, node: ast.ClassDef) -> None:
        bases = bases_of(node)
        self.functions[module, node.name] = _fields(node)
        if bases and isinstance(bases[0], ast.Name) and not is_record(node):  # its base's, unless it has its own
            of_base = tuple(self.home_of(f"{module}.{bases[0].id}").rsplit(".", 1))
            self.functions[module, node.name] = self.functions.get(of_base, [])
        self.made_anew |= {base.id for base in bases[:-1] if isinstance(base, ast.Name)}
        for member in node.body:
            if isinstance(member, ast.FunctionDef):
                names = parameters_of(member)[1:]
                if member.name == "__init__":
                    self.functions[module, node.name] = names
                else:
                    self.methods.setdefault(member.name, []).append(names)

    def home_of(self, dotted: str) -> str:
        """The dotted name where it is made, of one that a module passes on."""
        while (key := tuple(dotted.rsplit(".", 1))) in self._passed_on:
            dotted = self._passed_on[key]
        return dotted

    def of_method(self, name: str, keywords: set[str]) -> list[str]:
        """The parameters of the one kind of method that has this name and takes these keywords."""
        found = [names for names in self.methods.get(name, []) if keywords <= set(names)]
        if not found or any(other != found[0] for other in found):
            raise TranslationError(f"cannot tell which method .{name}({', '.join(sorted(keywords))}=…) is")
        return found[0]


def parameters_of(node: ast.FunctionDef | ast.Lambda) -> list[str]:
    """In their order. Keywords beside ``*others`` have no name here: a caller puts them in their places among those."""
    names = [one.arg for one in [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]]
    rest = node.args.vararg or node.args.kwarg
    return [*names, rest.arg] if rest else names


def _fields(node: ast.ClassDef) -> list[str]:
    return [one.target.id for one in node.body if isinstance(one, ast.AnnAssign) and isinstance(one.target, ast.Name)]


def is_record(node: ast.ClassDef) -> bool:
    """Return True if a class is a frozen record: a dataclass, a NamedTuple, one of pydantic's."""
    return any("dataclass" in ast.unparse(one) for one in node.decorator_list) or any(
        ast.unparse(base) in _RECORD_BASES for base in node.bases
    )


def bases_of(node: ast.ClassDef) -> list[ast.expr]:
    """Those that a class has anything from."""
    return [base for base in node.bases if ast.unparse(base) not in ("ABC", "Protocol")]


def defaults_of(node: ast.FunctionDef | ast.Lambda) -> dict[str, ast.expr]:
    positional, given = [*node.args.posonlyargs, *node.args.args], node.args.defaults
    found = dict(zip([one.arg for one in positional[len(positional) - len(given) :]], given, strict=True))
    keyword_only = zip(node.args.kwonlyargs, node.args.kw_defaults, strict=True)
    return found | {one.arg: default for one, default in keyword_only if default is not None}


def bound_by(node: ast.stmt) -> Iterator[str]:
    """Names that a top-level statement of a module binds, imports apart."""
    match node:
        case ast.FunctionDef(name=name) | ast.ClassDef(name=name):
            yield name
        case ast.Assign(targets=[ast.Name(id=name)]) | ast.AnnAssign(target=ast.Name(id=name), value=ast.expr()):
            yield name
        case ast.Assign(targets=[ast.Tuple(elts=targets)]):
            yield from (target.id for target in targets if isinstance(target, ast.Name))


def locals_of(body: Iterable[ast.stmt]) -> set[str]:
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


def target_names(target: ast.expr) -> set[str]:
    return {one.id for one in ast.walk(target) if isinstance(one, ast.Name)}


def is_made(node: ast.expr) -> bool:
    """Return True if an expression may be a new object that nobody holds."""
    return not isinstance(node, ast.Name | ast.Attribute | ast.Subscript | ast.Constant)


def is_error(base: str) -> bool:
    """Return True if a class's base, as it is written, is an exception."""
    return base.endswith(("Error", "Exception"))


def is_super(node: ast.expr) -> bool:
    """Return True if this is ``super()``."""
    return isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "super"


def is_class_name(called: str) -> bool:
    last = called.rpartition(".")[2].lstrip("_$")
    return last[:1].isupper() and not last.isupper()


def js_name(name: str) -> str:
    return f"{name}$" if name in _RESERVED else name


def quoted(text: str) -> str:
    return json.dumps(text)

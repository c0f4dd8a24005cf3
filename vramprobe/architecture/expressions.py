"""Expressions: one line of arithmetic over named facts → its value, and the same line with the numbers filled in.

In: a line such as ``2 * params / 1e9`` from a row of data/, and what gives a name its value or its text. Out: a number,
a text or a truth value. Names, numbers, texts, arithmetic, comparisons, ``and``, ``or``, ``not``, ``a if b else c`` and
the functions of FUNCTIONS: nothing else is read, so that a row cannot run code.
"""

import ast
import bisect
import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from vramprobe.errors import VramprobeError

_READ = (
    ast.Constant, ast.Name, ast.Load, ast.Tuple, ast.BinOp, ast.BoolOp, ast.UnaryOp, ast.Compare,
    ast.IfExp, ast.And, ast.Or, ast.Not, ast.USub, ast.Add, ast.Sub, ast.Mult, ast.Div, ast.FloorDiv, ast.Pow,
    ast.Eq, ast.NotEq, ast.Lt, ast.LtE, ast.Gt, ast.GtE, ast.In,
)  # fmt: skip


class ExpressionError(VramprobeError):
    """A line that is no expression, or that names what there is not."""


def between(size: float, sizes: Sequence[float], figures: Sequence[float]) -> float | None:
    """The figure at ``size`` on straight lines between the table's; null outside of it."""
    if not sizes[0] <= size <= sizes[-1]:
        return None
    right = max(bisect.bisect_left(sizes, size), 1)
    x0, x1, y0, y1 = sizes[right - 1], sizes[right], figures[right - 1], figures[right]
    return y0 + (y1 - y0) * (size - x0) / (x1 - x0)


FUNCTIONS: dict[str, Callable[..., Any]] = {
    "between": between, "ceil": math.ceil, "int": int, "log2": math.log2, "max": max, "min": min, "sqrt": math.sqrt,
}  # fmt: skip


class Expression:
    """A line, read and checked; ``value`` and ``written`` ask for the names as they need them."""

    def __init__(self, line: str) -> None:
        self.line = line.strip()
        try:
            tree = ast.parse(self.line, mode="eval")
        except SyntaxError as error:
            raise ExpressionError(f"{line!r} is no expression: {error.msg}") from error
        for node in ast.walk(tree.body):
            match node:
                case ast.Call(func=ast.Name(id=name), keywords=[]):
                    if name not in FUNCTIONS:
                        raise self._error(f"has no function {name!r}; there are {', '.join(sorted(FUNCTIONS))}")
                case ast.Attribute(value=ast.Name()):  # after.peak, and no longer path
                    pass
                case _ if not isinstance(node, _READ):
                    raise self._error(f"has {ast.unparse(node)!r}, which is not read: arithmetic over names alone is")
        self._tree = _OneName().visit(tree).body
        self._code = compile(tree, self.line, "eval")

    def value(self, value_of: Callable[[str], Any]) -> Any:
        """Evaluate the expression; ``value_of`` gives the value of a name such as ``params`` or ``after.peak``."""
        return eval(self._code, {"__builtins__": {}}, _Values(value_of))

    def written(self, value_of: Callable[[str], Any], text_of: Callable[[str], str]) -> str:
        """The line with each name's text in its place, of a conditional the part that counts, and no ``+ 0 * …``."""
        whole = self.line.encode()

        def text(node: ast.expr) -> str:
            match node:
                case ast.IfExp():
                    holds = eval(compile(ast.Expression(node.test), "", "eval"), {}, _Values(value_of))
                    return text(node.body if holds else node.orelse)
                case ast.Name():
                    return text_of(node.id)
                case ast.BinOp(op=ast.Add(), right=ast.BinOp(op=ast.Mult(), left=ast.Name(id=factor))):
                    if value_of(factor) == 0:
                        return text(node.left)
            end, parts = node.col_offset, []
            children = node.args if isinstance(node, ast.Call) else ast.iter_child_nodes(node)
            for child in (one for one in children if isinstance(one, ast.expr)):
                parts += [whole[end : child.col_offset].decode(), text(child)]
                end = child.end_col_offset or end
            return "".join([*parts, whole[end : node.end_col_offset].decode()])

        return text(self._tree)

    def _error(self, what: str) -> ExpressionError:
        return ExpressionError(f"{self.line!r} {what}")


class _OneName(ast.NodeTransformer):
    """A fact of a named cell, ``after.peak``, as one name."""

    def visit_Attribute(self, node: ast.Attribute) -> ast.Name:
        return ast.copy_location(ast.Name(id=ast.unparse(node), ctx=ast.Load()), node)


class _Values:
    """Namespace of an evaluation: the functions, and else what ``value_of`` gives."""

    def __init__(self, value_of: Callable[[str], Any]) -> None:
        self.value_of = value_of

    def __getitem__(self, name: str) -> Any:
        try:
            return FUNCTIONS[name] if name in FUNCTIONS else self.value_of(name)
        except KeyError as error:  # which the interpreter would take for a name that is looked for elsewhere
            raise ExpressionError(f"unknown {error}") from error


@cache
def expression(line: str) -> Expression:
    """The expression of a line, read once. Raises ExpressionError for a line that is none."""
    return Expression(line)


def evaluate(arithmetic: str) -> float:
    """The value of an expression of numbers alone."""
    return float(Expression(arithmetic).value(_no_name))


def _no_name(name: str) -> Any:
    raise ExpressionError(f"{name!r} is no number")

"""Expressions: one line of arithmetic over named facts → its value, and the same line with the numbers filled in.

In: a line such as ``2 * params / 1e9`` from a row of data/, and what gives a name its value or its text. Out: a number,
a text or a truth value. Names, numbers, texts, arithmetic, comparisons, ``and``, ``or``, ``not``, ``a if b else c`` and
the functions of FUNCTIONS: nothing else is read, so that a row cannot run code.
"""

from __future__ import annotations

import ast
import bisect
import math
import operator
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

from vramprobe.errors import VramprobeError

_OPERATORS: dict[type[ast.AST], Callable[..., Any]] = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv, ast.Pow: operator.pow, ast.USub: operator.neg, ast.Not: operator.not_,
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge, ast.In: lambda one, several: one in several,
}  # fmt: skip


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
            self._tree = ast.parse(self.line, mode="eval").body
        except SyntaxError as error:
            raise ExpressionError(f"{line!r} is no expression: {error.msg}") from error
        self._check(self._tree)

    def value(self, value_of: Callable[[str], Any]) -> Any:
        """Evaluate the expression; ``value_of`` gives the value of a name such as ``params`` or ``after.peak``."""
        return self._value(self._tree, value_of)

    def written(self, value_of: Callable[[str], Any], text_of: Callable[[str], str]) -> str:
        """The line with each name's text in its place, of a conditional the part that counts, and no ``+ 0 * …``."""
        return self._written(self._tree, value_of, text_of)

    def _check(self, node: ast.AST) -> None:
        match node:
            case ast.Constant(value=bool() | int() | float() | str() | None) | ast.Name():
                return
            case ast.Attribute(value=ast.Name()):
                return
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]):
                if name not in FUNCTIONS:
                    raise self._error(f"has no function {name!r}; there are {', '.join(sorted(FUNCTIONS))}")
                found: list[ast.AST] = list(args)
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                found = [left, right]
            case ast.Compare(left=left, ops=ops, comparators=others) if all(type(op) in _OPERATORS for op in ops):
                found = [left, *others]
            case ast.UnaryOp(op=op, operand=operand) if type(op) in _OPERATORS:
                found = [operand]
            case ast.BoolOp() | ast.IfExp() | ast.Tuple():
                found = [child for child in ast.iter_child_nodes(node) if isinstance(child, ast.expr)]
            case _:
                raise self._error(f"has {ast.unparse(node)!r}, which is not read: arithmetic over names alone is")
        for child in found:
            self._check(child)

    def _value(self, node: ast.AST, value_of: Callable[[str], Any]) -> Any:
        def of(child: ast.AST) -> Any:
            return self._value(child, value_of)

        match node:
            case ast.Constant():
                return node.value
            case ast.Name() | ast.Attribute():
                return value_of(ast.unparse(node))
            case ast.Tuple():
                return tuple(map(of, node.elts))
            case ast.Call(func=ast.Name(id=name)):
                return FUNCTIONS[name](*map(of, node.args))
            case ast.BinOp():
                return _OPERATORS[type(node.op)](of(node.left), of(node.right))
            case ast.UnaryOp():
                return _OPERATORS[type(node.op)](of(node.operand))
            case ast.IfExp():
                return of(node.body) if of(node.test) else of(node.orelse)
            case ast.BoolOp():
                stops, value = isinstance(node.op, ast.Or), None
                for child in node.values:
                    value = of(child)
                    if bool(value) == stops:
                        break
                return value
        assert isinstance(node, ast.Compare)
        ends = [of(child) for child in (node.left, *node.comparators)]
        return all(_OPERATORS[type(op)](*pair) for op, *pair in zip(node.ops, ends, ends[1:], strict=False))

    def _written(self, node: ast.AST, value_of: Callable[[str], Any], text_of: Callable[[str], str]) -> str:
        match node:
            case ast.IfExp():
                chosen = node.body if self._value(node.test, value_of) else node.orelse
                return self._written(chosen, value_of, text_of)
            case ast.Name() | ast.Attribute():
                return text_of(ast.unparse(node))
            case ast.BinOp(op=ast.Add(), right=ast.BinOp(op=ast.Mult(), left=ast.Name() as factor)):
                if self._value(factor, value_of) == 0:
                    return self._written(node.left, value_of, text_of)
        assert isinstance(node, ast.expr)
        whole, end, parts = self.line.encode(), node.col_offset, []
        children = [one for one in ast.iter_child_nodes(node) if isinstance(one, ast.expr)]
        for child in children if not isinstance(node, ast.Call) else node.args:
            parts += [whole[end : child.col_offset].decode(), self._written(child, value_of, text_of)]
            end = child.end_col_offset or end
        return "".join([*parts, whole[end : node.end_col_offset].decode()])

    def _error(self, what: str) -> ExpressionError:
        return ExpressionError(f"{self.line!r} {what}")


@cache
def expression(line: str) -> Expression:
    """The expression of a line, read once. Raises ExpressionError for a line that is none."""
    return Expression(line)


def evaluate(arithmetic: str) -> float:
    """The value of an expression of numbers alone."""
    return float(Expression(arithmetic).value(_no_name))


def _no_name(name: str) -> Any:
    raise ExpressionError(f"{name!r} is no number")

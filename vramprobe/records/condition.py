"""A condition on cells, as text: ``params>3e9 and method==qlora``.

In: text from a command line. Out: a function from a spec to yes or no. Never evaluates code.
"""

import difflib
import operator
import re
from collections.abc import Callable
from typing import Any

from vramprobe.errors import SpecError
from vramprobe.spec import CellSpec

Condition = Callable[[CellSpec], bool]

_NUMBERS: dict[str, Callable[[CellSpec], float | None]] = {
    "params": operator.attrgetter("num_params"),
    "tokens": lambda spec: spec.num_tokens,
    **{name: operator.attrgetter(name) for name in ("batch_size", "seq_len", "lora_r", "grad_accum")},
}
_WORDS: dict[str, Callable[[CellSpec], Any]] = {
    "model": lambda spec: spec.model_label,
    "family": lambda spec: spec.model_type,
    **{
        name: operator.attrgetter(name)
        for name in ("method", "quant", "kbit_prep", "dtype", "autocast", "optim", "attn", "gradient_checkpointing")
    },
}
_OPERATORS = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}
_COMPARISON = re.compile(r"\s*(\w+)\s*(>=|<=|==|!=|>|<)\s*([^\s]+)\s*")
_MULTIPLES = {"k": 1e3, "m": 1e6, "b": 1e9}


def parse_condition(text: str) -> Condition:
    """``text`` as a function: comparisons joined by ``and``.

    Numbers (params, tokens, seq_len …) take all six comparisons, and K, M, B behind them; words (model, family,
    method …) take ``==`` and ``!=``, with several joined by commas. Raises SpecError that names what is allowed.
    """
    parts = [_comparison(part) for part in re.split(r"\band\b", text)]
    return lambda spec: all(holds(spec) for holds in parts)


def _comparison(text: str) -> Condition:
    match = _COMPARISON.fullmatch(text)
    if match is None:
        raise SpecError(
            f"condition {text.strip()!r} is not of the form NAME OPERATOR VALUE, such as params>3e9 or method==qlora; "
            "join several with `and`"
        )
    name, sign, value = match.groups()
    if name in _NUMBERS:
        bound = _number(name, value)
        return lambda spec: (found := _NUMBERS[name](spec)) is not None and _OPERATORS[sign](found, bound)
    if name in _WORDS:
        if sign not in ("==", "!="):
            raise SpecError(f"{name} is a word and takes == or !=, {sign} given")
        words = {word.lower() for word in value.split(",")}
        return lambda spec: (str(_WORDS[name](spec)).lower() in words) == (sign == "==")
    known = [*_NUMBERS, *_WORDS]
    near = difflib.get_close_matches(name, known, n=1)
    hint = f" Nearest: {near[0]}." if near else ""
    raise SpecError(f"unknown name {name!r} in condition {text.strip()!r}.{hint} Allowed: {', '.join(known)}")


def _number(name: str, text: str) -> float:
    match = re.fullmatch(r"([0-9.]+(?:e[0-9]+)?)([kmb]?)", text.lower())
    try:
        if match is None:
            raise ValueError
        return float(match[1]) * _MULTIPLES.get(match[2], 1.0)
    except ValueError:
        raise SpecError(f"{name} wants a number such as 512, 3e9 or 160M, {text!r} given") from None

"""Answer a verb in the first mode that is asked for, and refuse options that this mode does not read.

In: a verb's modes and the values of its options. Out: the call of one answer. An option that it does not read is
refused, so that none is ever ignored.
"""

import inspect
import os
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import typer

from vramprobe.cli.options import flag

#: A parameter that is many options → what they are called together.
GROUPS = {"cell": "a cell's options", "ranks": "those of several GPUs"}


class Mode(NamedTuple):
    """One way that a verb is called; ``said``: as a sentence about an option names it."""

    said: str
    is_asked: Callable[[Mapping[str, Any]], bool]
    answer: Callable[..., None]  # its parameters are options, or groups of them (a cell's), which it gets as a mapping
    named: Sequence[str] = ()  # all that it reads, where it takes some of them as ``**more``

    @property
    def reads(self) -> Sequence[str]:
        """The options and groups that its answer takes, in the order in which a reader is told."""
        return self.named or list(inspect.signature(self.answer).parameters)


def answer(modes: Sequence[Mode], verb: Callable[..., None], values: Mapping[str, Any]) -> None:
    """Answer in the first mode that is asked for. ``values``: those of all parameters of ``verb``."""
    mode = next(one for one in modes if one.is_asked(values))
    require_read(verb, values, mode.reads, mode.said, {one.said: one.reads for one in modes if one is not mode})
    of_groups = {name: value for name, (value, group) in _given(verb, values).items() if group}
    _load_numpy()
    mode.answer(**{name: value for name, value in (of_groups | dict(values)).items() if name in mode.reads})


def _load_numpy() -> None:
    """Load NumPy with one thread of its BLAS, which else starts one for each core in twice the time, and no answer
    needs them; what is run from here starts its own."""
    name = "OPENBLAS_NUM_THREADS"
    if name not in os.environ:
        os.environ[name] = "1"
        import numpy  # noqa: F401

        del os.environ[name]


def require_read(
    verb: Callable[..., None],
    values: Mapping[str, Any],
    reads: Collection[str],
    said: str,
    others: Mapping[str, Collection[str]],
) -> None:
    """Raise wrong usage for an option that was given and that is not read; ``others``: what other modes read."""
    for name, (value, group) in _given(verb, values).items():
        if name in reads or group in reads:
            continue
        flags = flags_of(verb)
        told = flags[name] if isinstance(value, bool) else f"{flags[name]} {value}"
        readers = "; ".join(other for other, its in others.items() if name in its or group in its)
        listed = ", ".join(GROUPS.get(one) or flags[one] for one in reads)
        raise typer.BadParameter(f"{told}: not an option of {said}, but of {readers}. Drop it; {said} reads {listed}.")


def flags_of(verb: Callable[..., None]) -> dict[str, str]:
    """Parameter of a verb → as it is typed."""
    flags = {}
    for name, parameter in inspect.signature(verb, eval_str=True).parameters.items():
        told = getattr(parameter.annotation, "__metadata__", ())
        declared = [word for one in told for word in (one.default, *(one.param_decls or ())) if isinstance(word, str)]
        typed = next((word.split("/")[0] for word in declared if word.startswith("--")), flag(name))
        is_argument = any(isinstance(one, typer.models.ArgumentInfo) for one in told)
        flags[name] = name.upper() if is_argument else typed
    return flags


def _given(verb: Callable[..., None], values: Mapping[str, Any]) -> dict[str, tuple[Any, str | None]]:
    """Option that was given → (value, the group that it is of); a default that was typed changes nothing."""
    parameters, given = inspect.signature(verb).parameters, {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            given |= {one: (its, name) for one, its in value.items()}
        elif name in parameters and value != parameters[name].default:
            given[name] = (value, None)
    return given

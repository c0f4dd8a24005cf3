"""CUDA contexts by card: what a process takes of a GPU beside the memory that torch reserves.

In: data/contexts.csv, a row for each published or measured figure, and the user's own (`calibrate-gpu`). Out: the
Context of a card, from its own rows or, where it has none, from a line through all that ship by the threads that its
multiprocessors hold. Reads no device.
"""

import csv
import statistics
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from vramprobe.catalog.own import cache_folder
from vramprobe.catalog.shipped import csv_rows
from vramprobe.errors import SpecError
from vramprobe.units import MIB

#: ``start``: a context, no kernel has run; ``step``: after a training step, with the kernels and libraries it loads.
Loaded = Literal["start", "step"]
Grade = Literal["measured", "published"]
Basis = Literal["measured here", "measured", "published", "by its multiprocessors"]
#: Threads that one multiprocessor holds, where not 2048 (CUDA C++ Programming Guide, Technical Specifications).
_THREADS_PER_SM = {(7, 5): 1024, (8, 6): 1536, (8, 9): 1536, (12, 0): 1536, (12, 1): 1536}


def threads_per_sm(capability: tuple[int, int]) -> int:
    """Threads that one multiprocessor of this compute capability holds at most."""
    return _THREADS_PER_SM.get(capability, 2048)


class Context(NamedTuple):
    """Bytes of a card that a process takes after a training step, beside what torch reserves."""

    low_bytes: int
    value_bytes: int
    high_bytes: int
    basis: Basis


class ContextRow(NamedTuple):
    """One figure of data/contexts.csv; ``gpu`` is the catalog's name, ``board`` the source's."""

    gpu: str
    board: str
    loaded: Loaded
    mib: float
    driver: str
    libraries: str
    what: str
    grade: Grade
    source: str


#: The columns of data/contexts.csv.
COLUMNS = ContextRow._fields


def _row(fields_of: Mapping[str, Any]) -> ContextRow:
    """Return the row of a file's line. Raises ValueError."""
    for name, allowed in (("loaded", get_args(Loaded)), ("grade", get_args(Grade))):
        if fields_of.get(name) not in allowed:
            raise ValueError(f"{name}: {fields_of.get(name)!r} given; allowed: {', '.join(allowed)}")
    if None in fields_of.values() or set(fields_of) != set(COLUMNS):
        raise ValueError("a line has more or fewer columns")
    mib = float(fields_of["mib"])
    if not 0 < mib < float("inf"):
        raise ValueError(f"mib: {fields_of['mib']!r} given; must be a positive number")
    words: dict[str, Any] = {**fields_of, "mib": mib}
    return ContextRow(**words)


@cache
def context_rows() -> tuple[ContextRow, ...]:
    """Every figure that ships, in file order."""
    return tuple(_row(row) for row in csv_rows("contexts.csv"))


def own_contexts() -> Path:
    """The file of the user's own figures, with the columns of data/contexts.csv."""
    return cache_folder() / "contexts.csv"


@cache
def own_rows() -> tuple[ContextRow, ...]:
    """The user's own figures; none where `calibrate-gpu` measured none. Raises SpecError for a file that is damaged."""
    try:
        file = own_contexts()
    except RuntimeError:  # nobody's home folder is known, and none was named
        return ()
    try:
        with file.open(encoding="utf-8", newline="") as lines:
            return tuple(_row(row) for row in csv.DictReader(lines))
    except (FileNotFoundError, NotADirectoryError, PermissionError):
        return ()
    except (ValueError, csv.Error) as error:
        why, columns = str(error).splitlines()[0], ", ".join(COLUMNS)
        raise SpecError(
            f"{file} cannot be read ({why}); it needs the columns {columns}: correct it, or remove it and run "
            "`vramprobe calibrate-gpu` again"
        ) from None


def line_of(points: Sequence[tuple[int, float]]) -> tuple[float, float]:
    """(MiB, MiB per thread): the line of least squares through a point of (threads, MiB) for each card."""
    threads, values = zip(*points, strict=True)
    found = statistics.linear_regression(threads, values)
    return found.intercept, found.slope


def left_out_errors(points: dict[str, tuple[int, float]]) -> dict[str, float]:
    """The relative error at each card of the line through all others."""
    errors = {}
    for name, (threads, mib) in points.items():
        base, slope = line_of([point for other, point in points.items() if other != name])
        errors[name] = (base + slope * threads) / mib - 1
    return errors


@cache
def card_points(loaded: Loaded) -> dict[str, tuple[int, float]]:
    """(threads, median MiB of its rows) of each card that has a row of this kind, by the catalog's name."""
    rows: dict[str, list[float]] = {}
    for row in context_rows():
        if row.loaded == loaded:
            rows.setdefault(row.gpu, []).append(row.mib)
    return {name: (_threads()[name], statistics.median(found)) for name, found in rows.items()}


def context_of(gpu: str) -> Context | None:
    """The context of the card that the catalog calls ``gpu`` after a step; None where its multiprocessors are unknown.

    From its own rows where it has some, the user's before those that ship and measured before published: their median,
    and a range as wide as the rows of one card differ. Else from the line, and a range as wide as the line's worst
    error on a card that it has not seen.
    """
    if gpu not in _threads():
        return None
    own = [row for row in own_rows() if row.gpu == gpu]
    found = own or [row for row in context_rows() if row.gpu == gpu and row.loaded == "step"]
    if measured := [row for row in found if row.grade == "measured"]:
        found = measured
    if found:
        values = [row.mib for row in found]
        value, repeat = statistics.median(values), _repeat()
        low, high = min(*values, value * (1 - repeat)), max(*values, value * (1 + repeat))
        return _context(low, value, high, "measured here" if own else found[0].grade)
    base, slope = _line()
    value, error = base + slope * _threads()[gpu], _worst_error()
    return _context(value * (1 - error), value, value * (1 + error), "by its multiprocessors")


def _context(low: float, value: float, high: float, basis: Basis) -> Context:
    sizes = (round(mib * MIB) for mib in (low, value, high))
    return Context(**dict(zip(("low_bytes", "value_bytes", "high_bytes"), sizes, strict=True)), basis=basis)


@cache
def _line() -> tuple[float, float]:
    return line_of(list(card_points("step").values()))


@cache
def _repeat() -> float:
    """Return the largest relative distance of a figure from its card's median."""
    furthest = 0.0
    for row in context_rows():
        if row.loaded == "step":
            furthest = max(furthest, abs(row.mib / card_points("step")[row.gpu][1] - 1))
    return furthest


@cache
def _worst_error() -> float:
    return max(abs(error) for loaded in ("start", "step") for error in left_out_errors(card_points(loaded)).values())


@cache
def _threads() -> dict[str, int]:
    """Threads that the multiprocessors of each NVIDIA card hold together, by the catalog's name."""
    sms = {row["gpu"]: int(row["sm_count"]) for row in csv_rows("gpu_properties.csv")}
    found = {}
    for row in csv_rows("gpus.csv"):
        major, dot, minor = row["compute_capability"].partition(".")
        if dot and row["gpu"] in sms:
            found[row["gpu"]] = sms[row["gpu"]] * threads_per_sm((int(major), int(minor)))
    return found

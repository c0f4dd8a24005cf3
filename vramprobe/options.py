"""The options of a cell, a row each: what the command line, sweep files, records and tables say of it.

In: data/options.csv, whose ``{words}`` are choices.py's. Out: OPTIONS, in the order of ``--help``. Defaults and types
are spec.py's, which combinations can run is said in rules/. Never imports pydantic.
"""

import csv
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, get_args

from vramprobe.choices import WORDS, Optim


class CellOption(NamedTuple):
    """One option of a cell."""

    kind: type  # of its value on the command line
    help: str
    meaning: str | None  # of its column in records; null: it has none
    is_recipe: bool = False  # whether a recipe of training may change it, as tables of GPUs say
    title: str | None = None  # how tables name a method that has it, where they do


def as_typed(options: Mapping[str, Any]) -> list[str]:
    """Options of a cell as they are typed, ``["--batch-size", "4", "--no-padding"]``; those that are null are not."""
    words = []
    for name, value in options.items():
        flag = f"--{name.replace('_', '-')}"
        if isinstance(value, bool):
            words.append(flag if value else f"--no-{flag[2:]}")
        elif value is not None:
            words += [flag, ",".join(value) if isinstance(value, (list, tuple)) else str(value)]
    return words


_KINDS: dict[str, type] = {kind.__name__: kind for kind in (str, int, float, bool)}
with (Path(__file__).parent / "data" / "options.csv").open(encoding="utf-8", newline="") as _file:
    _ROWS = list(csv.DictReader(_file))


def _option(row: Mapping[str, str]) -> CellOption:
    """The option of a row; an optimizer is named by its first name alone."""
    words = " | ".join(get_args(Optim) if row["name"] == "optim" else WORDS.get(row["name"], ()))
    text, meaning, is_recipe = row["help"].replace("{words}", words), row["meaning"] or None, row["is_recipe"] == "yes"
    return CellOption(_KINDS[row["kind"]], text, meaning, is_recipe, row["title"] or None)


OPTIONS: dict[str, CellOption] = {row["name"]: _option(row) for row in _ROWS}
#: Those that only a cell with adapters takes.
ADAPTER_OPTIONS = tuple(row["name"] for row in _ROWS if row["of"] == "adapter")
#: Those of several ranks.
RANK_OPTIONS = tuple(row["name"] for row in _ROWS if row["of"] == "ranks")
#: Those that change only how a run is measured: a prediction has none of them.
MEASURED_OPTIONS = ("weights", "timing_steps")

"""Optimizers: what each needs, in one row that specs, bounds, workload and the page read.

In: data/optimizers.csv. Out: frozen rows by transformers' names. Sizes follow ``torch.optim``, transformers' Adafactor
and ``bitsandbytes.optim``; the rules that turn a row into bytes stand in bounds/states.py. A new optimizer that follows
one of these libraries' rules is a row of that file. Imports none of them.
"""

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple


class Optimizer(NamedTuple):
    """One optimizer. A copy is as many elements as the parameter has."""

    name: str  # transformers' own, or one in its style where transformers has none
    made_by: str  # the class that the workload makes
    #: In the parameter's dtype; in fp32; in 8 bits, except small tensors and embeddings, in fp32; or Adafactor's means
    #: of rows and columns, in fp32.
    state: Literal["parameter", "fp32", "8bit", "factored"]
    options: dict[str, Any] | None = None  # its arguments beside parameters and learning rate
    aliases: tuple[str, ...] = ()  # transformers' other names for it
    short_name: str = ""  # in a cell's name, where it is not ``name``
    state_copies: tuple[int, ...] = ()  # copies in each tensor of the state; AdEMAMix has its two moments in one
    #: Where torch.optim counts a parameter's steps: in host memory, on the card, or, as counted here, with the state.
    counter: Literal["none", "host", "card", "state"] = "none"
    is_paged: bool = False  # large states lie in managed memory, which torch does not count
    takes_dtensors: bool = False  # stepped on fully_shard's DTensors (torch 2.13); the others raised
    has_cpu_adam: bool = False  # DeepSpeed replaces it by its CPUAdam where it offloads

    @property
    def needs_bitsandbytes(self) -> bool:
        """Return True if it is one of bitsandbytes'."""
        return self.made_by.startswith("bitsandbytes.")


def _optimizer(row: Mapping[str, str]) -> Optimizer:
    """The optimizer of a row; an empty cell leaves the default."""
    read: dict[str, Any] = {
        "options": json.loads,
        "aliases": lambda text: tuple(text.split()),
        "state_copies": lambda text: tuple(map(int, text.split())),
        **dict.fromkeys(("is_paged", "takes_dtensors", "has_cpu_adam"), lambda text: text == "yes"),
    }
    return Optimizer(**{name: read.get(name, str)(text) for name, text in row.items() if text})


with (Path(__file__).parent / "data" / "optimizers.csv").open(encoding="utf-8", newline="") as _file:
    OPTIMIZERS: dict[str, Optimizer] = {row["name"]: _optimizer(row) for row in csv.DictReader(_file)}
#: The row's name by each of transformers' names for it.
OPTIMIZER_NAMES: dict[str, str] = {name: row.name for row in OPTIMIZERS.values() for name in (row.name, *row.aliases)}

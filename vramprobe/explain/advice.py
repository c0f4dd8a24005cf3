"""Map facts about a failure to changes, the most effective first: the table data/advice.toml.

In: the keys of a failure, the narrowest first: a detail of its phase, its phase. Out: at most three Changes.
"""

import tomllib
from collections.abc import Iterable
from dataclasses import dataclass

from vramprobe.catalog.shipped import data_file

MAX_CHANGES = 3
_TABLE = tomllib.loads(data_file("advice.toml").read_text(encoding="utf-8"))
#: By a phase, "phase: detail", or what is known beside them.
ADVICE: dict[str, tuple[str, ...]] = {
    key: tuple(_TABLE["shared"].get(text, text) for text in texts) for key, texts in _TABLE["advice"].items()
}


@dataclass(frozen=True)
class Advice:
    """Something to do; ``num_bytes``: what it frees at most, where the input says so."""

    text: str
    num_bytes: int | None = None


def advice(keys: Iterable[str]) -> list[Advice]:
    """The changes of the first of ``keys`` that the table has."""
    return [Advice(text) for text in next((ADVICE[key] for key in keys if key in ADVICE), ADVICE["unknown"])]

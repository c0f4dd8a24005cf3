"""Savings of each technique in its emulated run, alone and together: rows of the table that ships.

In: data/techniques.csv, which benchmarks/techniques/techniques.py writes from its journal. Out: frozen rows. Bytes are
emulated, seconds predicted; a run that gave none says why.
"""

import csv
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from typing import Any

from vramprobe.records.shown import Shown
from vramprobe.techniques.registry import Technique, techniques


@dataclass(frozen=True, kw_only=True)
class Saving:
    """A run of a technique, or of several ("nf4 + liger"), beside its base's run.

    Without an outcome of ``ok`` all numbers are null.
    """

    technique: str
    base: str
    gpu: str
    package: str  # name and version that ran
    outcome: str  # ok, out of memory, error: why
    base_bytes: int | None = None  # allocated peak without the technique
    peak_bytes: int | None = None  # with it
    reserved_bytes: int | None = None
    base_seconds: float | None = None  # predicted step without it
    seconds: float | None = None
    uncounted_share: float | None = None  # of the launches: work that the predicted step does not have
    host_bytes: int | None = None  # highest of the host in training, CPU tensors and pinned memory

    @property
    def saved_bytes(self) -> int | None:
        """Negative where it needs more."""
        return None if self.peak_bytes is None or self.base_bytes is None else self.base_bytes - self.peak_bytes

    @property
    def saved_share(self) -> float | None:
        """Share of the base's peak that is saved."""
        return None if self.saved_bytes is None or not self.base_bytes else self.saved_bytes / self.base_bytes

    @property
    def slower_share(self) -> float | None:
        """By how much the predicted step is longer; negative where it is shorter."""
        return None if self.seconds is None or not self.base_seconds else self.seconds / self.base_seconds - 1


@dataclass(frozen=True)
class TechniqueList(Shown):
    """Techniques, and what each saved in its own emulated run beside its own base."""

    listed: tuple[Technique, ...]

    def headline(self) -> str:
        """Return how many they are, and how they were made."""
        return f"{len(self.listed)} techniques; memory emulated, allocated peak; step time predicted"

    def rows(self) -> list[dict[str, Any]]:
        """Return one row each: bytes saved, its share of the base's peak, by which share a step is longer."""
        found = savings()
        return [
            {
                "technique": one.name,
                "kind": one.kind,
                "base": one.base,
                "saved_bytes": (saving := found.get(one.id)) and saving.saved_bytes,
                "saved_share": saving and saving.saved_share,
                "slower_share": saving and saving.slower_share,
                "trl": one.switch("trl"),
            }
            for one in self.listed
        ]


_NUMBERS = {
    "base_bytes": int,
    "peak_bytes": int,
    "reserved_bytes": int,
    "base_seconds": float,
    "seconds": float,
    "uncounted_share": float,
    "host_bytes": int,
}


@cache
def runs() -> tuple[Saving, ...]:
    """Every run of one technique beside its own base, then those beside other bases and of several together."""
    text = (files("vramprobe") / "data" / "techniques.csv").read_text(encoding="utf-8")
    return tuple(map(saving_of, csv.DictReader(text.splitlines())))


def savings() -> dict[str, Saving]:
    """Each technique that was run by itself beside its own base, by id."""
    own = {one.id: one.base for one in techniques().values()}
    return {one.technique: one for one in runs() if own.get(one.technique) == one.base}


def saving_of(row: Mapping[str, Any]) -> Saving:
    """A row of the table."""
    numbers: dict[str, Any] = {
        name: kind(row[name]) for name, kind in _NUMBERS.items() if row.get(name) not in ("", None)
    }
    return Saving(**{name: value for name, value in row.items() if name not in _NUMBERS} | numbers)

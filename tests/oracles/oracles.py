"""The oracles: what runs of a cell took and what predict said of it before arithmetic was replaced.

In: cells.jsonl.xz and questions.jsonl.xz, which freeze.py writes. Out: frozen rows. README.md says what each field is.
Imports nothing of benchmarks/ and needs no torch.
"""

import json
import lzma
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from vramprobe.options import RANK_OPTIONS
from vramprobe.spec import CellSpec

CELLS, QUESTIONS = (Path(__file__).with_name(f"{name}.jsonl.xz") for name in ("cells", "questions"))


@dataclass(frozen=True)
class Figures:
    """Peaks of the training steps, of one rank or of the fullest GPU; null is not known."""

    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    load_bytes: int | None = None  # allocated at most before the first step
    phase: str | None = None  # of the allocated peak
    retries: int | None = None  # times that the allocator gave cached blocks back, to fit
    cards: list[dict[str, Any]] | None = None  # of one process over several GPUs


@dataclass(frozen=True, kw_only=True)
class Run(Figures):
    """Figures of a run. ``instrument``: emulated, or cpu, which is measured."""

    instrument: str
    outcome: str  # ok or oom
    origin: dict[str, Any]  # file, and the values by which its row or record is found


@dataclass(frozen=True, kw_only=True)
class Today(Figures):
    """Figures that predict gave by arithmetic; all null where it has none and would record the cell."""

    engine: str | None = None  # formula; null where it refused, too
    terms: dict[str, int] | None = None  # bytes by cause at the peak, as predict prints them
    constant_bytes: int = 0  # what the terms lack of the allocated peak
    verdict: str | None = None
    usable_bytes: int | None = None  # of the GPU, beside what is set aside for the CUDA context and NCCL
    host_bytes: int | None = None
    refused: str | None = None  # the error that a person got


@dataclass(frozen=True)
class Oracle:
    """One cell on one GPU; ``run`` is null where none was kept. Where the two differ the run is right."""

    kind: str
    gpu: str | None  # null on the CPU
    cell: dict[str, Any]  # the CellSpec's own JSON, every option
    run: Run | None
    today: Today

    @cached_property
    def spec(self) -> CellSpec:
        """The cell; of ranks also those that predict counts and no library runs, which a CellSpec would refuse."""
        ranks = {name: self.cell[name] for name in (*RANK_OPTIONS, "only_rank")}
        alone = {name: value for name, value in self.cell.items() if name not in ranks}
        return CellSpec.model_validate_json(json.dumps(alone)).model_copy(update=ranks)

    @property
    def is_a_command(self) -> bool:
        """Tell whether the run was of a training script that a cell only resembles."""
        return self.kind in ("techniques", "releases")


@dataclass(frozen=True)
class Question:
    """One call of ``vramprobe.api`` and what it answered, cut to what a person reads first."""

    ask: str
    words: dict[str, Any]
    answer: Any


def cells() -> Iterator[Oracle]:
    """All of them, by kind, GPU and name."""
    for row in rows(CELLS):
        run = Run(**row["run"]) if row["run"] else None
        yield Oracle(row["kind"], row["gpu"], row["cell"], run, Today(**row["today"]))


def questions() -> list[Question]:
    """All inverse questions, recommendations and plans."""
    return [Question(**row) for row in rows(QUESTIONS)]


def rows(path: Path) -> Iterator[dict[str, Any]]:
    """The lines of a file as they are written."""
    with lzma.open(path, "rt", encoding="utf-8") as file:
        yield from map(json.loads, file)


def write(path: Path, made: list[dict[str, Any]]) -> None:
    """One line of JSON each, compressed."""
    text = "".join(json.dumps(row, separators=(",", ":"), ensure_ascii=False) + "\n" for row in made)
    path.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))

"""Freeze what predict says today, beside the runs that are kept: ``python tests/oracles/freeze.py`` (about 10 minutes).

It asks predict of the cells that the rows have and writes cells.jsonl.xz and questions.jsonl.xz; the same repository
gives the same rows. ``--check`` writes nothing and names what predict says otherwise now. Loads no torch, records
nothing.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from tests.oracles import oracles
from tests.oracles.inverse import answered, asked
from vramprobe.architecture import RunFails, UnsupportedArchitecture
from vramprobe.catalog import find_gpu
from vramprobe.errors import VramprobeError
from vramprobe.model.card_fit import shipped_fit
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.questions import predicted
from vramprobe.predict.verdict import verdict
from vramprobe.spec import CellSpec
from vramprobe.terms.replayed import replayed

Row = dict[str, Any]


def today(spec: CellSpec, gpu: str | None) -> Row:
    """What predict says of a cell, as the command line does: with the fit that ships, the replay, retries.

    Empty where only a recording answers: the run is its yardstick.
    """
    card = None if gpu is None else find_gpu(gpu)
    try:
        found = _predicted(spec, card)
    except UnsupportedArchitecture as error:
        if spec.device == "cuda" and not isinstance(error, RunFails):
            return {}  # predict would record it
        return {"refused": f"{type(error).__name__}: {error}"}
    except VramprobeError as error:
        return {"refused": f"{type(error).__name__}: {error}"}
    said: Row = {
        "engine": found.engine,
        "allocated_bytes": found.peak_allocated_bytes.value,
        "reserved_bytes": found.reserved_bytes and found.reserved_bytes.value,
        "load_bytes": _load_bytes(spec, card) if found.engine == "formula" else None,
        "phase": found.peak_phase,
        "terms": found.terms,
        "constant_bytes": found.constant_bytes,
        "retries": found.within and found.within.num_alloc_retries,
    }
    if card is not None and card.total_bytes:
        judged = verdict(found, card)
        said |= {"verdict": judged.verdict, "usable_bytes": judged.usable_bytes}
    return {name: value for name, value in said.items() if value is not None}


def _predicted(spec: CellSpec, card: Any) -> Prediction:
    """By arithmetic."""
    fit = shipped_fit(spec.device, card) if spec.sharding is None else None
    return predicted(spec, fit, engine="formula", gpu=card, replays=True, retries=True)


def _load_bytes(spec: CellSpec, card: Any) -> int | None:
    if spec.device != "cuda":
        return None
    return replayed(spec, card).load_bytes


def frozen() -> Iterator[tuple[str, str | None, CellSpec, Row | None]]:
    """The cells that the rows have now."""
    for row, one in zip(oracles.rows(oracles.CELLS), oracles.cells(), strict=True):
        yield one.kind, one.gpu, one.spec, row["run"]


def answered_rows(cells: Iterable[tuple[str, str | None, CellSpec, Row | None]]) -> list[Row]:
    """A row for each cell, without those that neither ran nor are answered for."""
    found = []
    for kind, gpu, spec, run in cells:
        said = today(spec, gpu)
        if run is not None or "engine" in said:
            found.append({"kind": kind, "gpu": gpu, "cell": spec.model_dump(mode="json"), "run": run, "today": said})
    return found


def changed(cells: list[oracles.Oracle]) -> list[str]:
    """Which of these cells predict answers otherwise than it did, and in what."""
    found = []
    for one in cells:
        said = dataclasses.asdict(oracles.Today(**today(one.spec, one.gpu)))
        before = dataclasses.asdict(one.today)
        names = [name for name, value in before.items() if said[name] != value]
        if names:
            found.append(f"{one.kind}, {one.gpu}, {one.spec.cell_id}: {', '.join(names)}")
    return found


def changed_answers(questions: list[oracles.Question]) -> list[str]:
    """Which of these questions are answered otherwise than they were."""
    return [f"{one.ask} {one.words}" for one in questions if answered(one.ask, one.words) != one.answer]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", choices=("cells", "questions"), help="these alone")
    parser.add_argument("--check", action="store_true", help="name what predict says otherwise now")
    words = parser.parse_args()
    warnings.filterwarnings("ignore")
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    if words.check:
        found = [] if words.only == "questions" else changed(list(oracles.cells()))
        found += [] if words.only == "cells" else changed_answers(oracles.questions())
        sys.exit("\n".join(found) if found else 0)
    if words.only != "questions":
        made = answered_rows(frozen())
        oracles.write(oracles.CELLS, made)
        print(json.dumps(Counter(row["kind"] for row in made), indent=1), len(made))
    if words.only != "cells":
        answers = [{"ask": ask, "words": cell, "answer": answered(ask, cell)} for ask, cell in asked()]
        oracles.write(oracles.QUESTIONS, answers)


if __name__ == "__main__":
    main()

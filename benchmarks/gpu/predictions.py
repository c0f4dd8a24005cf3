"""Predict the cells of sweeps before they are run: ``python benchmarks/gpu/predictions.py OUT SWEEP.yaml …``.

Writes OUT/predictions.json, or with ``--fit FIT.json`` OUT/predictions-fitted.json: each cell by both engines, with the
commit and the moment. Commit the file, then run the cells: once OUT holds a measurement of one of them, this refuses.
Nothing in these files is measured. ``--jobs N`` simulates in so many processes.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from vramprobe import catalog
from vramprobe.errors import VramprobeError
from vramprobe.measure.environment import PACKAGES, capture
from vramprobe.model.memory_model import MemoryModel, load_fit
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.records import store
from vramprobe.spec import CellSpec
from vramprobe.sweep.definition import load_sweep

FILES = {False: "predictions.json", True: "predictions-fitted.json"}  # whether a fit was given
KIND = "predictions, made before the cells were run; nothing here is measured"
CARD = "H200"
TIERS = {"allocated": "peak_allocated_bytes", "reserved": "reserved_bytes", "device": "device_bytes"}


def measured_already(out: Path, cells: Sequence[CellSpec]) -> list[str]:
    """Ids of cells that OUT holds a finished measurement of."""
    wanted = {spec.fingerprint for spec in cells}
    records = store.read(out, allow_empty=True).records if any(out.rglob("*.jsonl")) else ()
    return sorted(
        {
            record.cell_id
            for record in records
            if record.fingerprint in wanted and record.was_run and record.outcome.kind in store.FINISHED
        }
    )


def by_formula(spec: CellSpec, model: MemoryModel | None) -> Prediction | str:
    """By arithmetic, or why there is none."""
    try:
        return predict(spec, model)
    except VramprobeError as error:
        return str(error)


def by_trace(cells: Sequence[CellSpec], card: catalog.Gpu | None, model: MemoryModel | None, jobs: int) -> list[Any]:
    """By simulation, each a Prediction or why there is none."""
    from vramprobe.predict import trace_engine as engine

    return engine.predict_many(cells, gpu=card, model=model, max_processes=jobs)


def row(spec: CellSpec, sweep: str, found: dict[str, Prediction | str]) -> dict[str, Any]:
    """One cell: by engine, [value, low, high] of each tier that it knows, or why it knows none."""
    engines = {
        name: answer
        if isinstance(answer, str)
        else {
            tier: _three(interval) for tier, field in TIERS.items() if (interval := getattr(answer, field)) is not None
        }
        for name, answer in found.items()
    }
    return {"cell_id": spec.cell_id, "fingerprint": spec.fingerprint, "sweep": sweep, "method": spec.method} | engines


def _three(interval: Interval) -> list[int]:
    return [interval.value, interval.low, interval.high]


def head(spec: CellSpec, card: catalog.Gpu | None, model: MemoryModel | None) -> dict[str, Any]:
    """When, by which code, for which card and with which fit."""
    machine = capture(spec, "spawn", with_torch=False)
    told = (
        None
        if model is None
        else {
            "data_fingerprint": model.data_fingerprint,
            "num_records": model.num_records,
            "device_name": model.device_name,
        }
    )
    return {
        "kind": KIND,
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": machine.commit,
        "dirty": machine.dirty,
        "versions": {name: machine.versions.get(name) for name in PACKAGES},
        "card": card and card.name,
        "device": spec.device,
        "fit": told,
    }


def text_of(content: dict[str, Any]) -> str:
    """JSON with one line a cell, so that a change is a readable one."""
    lines = ",\n".join(f"  {json.dumps(one, ensure_ascii=False)}" for one in content["cells"])
    above = json.dumps({key: value for key, value in content.items() if key != "cells"}, indent=1, ensure_ascii=False)
    return f'{above.removesuffix("}").rstrip()},\n "cells": [\n{lines}\n ]\n}}\n'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("sweeps", type=Path, nargs="+")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--fit", type=Path)
    parser.add_argument("--jobs", type=int, default=2)
    words = parser.parse_args()
    sweeps = [load_sweep(path, device=words.device) for path in words.sweeps]
    cells = {spec.fingerprint: (spec, sweep.name) for sweep in sweeps for spec in sweep.cells}
    specs = [spec for spec, _ in cells.values()]
    words.out.mkdir(parents=True, exist_ok=True)
    if done := measured_already(words.out, specs):
        sys.exit(
            f"{len(done)} of these cells are measured already, {done[0]} for one: what is said of them now would "
            "be no prediction. The file that was committed before them stands."
        )
    model = load_fit(words.fit) if words.fit else None
    card = catalog.find_gpu(CARD) if words.device == "cuda" else None
    traced = by_trace(specs, card, model, words.jobs)
    rows = [
        row(spec, name, {"formula": by_formula(spec, model), "trace": trace})
        for (spec, name), trace in zip(cells.values(), traced, strict=True)
    ]
    target = words.out / FILES[model is not None]
    target.write_text(text_of({**head(specs[0], card, model), "cells": rows}))
    known = sum(not isinstance(one["trace"], str) for one in rows)
    print(f"{target}: {len(rows)} cells, {known} simulated; commit it before the cells are run")


if __name__ == "__main__":
    main()

"""Predictions that pages of this folder rest on: ``python benchmarks/truth/kept_predictions.py`` keeps what lacks.

In: a cell and its GPU, of coverage.py and published_verdicts.py. Out: what ``predict`` says, from
kept_predictions.jsonl.xz; of several GPUs near, by one GPU's recording. A recording takes 5 to 20 s, 160 of them an
hour at most, so that pages are rebuilt without. ``--again`` predicts all anew.
"""

import json
import lzma
import sys
from functools import cache
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from vramprobe.catalog.gpus import Gpu
from vramprobe.errors import VramprobeError
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.questions import predicted
from vramprobe.predict.shares import near
from vramprobe.records.whole_file import replacing
from vramprobe.spec import CellSpec

KEPT = Path(__file__).with_suffix(".jsonl.xz")


def predicted_on(spec: CellSpec, gpu: Gpu) -> Prediction:
    """Return the kept prediction of a cell on ``gpu``.

    flash-attn is taken as sdpa, which runs the same kernel on the cards that have it. Raises VramprobeError where none
    is kept or can be made.
    """
    row = _kept().get(_name_of(spec, gpu))
    if row is None:
        raise VramprobeError(f"not kept: {spec.cell_id} on {gpu.short_name}; run benchmarks/truth/kept_predictions.py")
    if "refused" in row:
        raise VramprobeError(row["refused"])
    return Prediction.model_validate(row)


def _name_of(spec: CellSpec, gpu: Gpu) -> str:
    return f"{spec.fingerprint} {spec.cell_id} {gpu.short_name} {gpu.total_bytes}"


@cache
def _kept() -> dict[str, Any]:
    if not KEPT.exists():
        return {}
    return {row.pop("cell"): row for row in map(json.loads, lzma.decompress(KEPT.read_bytes()).splitlines())}


def _predict(spec: CellSpec, gpu: Gpu) -> dict[str, Any]:
    one = spec.model_copy(update={"attn": "sdpa"}) if spec.attn == "flash_attention_2" else spec
    try:
        if one.num_gpus > 1:
            return near(one, gpu, records=True).model_dump(mode="json")
        return predicted(one, gpu=gpu).model_dump(mode="json")
    except VramprobeError as error:
        return {"refused": f"{type(error).__name__}: {error}"}


def _asked() -> dict[str, tuple[CellSpec, Gpu]]:
    """Every cell that a page asks for, by its name."""
    from benchmarks.truth import coverage, published_verdicts
    from benchmarks.truth.oom import published_runs

    cells = [(spec, run.card) for run in coverage.real_runs() for spec in (run.spec, coverage.in_its_loop(run))]
    cells += [(run.spec, run.gpu) for run in (*published_runs(), *published_verdicts.runs_of_others())]
    return {_name_of(spec, gpu): (spec, gpu) for spec, gpu in cells}


def main() -> None:
    asked, kept = _asked(), {} if "--again" in sys.argv else dict(_kept())
    for number, (name, (spec, gpu)) in enumerate(asked.items(), 1):
        if name not in kept:
            print(f"{number} of {len(asked)}: {name}", flush=True)
            kept[name] = _predict(spec, gpu)
            _write({known: kept[known] for known in sorted(asked) if known in kept})
    _write({name: kept[name] for name in sorted(asked)})


def _write(rows: dict[str, Any]) -> None:
    text = "".join(json.dumps({"cell": name} | row, separators=(",", ":")) + "\n" for name, row in rows.items())
    with replacing(KEPT) as part:
        part.write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))


if __name__ == "__main__":
    main()

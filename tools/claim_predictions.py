"""Record the cells that claims are read as: ``python tools/claim_predictions.py`` writes their predictions.

In: the claims and their readings (vramprobe/literature). Out: data/claim_predictions.jsonl.xz, a row for each cell
that is asked for: its options and the Prediction. About 1,500 cells, those without a recipe at hand recorded, seconds
each; what is kept stays, also where this is interrupted. ``--again`` predicts all anew; ``--check`` names what is asked
for and not kept, and the reverse.
"""

import argparse
import json
import lzma
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from vramprobe.catalog.shipped import data_file
from vramprobe.errors import VramprobeError
from vramprobe.literature import figures
from vramprobe.literature.claims import judge_claims
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.questions import predict


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--again", action="store_true", help="predict all anew")
    parser.add_argument("--check", action="store_true", help="write nothing")
    words = parser.parse_args()
    kept = {} if words.again else dict(figures._kept())
    asked: dict[str, Any] = {}
    missing: list[str] = []

    def predicted(options: figures.Options, gpu: str | None = None) -> Prediction:
        name = figures.name_of(options, gpu)
        if name in kept:
            asked[name] = kept[name]
        elif words.check:
            missing.append(name)
        else:
            print(f"{len(asked)} {name}", file=sys.stderr, flush=True)
            kept[name] = asked[name] = predict(gpu=gpu, **options).model_dump(mode="json")
        if name not in kept:
            raise VramprobeError(f"not kept: {name}")
        return Prediction.model_validate(kept[name])

    rows: dict[str, Any] = kept  # of a run that ends early, all; of a whole one, those that are asked for
    try:
        with mock.patch.object(figures, "kept_or_predicted", predicted):
            judge_claims()
        rows = asked
    finally:
        if not words.check:
            _write(rows)
    if words.check:
        unasked = [f"kept and not asked for: {name}" for name in kept if name not in asked]
        sys.exit("\n".join([*(f"asked for and not kept: {name}" for name in missing), *unasked]) or 0)


def _write(predictions: Mapping[str, Any]) -> None:
    """Write a row for each cell, the names in their order."""
    rows = [{"options": json.loads(name), "prediction": predictions[name]} for name in sorted(predictions)]
    text = "".join(json.dumps(row, separators=(",", ":")) + "\n" for row in rows)
    data_file(figures.KEPT).write_bytes(lzma.compress(text.encode(), preset=9 | lzma.PRESET_EXTREME))
    print(f"{len(rows)} predictions")


if __name__ == "__main__":
    main()

"""What the cells of this folder will take, before they are measured: ``python benchmarks/gpu/predictions.py``.

Writes predictions.csv: for each cell of cells.yaml and boundary.yaml the arithmetic's allocated and reserved peak, the
verdict and the seconds of a step on the card; nothing where there is no arithmetic. Predicted.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.tables import as_csv, write_or_check

FOLDER = Path(__file__).resolve().parent
GPUS = ("H100-SXM", "H200")


def rows() -> list[dict[str, object]]:
    """A row for each cell and card."""
    from vramprobe.catalog import find_gpu
    from vramprobe.errors import VramprobeError
    from vramprobe.model.card_fit import shipped_fit
    from vramprobe.predict.predict import predict
    from vramprobe.speed.step import estimate
    from vramprobe.sweep.definition import load_sweep

    found = []
    for sweep in ("cells", "boundary"):
        for spec in load_sweep(FOLDER / f"{sweep}.yaml", device="cuda").cells:
            for name in GPUS:
                gpu = find_gpu(name)
                row = {"sweep": sweep, "gpu": name, "cell_id": spec.cell_id}
                try:
                    answer = predict(spec, shipped_fit("cuda", gpu), gpu=gpu, replays=True)
                    row["allocated_bytes"] = answer.peak_allocated_bytes.value
                    row["reserved_bytes"] = answer.reserved_bytes and answer.reserved_bytes.value
                    row["step_seconds"] = f"{estimate(spec, gpu).seconds:.4f}"
                except VramprobeError as error:
                    row["why_not"] = str(error).split(";")[0][:160]
                found.append(row)
    return found


def main() -> None:
    """Write the table."""
    columns = ("sweep", "gpu", "cell_id", "allocated_bytes", "reserved_bytes", "step_seconds", "why_not")
    made = {FOLDER / "predictions.csv": as_csv(rows(), columns)}
    write_or_check(made, "gpu/predictions.py", check="--check" in sys.argv)


if __name__ == "__main__":
    main()

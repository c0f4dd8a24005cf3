"""Three steps of one cell, which ``vramprobe profile`` counts: ``python benchmarks/speed/counted_cell.py CELL``."""

import sys
from pathlib import Path

from vramprobe.spec import CellSpec
from vramprobe.workload import training


def main(path: str) -> None:
    spec = CellSpec.model_validate_json(Path(path).read_text())
    work = training.set_up(spec, training.NOBODY)
    for step in range(3):
        training.train_step(work, training.NOBODY, step)


if __name__ == "__main__":
    main(sys.argv[1])

"""Three steps of one cell, which ``vramprobe profile`` counts: ``python benchmarks/speed/counted_cell.py CELL``.

A cell on several GPUs is one rank of them: ``vramprobe profile --only-rank 0 --world-size N`` says which.
"""

import sys
from functools import partial
from pathlib import Path

from vramprobe.spec import CellSpec
from vramprobe.workload import training


def main(path: str) -> None:
    spec, join = CellSpec.model_validate_json(Path(path).read_text()), None
    if spec.num_gpus > 1:
        from vramprobe.workload.sharding import rank_class

        join = partial(rank_class(spec), spec, meeting_place=f"{path}.meeting", host_is_filled=False)
    work = training.set_up(spec, training.NOBODY, join)
    for step in range(3):
        training.train_step(work, training.NOBODY, step)


if __name__ == "__main__":
    main(sys.argv[1])

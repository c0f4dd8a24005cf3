"""The worker: one spec in, one record out, in a process of its own.

``python -m vramprobe.measure.worker`` is the spawned form: it loads what touches no device, then takes one request
(a line of JSON) from stdin; the fork server calls :func:`work` in a child. Whatever happens inside becomes the record's
outcome; when the process itself dies, the runner writes it, with the phase that this one announced last.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from vramprobe.measure import environment
from vramprobe.measure.lifeline import die_with, die_with_stdin
from vramprobe.measure.ranks import Seat, run_all, run_one_alone
from vramprobe.measure.run_cell import run_cell
from vramprobe.records.outcomes import Error
from vramprobe.records.record import RunRecord
from vramprobe.spec import CellSpec

if TYPE_CHECKING:
    from collections.abc import Iterator

#: What every cell needs, and what touches no device as it loads.
PRELOADED = (
    "torch", "transformers", "accelerate", "vramprobe.workload.training", "transformers.models.auto.modeling_auto",
)  # fmt: skip


def work(request: dict[str, str]) -> None:
    """Run the cell and leave its record at the path that is asked for, whole or not at all.

    ``request``: the spec as JSON under ``spec``; ``attempt_id``, ``isolation``, ``isolation_reason``; the paths
    ``record``, ``status`` and ``log``, and ``snapshot``, ``recording`` and ``verify``, empty where not asked for.
    """
    _be_the_first_to_go()
    spec, path = CellSpec.model_validate_json(request["spec"]), Path(request["record"])

    def run(seat: Seat | None = None) -> RunRecord:
        is_first = seat is None or spec.only_rank is not None or seat.index == 0
        record = run_cell(
            spec,
            isolation=request["isolation"],
            isolation_reason=request["isolation_reason"],
            attempt_id=request["attempt_id"],
            status=Path(request["status"]) if is_first else None,
            snapshot=Path(request["snapshot"]) if request["snapshot"] else None,
            recording=Path(request["recording"]) if request["recording"] else None,
            verify=bool(request["verify"]),
            seat=seat,
        )
        if isinstance(record.outcome, Error):  # on stderr, which is the cell's log
            sys.stderr.write(f"{record.outcome.traceback or record.outcome.message}\n")
        return record

    if not spec.is_sharded or spec.is_spread:
        record = run()
    elif spec.only_rank is None:
        record = run_all(spec, path.with_suffix(".ranks"), run)
    else:
        record = run_one_alone(spec, max(1, environment.num_visible_gpus()), run)
    partial = path.with_suffix(".partial")
    partial.write_text(record.to_json_line())
    partial.rename(path)


def _be_the_first_to_go() -> None:
    """If the host runs out of memory, Linux should end this process and not the sweep."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


@contextlib.contextmanager
def loading() -> Iterator[None]:
    """Inside, no garbage is looked for: libraries leave little as they load, and the search takes a fifth of it."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def _spawned() -> None:
    """Load, then wait for a request: a worker may be started before there is one. Its argument is the runner's pid."""
    if sys.platform == "linux":  # loading takes many seconds, in which nobody watches stdin
        die_with(int(sys.argv[1]))
    with loading():
        for name in PRELOADED:
            importlib.import_module(name)
    request = bytearray()
    while not request.endswith(b"\n"):
        read = os.read(0, 65536)
        if not read:
            return  # the runner went, or does not need us after all
        request += read
    words = json.loads(request)
    log = os.open(words["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for target in (1, 2):
        os.dup2(log, target)
    die_with_stdin()
    work(words)


if __name__ == "__main__":
    _spawned()

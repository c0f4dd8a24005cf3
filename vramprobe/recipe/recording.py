"""Record a cell on shallow models of its architecture, in a process that sees an emulated GPU.

``python -m vramprobe.recipe.recording SPEC.json RECIPE [whole]`` says on stdout, a line of JSON each, what it does, and
at the end ``{"error": …}`` where it cannot. Each run is a child of a fork server (measure/launcher.py). Never measures:
every number is emulated, and the whole model's is extended from them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

from vramprobe.catalog import cut_depth, depth_of
from vramprobe.emulate.build import emulator_version
from vramprobe.errors import VramprobeError
from vramprobe.log.depth import NotLinear
from vramprobe.log.file import read_log
from vramprobe.log.log import Log
from vramprobe.measure.isolation import new_ticket, require_packages, run_isolated, scratch_folder
from vramprobe.measure.launcher import Launchers
from vramprobe.recipe.pattern import LayerPattern, layer_pattern
from vramprobe.recipe.recipe import Recipe, pack, recipe_of
from vramprobe.records.record import RunRecord
from vramprobe.records.table import describe_outcome
from vramprobe.records.whole_file import replacing
from vramprobe.spec import CellSpec

_NUM_DEPTHS = 4  # three to make the recipe from, one to hold it against
_TIMEOUT_SECONDS = 600.0


class NotRecorded(VramprobeError):
    """A cell that does not run on the emulated GPU; the message says what it ended with."""


def record(spec: CellSpec, say: Callable[[str], None], *, whole: bool = False) -> Recipe:
    """Return the recipe of ``spec``: from three depths, checked on a fourth, or from the whole model where they differ.

    ``whole``: from the whole model in any case.

    Raises NotRecorded for a cell that does not run, MissingDependency for a package that it needs.
    """
    require_packages([spec])
    pattern = layer_pattern(_with_defaults(spec))
    depths = pattern.depths(_NUM_DEPTHS) if pattern and not whole else []
    with scratch_folder() as folder, Launchers([spec.model_type], folder / "server.log") as launchers:
        runs = _Runs(folder, launchers, spec)
        if depths:
            try:
                return runs.recipe(pattern, depths, say)
            except NotLinear as reason:
                say(f"its layers do not repeat ({reason})")
        return runs.recipe(None, [depth_of(spec.architecture)], say)


class _Runs:
    """Shallow runs of one cell, each in a process of its own."""

    def __init__(self, folder: Path, launchers: Launchers, spec: CellSpec) -> None:
        self._folder, self._launchers, self._spec = folder, launchers, spec

    def recipe(self, pattern: LayerPattern | None, depths: list[int | None], say: Callable[[str], None]) -> Recipe:
        """Return what runs of these depths say; one depth is the whole model's. Raises NotLinear, NotRecorded."""
        runs = []
        for number, depth in enumerate(depths, 1):
            say(f"recording run {number} of {len(depths)}" + (f": {depth} layers" if depth else ""))
            runs.append(self._run(depth if pattern else None))
        logs, records = [log for log, _ in runs], [record for _, record in runs]
        facts = [record.facts.model_dump() for record in records]
        owned = [record.ledger.model_dump(include=_OWNED) for record in records]
        versions = {name: version for name, version in records[0].environment.versions.items() if version}
        return Recipe(
            marks=logs[0].marks,
            depths=tuple(depth or 0 for depth in depths),
            stack=versions | {"emulator": emulator_version()},
            **recipe_of(logs, pattern, depths, facts, owned),
        )

    def _run(self, depth: int | None) -> tuple[Log, RunRecord]:
        """One run of load and two steps, with so many layers. Raises NotRecorded."""
        spec = self._spec
        if depth is not None:
            spec = spec.model_copy(update={"architecture": cut_depth(spec.architecture, depth)})
        ticket = new_ticket(self._folder, recording=self._folder / f"{depth}.npz")
        record = run_isolated(
            spec, self._launchers.launcher_of(spec), ticket, self._folder / "cell.log", _TIMEOUT_SECONDS
        )
        if record.facts is None or not ticket.recording.exists():
            raise NotRecorded(f"{spec.cell_id} does not run on the emulated GPU: {describe_outcome(record.outcome)}")
        return read_log(ticket.recording), record


_OWNED = {"weights_bytes", "gradients_bytes", "optimizer_state_bytes", "batch_bytes"}


def _with_defaults(spec: CellSpec) -> dict:
    """The cell's config with what transformers fills in where the file is silent."""
    from vramprobe.workload.model import config_from_dict

    return config_from_dict(spec.architecture).to_dict()


def main() -> None:
    """Record the cell whose spec is in the first file named; write the recipe to the second."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print must not speak in the protocol

    def say(words: str) -> None:
        answers.write(json.dumps({"say": words}) + "\n")

    spec_path, out = map(Path, sys.argv[1:3])
    try:
        recipe = record(CellSpec.model_validate_json(spec_path.read_text()), say, whole=sys.argv[3:] == ["whole"])
        with replacing(out) as part:
            part.write_bytes(pack(recipe))
    except VramprobeError as error:
        answers.write(json.dumps({"error": str(error)}) + "\n")


if __name__ == "__main__":
    main()

"""Record cells on shallow models of their architecture, in a process that sees an emulated GPU.

``python -m vramprobe.recipe.recording`` takes a request a line on stdin (:class:`Request`, as JSON) and says on stdout,
a line of JSON each, what it does, then ``{"done": null}`` or ``{"error": …}``. The runs are children of one fork server
(measure/launcher.py). Never measures: every number is emulated, and the whole model's is extended from them.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import chain, count
from pathlib import Path
from typing import Any, NamedTuple

from vramprobe.catalog import cut_depth, depth_of
from vramprobe.errors import VramprobeError
from vramprobe.log.depth import NotLinear
from vramprobe.log.file import read_log
from vramprobe.log.log import Log
from vramprobe.log.refined import refined
from vramprobe.log.shapes import Shape
from vramprobe.measure.isolation import new_ticket, require_packages, run_isolated, scratch_folder
from vramprobe.measure.launcher import Launchers
from vramprobe.recipe.launches import launch_rules, launches_of
from vramprobe.recipe.packed import pack
from vramprobe.recipe.pattern import LayerPattern, layer_pattern
from vramprobe.recipe.recipe import (
    CannotRecord,
    NotOneBranch,
    Recipe,
    TooLarge,
    at_shape,
    own_branch,
    recipe_of,
    require_one_branch,
    rules_over,
    shape_of,
)
from vramprobe.records.outcomes import Error, Oom
from vramprobe.records.record import RunRecord
from vramprobe.records.table import describe_outcome
from vramprobe.records.whole_file import replacing
from vramprobe.rules.sharding import rules_of
from vramprobe.spec import CellSpec

_NUM_DEPTHS = 4  # three to make the recipe from, one to hold it against
#: Periods more of ranks: what is gathered ahead has two layers on each side that are like any other's.
_DEEPER_OF_RANKS = 2
_TIMEOUT_SECONDS = 600.0
_LEAST_SHAPES = 3  # that a line of bytes is made from and held against
_SERVER_LOG = "server.log"
_OWNED = {"weights_bytes", "gradients_bytes", "optimizer_state_bytes", "batch_bytes"}


@dataclass(frozen=True)
class Request:
    """A cell to record, and the file for its recipe.

    ``shapes``: rows and lengths, or all with a rank, to record beside the cell's own, so that sizes follow from them.
    ``whole``: True records the whole model and extends nothing, False extends shallow runs also where the whole model
    has fewer layers than they together, None takes what costs less. ``near``: shapes whose events are not the cell's
    own are left out, and others between those that are left take their place; without it they are an error.
    """

    spec: CellSpec
    out: Path
    shapes: tuple[Shape, ...] = ()
    whole: bool | None = None
    near: bool = False

    def to_json_line(self) -> str:
        """One line."""
        return json.dumps(vars(self) | {"spec": self.spec.model_dump_json(), "out": str(self.out)}) + "\n"

    @classmethod
    def from_json_line(cls, line: str) -> Request:
        """Parse the line that :meth:`to_json_line` wrote."""
        words = json.loads(line)
        spec, shapes = CellSpec.model_validate_json(words.pop("spec")), tuple(map(tuple, words.pop("shapes")))
        return cls(spec, Path(words.pop("out")), shapes, **words)


class _Run(NamedTuple):
    log: Log
    record: RunRecord
    facts: dict[str, Any]
    owned: dict[str, int]  # bytes by cause
    count: dict[str, Any] | None  # what a step launches


class Recording:
    """Runs of cells, each in a process of its own; the libraries are loaded once."""

    def __init__(self, folder: Path, launchers: Launchers) -> None:
        self._folder, self._launchers = folder, launchers

    def recipe(self, request: Request, say: Callable[[str], None]) -> Recipe:
        """Return the cell's recipe: from three depths, checked on a fourth, or from the whole model where they differ.

        Raises CannotRecord for a cell that does not run, MissingDependency for a package that it needs, NotOneBranch
        where its events are others at one of the shapes.
        """
        spec = request.spec
        require_packages([spec])
        with ThreadPoolExecutor(1) as beside:
            started = beside.submit(self._launchers.launcher_of(spec).start)  # which loads the libraries, meanwhile
            from vramprobe.workload.model_config import config_from_dict  # loads transformers

            pattern = layer_pattern(config_from_dict(spec.architecture).to_dict())
            started.result()
        deeper = _DEEPER_OF_RANKS if spec.sharding else 0
        depths = []
        if pattern:
            at_any_cost, num_shapes = request.whole is False, len(request.shapes)
            depths = pattern.depths(_NUM_DEPTHS, deeper=deeper, num_shapes=num_shapes, at_any_cost=at_any_cost)
        if depths and not request.whole and not _fills_buckets(spec):
            try:
                return self._extended(request, pattern, depths, say)
            except NotLinear as reason:
                say(f"its layers do not repeat ({reason})")
        return self._extended(request, None, [depth_of(spec.architecture) or 0], say)

    def _extended(
        self, request: Request, pattern: LayerPattern | None, depths: Sequence[int], say: Callable[[str], None]
    ) -> Recipe:
        """Record runs of these depths and make the recipe; one depth is the whole model's. Raises NotLinear.

        The shapes come first, at one depth: where their events differ, the other depths need not be recorded.
        """
        spec, times = request.spec, 1 if pattern else 0
        numbers, of = count(1), len(depths) + len(request.shapes)

        def run(depth: int, shape: Shape | None = None) -> _Run:
            rows, length, *rank = shape or shape_of(spec)
            at = f", {rows} x {length} tokens{''.join(f', rank {one}' for one in rank)}" if shape else ""
            layers = f", {depth} layers" if pattern and not shape else ""
            say(f"recording {spec.model}: run {next(numbers)} of {of}{layers}{at}")
            return self._run(at_shape(spec, shape) if shape else spec, depth if pattern else None)

        own = run(depths[times])
        by_shape = {shape_of(spec)[: len(request.shapes[0]) if request.shapes else None]: own}
        for shape in request.shapes:
            by_shape[shape] = run(depths[times], shape)
            if not request.near:
                require_one_branch({one: seen.log for one, seen in by_shape.items()}, pattern)
        if request.near:
            by_shape = _own_branch(by_shape, pattern)
            between = _between(list(by_shape)) if len(by_shape) < _LEAST_SHAPES else []
            of += len(between)
            by_shape |= {shape: run(depths[times], shape) for shape in between}
            if len(by_shape) == 1:
                raise NotOneBranch("the events are others at each of these lengths")
        runs = [own if at == times else run(depth) for at, depth in enumerate(depths)]
        logs = [run.log for run in runs]
        counts = [run.count for run in runs if run.count is not None]
        versions = {name: version for name, version in own.record.environment.versions.items() if version}
        recipe = Recipe(
            marks=tuple(logs[0].marks),
            depths=tuple(depths),
            stack=versions | _device_words(own.record),
            **(made := recipe_of(logs, pattern, depths, [run.facts for run in runs], [run.owned for run in runs])),
            launches=launches_of(counts, made["times"]) if len(counts) == len(runs) else None,
        )
        if not request.shapes:
            return recipe
        logs_by_shape = {shape: run.log for shape, run in by_shape.items()}
        counts_by_shape = {shape: run.count for shape, run in by_shape.items() if run.count is not None}
        recipe = replace(recipe, rules=rules_over(logs_by_shape, recipe.growths, pattern, times))
        if recipe.launches is None or len(counts_by_shape) < len(by_shape):
            return recipe
        return replace(recipe, launch_rules=launch_rules(recipe.launches, counts, counts_by_shape, recipe.times))

    def _run(self, spec: CellSpec, depth: int | None) -> _Run:
        """One run of load and steps, with so many layers. Raises CannotRecord."""
        if depth is not None:
            spec = spec.model_copy(update={"architecture": cut_depth(spec.architecture, depth)})
        recording = self._folder / "log.npz"
        counted = recording.with_suffix(".json")
        for left in (recording, counted):
            left.unlink(missing_ok=True)
        launcher = self._launchers.launcher_of(spec)
        ticket, log = new_ticket(self._folder, recording=recording), self._folder / "cell.log"
        record = run_isolated(spec, launcher, ticket, log, _TIMEOUT_SECONDS)
        ticket.tear()
        if record.facts is None or record.ledger is None or not recording.exists():
            raise (TooLarge if isinstance(record.outcome, Oom) else CannotRecord)(_why_not(record, log))
        count = json.loads(counted.read_text()) if counted.exists() else None
        if count is not None and adds_apart(count):
            raise CannotRecord(
                f"{record.spec.cell_id} was recorded while torch saw that it is watched: it added all gradients that "
                "meet into new memory, which no other run does. Nothing is kept; ask again in a new process"
            )
        return _Run(
            refined(read_log(recording), spec),
            record,
            record.facts.model_dump(),
            record.ledger.model_dump(include=_OWNED),
            count,
        )


def _own_branch(runs: Mapping[Shape, _Run], pattern: LayerPattern | None) -> dict[Shape, _Run]:
    """Return the runs whose events are the first's."""
    alike = own_branch({shape: run.log for shape, run in runs.items()}, pattern)
    return {shape: runs[shape] for shape in alike}


def _between(shapes: Sequence[Shape]) -> list[Shape]:
    """Return two shapes between two of as many rows, where it is likely that the events are theirs, too."""
    (rows, shortest, *rank), longest = min(shapes), max(shapes)[1]
    lengths = {shortest + (longest - shortest) * third // 3 for third in (1, 2)} - {shortest, longest}
    return [(rows, length, *rank) for length in sorted(lengths)]


def adds_apart(count: Mapping[str, Any]) -> bool:
    """Return True if backward adds gradients out of place and none in place, as under a mode that torch's C++ sees
    (emulate/driver/dispatch_mode.c hides ours); every model has some that meet in a tensor of their own."""
    names = {row["name"] for row in count["rows"] if row["phase"] == "backward"}
    return "aten::add" in names and "aten::add_" not in names


def _why_not(record: RunRecord, log: Path) -> str:
    """Return what a cell ended with; of a worker without a record, the last line of the logs, which do not stay."""
    seen = record.environment
    on = "the emulated GPU" if seen.emulator or record.instrument == "emulated" else "this GPU"
    said = f"{record.spec.cell_id} does not run on {on}: {describe_outcome(record.outcome)}"
    logs = [one.read_text(errors="replace") for one in (log.with_name(_SERVER_LOG), log) if one.is_file()]
    lines = "\n".join(logs).strip().splitlines()
    if isinstance(record.outcome, Error) and record.outcome.error_type == "WorkerDied" and lines:
        said = f"{said.split('; its log:')[0]}: {lines[-1][:300]}"
    if "`target_modules`" in said:
        said = f"{said.rstrip('.')}. Here these are --lora-targets: names of linear layers."
    return said


def _device_words(record: RunRecord) -> dict[str, str]:
    """Return the emulator's version, or the GPU that was measured."""
    seen = record.environment
    return {"gpu": seen.device_name} if seen.emulator is None else {"emulator": seen.emulator}


def _fills_buckets(spec: CellSpec) -> bool:
    """Return True if its ranks gather or reduce a fixed number of bytes at a time, across layers: a few layers do not
    show how many such buckets there are, and what is in each.
    """
    rules = rules_of(spec.sharding)
    return rules.uses_deepspeed or rules.module == "ddp"


def main() -> None:
    """Answer requests until stdin closes."""
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # libraries that print must not speak in the protocol

    def answer(**words: str | None) -> None:
        answers.write(json.dumps(words) + "\n")

    requests = map(Request.from_json_line, sys.stdin)
    first = next(requests, None)
    if first is None:
        return
    with scratch_folder() as folder, Launchers([first.spec.model_type], folder / _SERVER_LOG) as launchers:
        recording = Recording(folder, launchers)
        for request in chain([first], requests):
            try:
                packed = pack(recording.recipe(request, lambda words: answer(say=words)))
                with replacing(request.out) as part:
                    part.write_bytes(packed)
            except VramprobeError as error:
                answer(error=str(error), kind=type(error).__name__)
            else:
                answer(done=None)


if __name__ == "__main__":
    main()

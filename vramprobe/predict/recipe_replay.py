"""A recipe at one depth and shape through torch's caching allocator: peaks, what is alive there, a Prediction.

In: a recipe (of a cell or of a command), a shape, the allocator's settings. Out: a Replay. Records nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from vramprobe.allocator.config import AllocatorConfig
from vramprobe.catalog import Gpu
from vramprobe.catalog.libraries import DECIDING
from vramprobe.log.log import Log
from vramprobe.log.reserved import num_retries, reserve
from vramprobe.log.shapes import Shape
from vramprobe.measure.observation import Observation, peak_of
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.uncertainty import interval_around
from vramprobe.predict.verdict import within
from vramprobe.recipe.recipe import Recipe
from vramprobe.records.phase_memory import Peak, PhaseMemory
from vramprobe.units import format_bytes

#: (low, high) of emulated / replayed, beyond the worst of benchmarks/truth/recipes.md; at lengths that a shipped recipe
#: was not recorded at, reserved memory may be off by a few MiB (docs/recipes.md).
ALLOCATED_RATIOS, RESERVED_RATIOS = (0.995, 1.005), (0.99, 1.01)
#: The same of reserved memory, of a compiled model.
COMPILED_RATIOS = (0.89, 1.11)


@dataclass(frozen=True, kw_only=True)
class Replay:
    """A recording as the allocator's counters would stand; ``at_peak``: bytes alive there, by cause.

    ``stack``: package → version. ``provenance``: how it was recorded, in words. ``num_params``: null where not said.
    """

    phases: list[PhaseMemory]
    log: Log
    peak: Peak
    at_peak: dict[str, int]
    stack: dict[str, str]
    provenance: str = ""
    notes: tuple[str, ...] = ()
    num_params: int | None = None

    @property
    def loads_most(self) -> bool:
        """Return True if loading allocates more than any step."""
        return self.peak.load_allocated_bytes > self.peak.allocated_bytes

    def prediction(self, name: str, warnings: Sequence[str]) -> Prediction:
        """Return the Prediction of ``name`` for one GPU, with these warnings and that of a load above the peak."""
        peak, terms = self.peak, dict(self.at_peak)
        assert peak.reserved_bytes is not None  # of an allocator's counters
        terms |= {"block_remainders": left} if (left := peak.allocated_bytes - sum(terms.values())) > 0 else {}
        return Prediction(
            cell_id=name,
            engine="recipe",
            peak_allocated_bytes=interval_around(peak.allocated_bytes, ALLOCATED_RATIOS),
            peak_phase=peak.phase,
            peak_label=f"{peak.phase} of step {peak.step}",
            terms=terms,
            constant_bytes=0,
            reserved_bytes=interval_around(peak.reserved_bytes, RESERVED_RATIOS),
            warnings=[*warnings, *([load_note(peak.load_allocated_bytes)] if self.loads_most else [])],
            libraries={package: self.stack[package] for package in DECIDING if package in self.stack},
        )


def replay_recipe(
    recipe: Recipe,
    config: AllocatorConfig,
    shape: Shape | None = None,
    *,
    stack: dict[str, str],
    empties_cache: bool = True,
    accumulates: bool = False,
) -> Replay:
    """Return ``recipe`` at its own depth and at ``shape``; ``empties_cache`` is :func:`reserve`'s, ``accumulates``
    Recipe.deep's, whose NoSecond it raises."""
    deep = recipe.deep(shape, accumulates=accumulates)
    phases = reserve(deep.phases, deep.log, config, empties_cache=empties_cache)
    peak = peak_of(Observation(phases, {}))
    highest = [
        (phase.allocated_peak_bytes, top)
        for phase, top in zip(phases, deep.tops, strict=True)
        if (phase.name, phase.step) == (peak.phase, peak.step)
    ]
    return Replay(
        phases=phases,
        log=deep.log,
        peak=peak,
        at_peak=deep.alive(max(highest, key=lambda one: one[0])[1]),
        stack=stack,
        num_params=recipe.facts.get("num_params"),
    )


def with_retries(found: Prediction, log: Log, config: AllocatorConfig, gpu: Gpu) -> Prediction:
    """Return ``found`` with how often the cache goes back, where ``gpu`` holds the tensors of ``log`` and not all that
    the allocator would keep."""
    return within(found, gpu, lambda limit: num_retries(log, config, limit))


def load_note(load_bytes: int) -> str:
    """Return the note for a cell whose load needs more than its steps."""
    return f"loading allocates the most, {format_bytes(load_bytes)}"

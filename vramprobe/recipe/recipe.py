"""A Recipe: what was recorded of a cell on shallow models, and how its phases grow with depth.

In: logs of three depths, and of a few batch shapes. Out: a Recipe, the Log at the cell's own depth and at another
shape. No torch.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from vramprobe.errors import VramprobeError
from vramprobe.log.depth import Deep, Growth, NotLinear, deep_of, growth_of, line_of
from vramprobe.log.log import ALL_CAUSES, Log, PhaseMark
from vramprobe.log.micro_steps import two_micro_steps
from vramprobe.log.pairing import Script, log_from, scripts_of
from vramprobe.log.shapes import Shape, ShapeRules, has_ranks, shape_rules
from vramprobe.recipe.launches import Launches, LaunchRules, launches_at, with_second_micro_step
from vramprobe.recipe.pattern import LayerPattern
from vramprobe.spec import CellSpec

_WORKSPACES, _GRADIENTS = ALL_CAUSES.index("workspaces"), ALL_CAUSES.index("gradients")
#: Fields of a cell that are younger than the format, which a cell that has them at their default is told apart without.
_YOUNGER = ("loop",)
#: Names in a model's configuration that decide no allocation, but the values in it.
_VALUES_ALONE = (
    *("rope_theta", "rotary_emb_base", "rope_local_base_freq", "rms_norm_eps", "layer_norm_epsilon", "layer_norm_eps"),
    *("norm_eps", "initializer_range", "bos_token_id", "eos_token_id", "transformers_version", "_name_or_path"),
)
#: Kinds of rotary positions that allocate alike; those that depend on the length are others.
_ROPES_OF_ONE_SIZE = ("default", "linear", "llama3", "yarn")


@dataclass(frozen=True, kw_only=True)
class Origin:
    """The cell, the card and the batch shapes that a recipe was recorded for; ``cell``: :func:`recorded_words`."""

    label: str
    card: str
    shapes: tuple[Shape, ...]
    cell: dict[str, Any]


@dataclass(frozen=True, kw_only=True, eq=False)
class Recipe:
    """Growth of each phase of a cell from the shallowest run; ``times`` copies of a period give the cell's own depth.

    ``rules``: how the bytes of all growths' events, one after the other, follow from rows, length and, where several
    were recorded, the adapters' rank; None where one shape was recorded.

    ``facts``: what was seen on the live models (records/record.py, ModelFacts), at the cell's depth. ``owned_bytes``:
    the tensors' own account by cause, there. ``stack``: package → version, with the emulator's. ``depths``: the layers
    of the runs it was made from; ``checked``: of the run that it was held against and not made from, if any.
    ``launches``: what a step launches at the cell's depth and shape (launches.py), ``launch_rules``: how that follows
    from rows and length; None where that was not recorded, or does not follow.
    ``origin``: None in the book that ships, whose entries' names say it. ``workspace_bytes``: of cuBLAS's on the card
    that was recorded, and on the one that it answers for, where that has another.
    """

    marks: tuple[PhaseMark, ...]
    growths: tuple[Growth, ...]
    rules: ShapeRules | None = None
    times: int
    depths: tuple[int, ...]
    checked: int | None
    facts: dict[str, Any]
    owned_bytes: dict[str, int]
    stack: dict[str, str]
    launches: Launches | None = None
    launch_rules: LaunchRules | None = None
    origin: Origin | None = None
    workspace_bytes: tuple[int, int] | None = None

    def launches_at(self, shape: Shape | None = None, *, accumulates: bool = False) -> Launches | None:
        """Return what a step launches at the cell's own depth; None where that is not known.

        ``shape``: rows and length of another batch, and its rank, in the branch that was recorded. ``accumulates`` as
        in :meth:`deep`.
        """
        found = self.launches
        if shape is not None and found is not None:
            found = None if self.launch_rules is None else launches_at(found, self.launch_rules, shape)
        if not accumulates or found is None:
            return found
        return with_second_micro_step(found, self._gradients_bytes(shape))

    def _gradients_bytes(self, shape: Shape | None) -> list[int]:
        """Return the bytes of each gradient that an optimizer step ends with."""
        log = self._log(shape)
        last = [mark.events for mark in log.marks if mark.name == "zero_grad"][-1]
        sizes, causes = (values[last.start : last.stop] for values in (log.size_bytes, log.causes))
        return (-sizes[(sizes < 0) & (causes == _GRADIENTS)]).tolist()

    def deep(self, shape: Shape | None = None, *, accumulates: bool = False) -> Deep:
        """Return phases, what is alive at each one's peak, and the Log, at the cell's own depth.

        ``shape``: rows and length of another batch, and its rank, in the branch that was recorded. ``accumulates``:
        with a second micro-step in each step, of a recipe of one; raises NoSecond (log/micro_steps.py).
        """
        return deep_of(self._log(shape, accumulates=accumulates))

    def _log(self, shape: Shape | None, *, accumulates: bool = False) -> Log:
        numbered, sizes = _numbered_log(self.marks, self.growths, self.times, accumulates), self._sizes(shape)
        return replace(numbered, size_bytes=np.concatenate([[0], sizes, -sizes[::-1]])[numbered.size_bytes])

    def _sizes(self, shape: Shape | None) -> np.ndarray:
        """Return the bytes of all growths' events at ``shape``, with the workspaces of the answered card."""
        sizes = _of_kinds("size_bytes", self.growths)
        if shape is not None and self.rules is not None:
            sizes = self.rules.sizes(*shape)
        if self.workspace_bytes is None:
            return sizes
        recorded, there = self.workspace_bytes
        is_workspace = _of_kinds("causes", self.growths) == _WORKSPACES
        return np.where(is_workspace & (sizes == recorded), there, sizes)


@lru_cache(maxsize=8)
def _of_kinds(name: str, growths: Sequence[Growth]) -> np.ndarray:
    """Return an array of the kinds by all growths' events."""
    return np.concatenate([getattr(growth.kinds, name)[np.abs(growth.codes) - 1] for growth in growths])


@lru_cache(maxsize=8)
def _numbered_log(marks: tuple[PhaseMark, ...], growths: tuple[Growth, ...], times: int, accumulates: bool) -> Log:
    """Return the log of any batch shape, with ``times`` copies of a period.

    In place of its bytes an event has its number among those of all growths, from 1 on, negative for a free; 0 where
    the cache is emptied. ``accumulates`` as in :meth:`Recipe.deep`.
    """
    own_bytes = _of_kinds("size_bytes", growths)
    numbers = np.where(own_bytes == 0, 0, np.arange(1, len(own_bytes) + 1))
    parts = np.split(numbers, np.cumsum([len(growth.codes) for growth in growths])[:-1])
    scripts = [growth.at(times, part) for growth, part in zip(growths, parts, strict=True)]
    log = log_from(scripts, marks)
    if accumulates:
        marks, scripts = zip(*two_micro_steps(marks, scripts, log), strict=True)
        log = log_from(scripts, marks)
    return log


def shape_of(spec: CellSpec) -> Shape:
    """Return rows, length and, of a cell with adapters, their rank."""
    return (spec.batch_size, spec.seq_len, *(() if spec.lora_r is None else (spec.lora_r,)))


def at_shape(spec: CellSpec, shape: Shape) -> CellSpec:
    """Return the cell with those rows, length and, where ``shape`` has one, rank."""
    names = ("batch_size", "seq_len", "lora_r")
    return spec.model_copy(update=dict(zip(names, shape, strict=False)))


def recorded_words(spec: CellSpec, without: Collection[str] = ()) -> dict[str, Any]:
    """Return the fields that tell a recorded cell from others, as JSON's types, ``without`` some."""
    words = spec.model_dump(mode="json", exclude=set(without))
    words["architecture"] = without_values(words["architecture"], learns_positions=spec.learned_positions is not None)
    defaults = {name: type(spec).model_fields[name].default for name in _YOUNGER}
    return {name: value for name, value in words.items() if name not in defaults or value != defaults[name]}


def without_values(config: Mapping[str, Any], *, learns_positions: bool = False) -> dict[str, Any]:
    """Return a model's configuration without what decides values alone: models that differ in no more share recipes.

    ``learns_positions``: the number of positions is a table's, and stays.
    """
    rope, left_out = config.get("rope_scaling") or {}, {*_VALUES_ALONE}
    kind = rope.get("rope_type", rope.get("type", "default")) if isinstance(rope, Mapping) else rope
    if not learns_positions and kind in _ROPES_OF_ONE_SIZE:
        left_out |= {"rope_scaling", "max_position_embeddings"}
    if config.get("use_sliding_window") is False:
        left_out |= {"use_sliding_window", "sliding_window", "max_window_layers"}
    kept = {
        name: without_values(value, learns_positions=learns_positions) if isinstance(value, Mapping) else value
        for name, value in config.items()
        if name not in left_out
    }
    return kept if "rope_scaling" in kept or kind == "default" else kept | {"rope_scaling": kind}


class CannotRecord(VramprobeError):
    """No recipe is at hand and none can be recorded; the message says why, and what to do."""


class NotOneBranch(CannotRecord):
    """The events are not the same ones at all batch shapes, so that no recipe answers for them together."""


class TooLarge(CannotRecord):
    """A cell that asks for more memory than the GPU of its recording has."""


def rules_over(
    logs: Mapping[Shape, Log], growths: Sequence[Growth], pattern: LayerPattern | None, times: int
) -> ShapeRules:
    """Return how sizes follow from rows and length; ``logs`` are of one depth, with ``times`` copies of a period.

    The first log is of the cell's own shape. Raises NotOneBranch where the events at another are not the same, or where
    ranks were recorded and a size follows from nothing.
    """
    require_one_branch(logs, pattern)
    sizes = {}
    for shape, scripts in zip(logs, scripts_of(list(logs.values()), _kind_of(pattern)), strict=True):
        parts = []
        for growth, script in zip(growths, scripts, strict=True):
            own = np.zeros(len(growth.codes), dtype=np.int64)
            own[growth.layout(times)[0]] = np.abs(script.size_bytes)
            parts.append(own)
        sizes[shape] = np.concatenate(parts)
    rules = shape_rules(sizes)
    if has_ranks(list(sizes)) and rules.num_unexplained:
        raise NotOneBranch(f"the bytes of {rules.num_unexplained} events follow from neither shape nor rank")
    return rules


def own_branch(logs: Mapping[Shape, Log], pattern: LayerPattern | None) -> dict[Shape, Log]:
    """Return those of the logs, all of one depth, whose events are the first's, whatever their sizes."""
    bare = [replace(log, size_bytes=np.sign(log.size_bytes)) for log in logs.values()]
    first, *_ = scripts = scripts_of(bare, _kind_of(pattern))
    alike = zip(logs.items(), scripts, strict=True)
    return {shape: log for (shape, log), own in alike if all(map(_is_same, own, first))}


def require_one_branch(logs: Mapping[Shape, Log], pattern: LayerPattern | None) -> None:
    """Raise NotOneBranch where the events at a shape are not those at the first."""
    alike = own_branch(logs, pattern)
    if (other := next((shape for shape in logs if shape not in alike), None)) is not None:
        other, own = (" x ".join(map(str, one)) for one in (other, next(iter(alike))))
        raise NotOneBranch(f"at {other} the events are not those at {own}")


def _kind_of(pattern: LayerPattern | None) -> Callable[[int], int]:
    return pattern.kind if pattern else lambda layer: layer


def _is_same(one: Script, other: Script) -> bool:
    return np.array_equal(one.codes, other.codes) and np.array_equal(one.ranks, other.ranks)


def recipe_of(
    logs: Sequence[Log],
    pattern: LayerPattern | None,
    depths: Sequence[int],
    facts: Sequence[dict],
    owned: Sequence[dict],
) -> dict[str, Any]:
    """Return the growth of each phase from three logs, or of one log alone that is the whole model's.

    The first three logs make it; a fourth is what it must predict. Raises NotLinear where the layers do not repeat.
    """
    scripts = scripts_of(logs, _kind_of(pattern))
    marks = logs[0].marks
    if len(logs) == 1:
        growths = [growth_of([script] * 3) for script in scripts[0]]
        return {"growths": tuple(growths), "times": 0, "facts": facts[0], "owned_bytes": owned[0], "checked": None}
    assert pattern is not None
    growths = []
    for mark, *runs in zip(marks, *scripts, strict=True):
        growth = growth_of(runs[:3])
        if growth is None or growth.ranks is None:
            raise NotLinear(f"{mark.name} (step {mark.step})")
        expected = growth.at(3)
        if not _is_same(expected, runs[3]):
            raise NotLinear(f"{mark.name} (step {mark.step}) at {depths[3]} layers")
        growths.append(growth)
    times = (pattern.num_layers - depths[0]) // pattern.period
    return {
        "growths": tuple(growths),
        "times": times,
        "facts": line_of(tuple(facts[:3]), times),
        "owned_bytes": line_of(tuple(owned[:3]), times),
        "checked": depths[3],
    }

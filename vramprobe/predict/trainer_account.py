"""TRL's GRPO trainer without its engine: what it holds in each stage, from a recorded step (workload/trainer.py).

In: the trainer's cell, a GPU. Out: an account for any rows and length, from one recipe that ships, was recorded before
or is recorded now. Never imports torch.
"""

from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

from vramprobe.architecture import architecture
from vramprobe.bounds.tensors import quantised_bytes, tensors
from vramprobe.catalog import Gpu
from vramprobe.log.shapes import Shape
from vramprobe.predict.at_hand import CANNOT_EMULATE, card_of, replayed, require_recordable
from vramprobe.predict.recipe_replay import Replay
from vramprobe.predict.recorded import replay_of
from vramprobe.recipe.book import find_recipe, recorded_as
from vramprobe.recipe.recipe import NotOneBranch, Recipe, at_shape, shape_of
from vramprobe.recipe.recorder import Say
from vramprobe.recipe.shipped import shipped_recipe
from vramprobe.spec import CellSpec

_STEADY_STEP = 2  # the first that has the optimizer's state in all its phases
#: Rows and lengths whose recipe answers for others, as in tools/book.py; those beside the first where a step of few
#: tokens is in another branch, as the gradient of a trained embedding is (up to 3,072).
_SHAPES = (((5, 2048), (2, 512), (3, 1024), (8, 8192)), ((5, 4096), (2, 2048), (3, 1536), (8, 8192)))


class TrainerAccount(NamedTuple):
    """Bytes that the trainer holds at the fullest moment of each stage, and where that is from."""

    weights: int
    optimizer_state: int
    loaded: int  # before the first step
    idle: int  # between two steps
    merging: int  # beside that, while the engine gets the weights
    by_stage: dict[str, int]
    provenance: str


class RecordedTrainer(NamedTuple):
    """Accounts by rows and length; where other shapes are in other branches, of the cell's own alone, and why."""

    at: Callable[[int, int], TrainerAccount]
    why_one_shape: str = ""


def recorded_trainer(spec: CellSpec, gpu: Gpu, say: Say) -> RecordedTrainer:
    """Return the trainer of ``spec``, recorded now where no recipe is at hand; raises as predict/recorded.py's
    predict. With fewer tokens than any recorded shape has, the cell's own is recorded, too, and others are near."""
    require_recordable(spec, gpu)
    try:
        recipe, shapes, source = _of_any_shape(spec, card_of(gpu), say)
    except (NotOneBranch, *CANNOT_EMULATE) as error:
        own = _account(replay_of(spec, gpu=gpu, say=say), spec)
        return RecordedTrainer(lambda rows, length: own, str(error))
    fewest = min(rows * length for rows, length, *_ in shapes)

    def at(rows: int, length: int) -> TrainerAccount:
        one = at_shape(spec, (rows, length))
        if one == spec and rows * length < fewest:
            return _account(replay_of(spec, gpu=gpu, say=say), spec)
        return _account(replayed(recipe, one, shape_of(one)), spec, source)

    return RecordedTrainer(cache(at))


def _of_any_shape(spec: CellSpec, card: Gpu, say: Say) -> tuple[Recipe, Sequence[Shape], str]:
    """A recipe, the shapes that it was recorded at, where it is from. Raises NotOneBranch."""
    shipped = shipped_recipe(recorded_as(spec), card)
    if shipped is not None and len(shipped.shapes) > 1:
        return shipped.recipe, shipped.shapes, "a recipe that ships, "
    why: NotOneBranch | None = None
    for attempt in _SHAPES:
        longest = attempt[-1][1]
        positions = min(spec.learned_positions or longest, longest)
        first, *others = shapes = [(rows, length * positions // longest) for rows, length in attempt]
        try:
            return find_recipe(at_shape(spec, first), card, say, shapes=others), shapes, ""
        except NotOneBranch as error:
            why = error
    assert why is not None
    raise why


def _account(replay: Replay, spec: CellSpec, source: str = "") -> TrainerAccount:
    steady = [one for one in replay.phases if one.step == _STEADY_STEP]
    forwards = [one for one in steady if one.name == "forward"]  # two of a micro-step: it scores its rows first
    stages = {"log_probs": forwards[::2], "forward": forwards[1::2]}
    stages |= {name: [one for one in steady if one.name == name] for name in ("backward", "optimizer_step")}
    return TrainerAccount(
        weights=replay.at_peak["weights"],
        optimizer_state=replay.at_peak.get("optimizer_state", 0),
        loaded=next(one.allocated_end_bytes for one in replay.phases if one.name == "prepare"),
        idle=steady[-1].allocated_end_bytes,
        merging=_merging_bytes(spec),
        by_stage={name: max(one.allocated_peak_bytes for one in phases) for name, phases in stages.items()},
        provenance=source + replay.provenance,
    )


def _merging_bytes(spec: CellSpec) -> int:
    """PEFT merges into one layer at a time, its delta and the sum in fp32 (peft/tuners/lora/layer.py:
    get_delta_weight). In 4 bits weight, delta and sum are bf16, and TRL's list of parameters keeps all that were merged
    before (peft/tuners/lora/bnb.py: merge, trl/distributed.py: gather_params)."""
    arch = architecture(spec.architecture)
    if spec.method == "full":
        return 0
    largest = max(one.numel for one in arch.parameters if one.role == "linear")
    if spec.method == "lora":
        return 2 * 4 * largest
    kept = sum(quantised_bytes(one, spec.quant) * one.num_copies for one in tensors(spec, arch) if one.quantised)
    return kept + 3 * 2 * largest

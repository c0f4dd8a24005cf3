"""Cards: a cell on several of them, by ranks (hybrid.py, layers.py) or in one process (``device_map="auto"``), which is
here.

In: a spec (its batch is one rank's, or the process's), how many cards, a fit or none. Out: a Prediction, of one process
that of the card that holds the most, with all of them beside it; the fewest that fit a GPU. What is counted is said in
terms/cards.py. No torch here.
"""

from __future__ import annotations

from functools import cache
from itertools import groupby
from typing import TYPE_CHECKING

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.choices import DEVICE_MAP, TENSOR_PARALLEL
from vramprobe.errors import SpecError
from vramprobe.model.memory_model import MemoryModel, peak_moment, with_workspaces, workspaces_bytes
from vramprobe.predict.hybrid import group_size, predict_one_of
from vramprobe.predict.layers import predict_layers
from vramprobe.predict.prediction import (
    CardPeak,
    HasKernels,
    Prediction,
    Verdict,
    predict,
    predict_moments,
    usable_bytes,
    verdict,
    with_retries,
)  # fmt: skip
from vramprobe.predict.prediction import without_flash as flash_notes
from vramprobe.predict.rank_replay import with_rank_replay
from vramprobe.predict.sharding import MinGpus, require_offload
from vramprobe.spec import CellSpec, cannot_group, cannot_rotate, cannot_share_sequences
from vramprobe.terms import Moment
from vramprobe.terms.cards import cards_of
from vramprobe.terms.device_map import CardMap
from vramprobe.units import format_bytes

if TYPE_CHECKING:
    from vramprobe.catalog import Gpu

#: The cards of one machine: beyond them no answer is sought.
MAX_CARDS = 16
_OUTSIDE = {"embedding": "embedding", "norm": "last norm", "head": "head"}


def predict_several(
    spec: CellSpec,
    num_gpus: int,
    sharding: str | None,
    model: MemoryModel | None = None,
    *,
    shard_size: int | None = None,
    cp_size: int = 1,
    cp_rotation: str = "allgather",
    offload: str = "none",
    allow_extrapolation: bool = False,
    gpu: HasKernels | None = None,
    replays: bool = False,
) -> Prediction:
    """One of ``num_gpus`` ranks, as predict_one_of or, under ``tp``, predict_layers has it; under ``device-map`` one
    process over so many cards. ``replays``: both tiers of a rank by the allocator's replay, where what it asks for is
    known in its order, and whether ``gpu`` is enough for it.

    Raises what these raise, and SpecError for what is not for them.
    """
    words = {"allow_extrapolation": allow_extrapolation, "gpu": gpu}
    if sharding not in (TENSOR_PARALLEL, DEVICE_MAP):
        shard_size = group_size(sharding, shard_size)
        groups = {"shard_size": shard_size, "cp_size": cp_size, "cp_rotation": cp_rotation, "offload": offload}
        found = predict_one_of(spec, num_gpus, sharding, model, **groups, **words)
        if not replays:
            return found
        ranks = spec.model_copy(update={"num_gpus": num_gpus, "sharding": sharding, **groups})
        return with_retries(with_rank_replay(found, ranks, gpu), ranks, gpu)
    require_offload(spec, sharding, offload)
    several = spec.model_copy(update={"num_gpus": num_gpus, "sharding": sharding, "cp_size": cp_size})
    if reason := (
        cannot_group(sharding, num_gpus, shard_size)
        or cannot_share_sequences(several)
        or cannot_rotate(cp_size, cp_rotation)
    ):
        raise SpecError(reason)
    if sharding == TENSOR_PARALLEL:
        return predict_layers(spec, num_gpus, model, **words)
    return predict_cards(spec, num_gpus, model, **words)


def predict_cards(
    spec: CellSpec,
    num_cards: int,
    model: MemoryModel | None = None,
    *,
    allow_extrapolation: bool = False,
    gpu: HasKernels | None = None,
) -> Prediction:
    """The allocated peak of the fullest of so many cards; ``cards`` of the Prediction has all of them.

    The map is that of cards with room enough. Raises SpecError where it has a single card or an empty first one, and
    what predict raises.
    """
    found = cards_of(spec, num_cards, gpu is None or gpu.has_flash)
    workspaces = workspaces_bytes(spec, gpu)
    moments = [card.moments(spec) for card in found.cards]
    peaks = [_peak(found.map, card, of_card, workspaces) for card, of_card in enumerate(moments)]
    fullest = max(peaks, key=lambda one: one.peak_allocated_bytes)
    notes = [
        f'one process over {num_cards} cards (device_map="auto"), the fullest above, by arithmetic, not measured',
        *(f"card {one.card}: {format_bytes(one.peak_allocated_bytes)} in {one.peak_phase}, {one.parts}"
          for one in peaks),
    ]  # fmt: skip
    prediction = predict_moments(
        spec, moments[fullest.card], model, allow_extrapolation=allow_extrapolation, num_gpus=num_cards,
        notes=[*notes, *flash_notes(spec, gpu)], sharding=DEVICE_MAP, workspaces=workspaces,
    )  # fmt: skip
    return prediction.model_copy(update={"cards": peaks})


def _peak(placed: CardMap, card: int, moments: list[Moment], workspaces: int) -> CardPeak:
    parts = _parts_on(placed, card)
    highest = peak_moment(with_workspaces(moments, workspaces if parts else 0), {})
    return CardPeak(
        card=card, parts=parts or "nothing", num_layers=placed.layers.count(card),
        peak_allocated_bytes=highest.total_bytes, peak_phase=highest.phase,
    )  # fmt: skip


def _parts_on(placed: CardMap, card: int) -> str:
    """In words: embedding, layers 0 to 13."""
    named = [_OUTSIDE["embedding"]] if placed.embedding == card else []
    own = [layer for layer, its_card in enumerate(placed.layers) if its_card == card]
    for _, group in groupby(enumerate(own), lambda one: one[1] - one[0]):
        run = [layer for _, layer in group]
        named.append(f"layer {run[0]}" if len(run) == 1 else f"layers {run[0]} to {run[-1]}")
    return ", ".join([*named, *(_OUTSIDE[part] for part in ("norm", "head") if placed.of(part) == card)])


def min_cards(
    spec: CellSpec, gpu: Gpu, model: MemoryModel | None = None, *, allow_extrapolation: bool = False
) -> MinGpus:
    """The fewest of ``gpu`` in one machine on each of which its layers have the verdict ``fits``.

    Raises UnsupportedArchitecture where there is no arithmetic for any number, and what predict raises.
    """

    @cache
    def judged(num_cards: int) -> Verdict:
        words = {"allow_extrapolation": allow_extrapolation, "gpu": gpu}
        if num_cards == 1:
            return verdict(predict(spec, model, **words), gpu)
        return verdict(predict_cards(spec, num_cards, model, **words), gpu)

    fewest = tight = last = None
    refusal: Exception | None = None
    alone = predict(spec, model, allow_extrapolation=True, gpu=gpu)
    standing = sum(alone.terms.get(cause, 0) for cause in ("weights", "optimizer_state"))
    least = min(max(2, standing // usable_bytes(gpu, device_is_known=False)), MAX_CARDS)
    for num_cards in (1, *range(least, MAX_CARDS + 1)):
        try:
            one = judged(num_cards)
        except (SpecError, UnsupportedArchitecture) as error:  # of this number: a card is left empty
            refusal = refusal or error
            continue
        last = num_cards
        if one.verdict != "does not fit" and tight is None:
            tight = num_cards
        if one.verdict == "fits":
            fewest = num_cards
            break
    if last is None or (last == 1 and fewest is None and refusal is not None):
        assert refusal is not None
        raise refusal
    return MinGpus(
        sharding=DEVICE_MAP, num_gpus=fewest, tight_num_gpus=None if tight == fewest else tight,
        verdict=judged(fewest or last),
    )  # fmt: skip

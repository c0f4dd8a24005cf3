"""Device map: a cell whose layers lie on several GPUs of one process -> the moments of the fullest of them.

In: a spec of sharding device-map, whose batch is the process's. Out: Counted, with the peak of every GPU. What is
counted is said in terms/sharding/device_map.py.
"""

from __future__ import annotations

from itertools import groupby

from vramprobe.kernels.chip import chip_like
from vramprobe.model.memory_model import peak_moment
from vramprobe.predict.one_gpu import Counted, without_flash
from vramprobe.predict.prediction import CardPeak, HasKernels
from vramprobe.spec import CellSpec
from vramprobe.terms import Moment
from vramprobe.terms.sharding.device_map import cards_of
from vramprobe.terms.sharding.placement import CardMap
from vramprobe.terms.step.workspaces import with_workspaces, workspaces_bytes
from vramprobe.units import format_bytes

_OUTSIDE = {"embedding": "embedding", "norm": "last norm", "head": "head"}


def count_cards(spec: CellSpec, gpu: HasKernels | None) -> Counted:
    """Every GPU of the process, as if each could hold its part.

    Raises SpecError where the map has a single GPU or an empty first one, UnsupportedArchitecture for what is not
    counted.
    """
    found = cards_of(spec, spec.num_gpus, chip_like(gpu))
    workspaces = workspaces_bytes(spec, gpu)
    moments = [card.moments(spec) for card in found.cards]
    peaks = [_peak(found.map, card, of_card, workspaces) for card, of_card in enumerate(moments)]
    fullest = max(peaks, key=lambda one: one.peak_allocated_bytes)
    notes = [
        f'one process over {spec.num_gpus} cards (device_map="auto"), the fullest above, by arithmetic, not measured',
        *(
            f"card {one.card}: {format_bytes(one.peak_allocated_bytes)} in {one.peak_phase}, {one.parts}"
            for one in peaks
        ),
    ]
    return Counted(moments[fullest.card], [*notes, *without_flash(spec, gpu)], cards=peaks)


def _peak(placed: CardMap, card: int, moments: list[Moment], workspaces: int) -> CardPeak:
    parts = _parts_on(placed, card)
    highest = peak_moment(with_workspaces(moments, workspaces if parts else 0), {})
    return CardPeak(
        card=card,
        parts=parts or "nothing",
        num_layers=placed.layers.count(card),
        peak_allocated_bytes=highest.total_bytes,
        peak_phase=highest.phase,
    )


def _parts_on(placed: CardMap, card: int) -> str:
    """In words: embedding, layers 0 to 13."""
    named = [_OUTSIDE["embedding"]] if placed.embedding == card else []
    own = [layer for layer, its_card in enumerate(placed.layers) if its_card == card]
    for _, group in groupby(enumerate(own), lambda one: one[1] - one[0]):
        run = [layer for _, layer in group]
        named.append(f"layer {run[0]}" if len(run) == 1 else f"layers {run[0]} to {run[-1]}")
    return ", ".join([*named, *(_OUTSIDE[part] for part in ("norm", "head") if placed.of(part) == card)])

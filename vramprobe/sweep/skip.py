"""Skip: when a cell would certainly run out of memory, so that nobody pays to see it; the evidence, as an outcome.

In: a spec, out-of-memory records of the same card, a prediction. Out: a Skipped outcome that names what it rests on, or
None. Only two things are evidence: an observed OOM of a cell that is no larger in any way, and a predicted lower bound
above the whole card. Whether a skip is wanted at all is the plan's to say. Never imports torch.
"""

from collections.abc import Iterable

from vramprobe import catalog
from vramprobe.errors import SpecError
from vramprobe.optimizers import OPTIMIZERS
from vramprobe.options import RANK_OPTIONS
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.verdict import usable_bytes
from vramprobe.records.outcomes import Oom, Skipped
from vramprobe.records.record import RunRecord
from vramprobe.records.table import describe_outcome
from vramprobe.spec import CellSpec
from vramprobe.sweep.card import Card, card_bytes
from vramprobe.units import format_bytes

#: More of one of these never takes less memory, all else equal.
_GROWING = ("batch_size", "seq_len", "lora_r")
#: These do not change memory: names, the number of steps, values.
_WITHOUT_EFFECT = ("model", "num_layers", "steps", "timing_steps", "seed", "lora_alpha")
#: All that decides the peak while the weights are made, apart from the architecture.
_OF_LOADING = ("weights", "trust_remote_code", "quant", "dtype", "device", "alloc_conf", "limit_vram", *RANK_OPTIONS)
#: With so many layers, what checkpointing keeps and makes again is less than what all layers would save.
_LAYERS_THAT_CHECKPOINTING_PAYS = 4
_COMPARED = frozenset(CellSpec.model_fields) - {"architecture", "gradient_checkpointing", *_GROWING, *_WITHOUT_EFFECT}


def certain_oom(
    spec: CellSpec, ooms: Iterable[RunRecord], prediction: Prediction | None, card: Card | None
) -> Skipped | None:
    """The outcome of not running ``spec``, or None where it might fit. ``ooms`` must come from the same ``card``."""
    total_bytes = card_bytes(spec, card)
    room_bytes = usable_bytes(card.of(spec), device_is_known=False) if card else None
    for record in ooms:
        if _filled(record, room_bytes) and (how := dominates(spec, record)) is not None:
            evidence = f"{record.cell_id} ran out of memory {describe_outcome(record.outcome)}; this cell has {how}"
            return Skipped(why="dominated", evidence=evidence, evidence_attempt_id=record.attempt_id)
    if prediction is None or total_bytes is None or (prediction.engine == "near" and not spec.is_sharded):
        return None  # what is near one recorded shape is no lower bound
    if (low := lower_bound_bytes(prediction)) > total_bytes:
        evidence = f"predicted to need at least {format_bytes(low)}; the card has {format_bytes(total_bytes)}"
        return Skipped(why="predicted", evidence=evidence)
    return None


def _filled(oom: RunRecord, room_bytes: int | None) -> bool:
    """Return True if the cell itself filled the card beside the driver and its context; else another process did."""
    outcome = oom.outcome
    assert isinstance(outcome, Oom)
    held_bytes = outcome.reserved_bytes if outcome.reserved_bytes is not None else outcome.allocated_bytes
    if held_bytes is None or outcome.requested_bytes is None:
        return False
    return room_bytes is None or held_bytes + outcome.requested_bytes >= room_bytes


def lower_bound_bytes(prediction: Prediction) -> int:
    """The least that the cell needs of a card: its tensors and, where a fit knows it, what sits behind torch.

    Not the predicted reserved memory: short of room the allocator gives its cached blocks back.
    """
    low = prediction.peak_allocated_bytes.low
    if prediction.device_bytes is not None and prediction.reserved_bytes is not None:
        low += max(prediction.device_bytes.low - prediction.reserved_bytes.low, 0)
    return low


def dominates(spec: CellSpec, oom: RunRecord) -> str | None:
    """Return in words why ``spec`` needs at least as much as the cell of ``oom``; None where that does not follow."""
    assert isinstance(oom.outcome, Oom)
    smaller = oom.spec
    deeper = _at_least_as_deep(spec, smaller)
    if deeper is None:
        return None
    if oom.outcome.phase == "load":
        same = all(getattr(spec, name) == getattr(smaller, name) for name in _OF_LOADING)
        return f"the same weights to load{deeper}" if same else None
    if any(getattr(spec, name) != getattr(smaller, name) for name in _COMPARED):
        return None
    grown, is_8bit = [], OPTIMIZERS[spec.optim].state == "8bit"
    for name in _GROWING:
        here, there = getattr(spec, name), getattr(smaller, name)
        if here != there:
            if here is None or there is None or here < there or (name == "lora_r" and is_8bit):
                return None  # 8-bit optimizers keep small tensors' state in fp32: a higher rank may need less
            grown.append(f"{name} {here} ≥ {there}")
    if spec.gradient_checkpointing != smaller.gradient_checkpointing:
        # int8: bitsandbytes keeps each layer's input in any case, so that checkpointing saves little or nothing.
        depth = catalog.depth_of(smaller.architecture) or 0
        if spec.gradient_checkpointing or spec.quant == "int8" or depth < _LAYERS_THAT_CHECKPOINTING_PAYS:
            return None
        grown.append("no gradient checkpointing")
    return (", ".join(grown) or "the same sizes") + deeper


def _at_least_as_deep(spec: CellSpec, smaller: CellSpec) -> str | None:
    """Empty for the same architecture, words where ``smaller`` is a depth cut of it, None where neither holds."""
    if spec.architecture == smaller.architecture:
        return ""
    here, there = catalog.depth_of(spec.architecture), catalog.depth_of(smaller.architecture)
    if spec.model_type != smaller.model_type or here is None or there is None or here <= there:
        return None
    try:
        cut = catalog.cut_depth(spec.architecture, there)
    except SpecError:
        return None
    return f", {here} layers ≥ {there}" if cut == smaller.architecture else None

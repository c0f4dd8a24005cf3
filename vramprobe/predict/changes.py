"""Changes: a cell -> what one other option would save, and whether it fits then; if none is enough, several together.

In: a cell's words and what predicts them. Out: Changes, those that are together enough first, then each by itself, the
one that saves most first. What is tried is the registry of techniques, and what a cell has by default.
"""

from collections.abc import Callable
from typing import Any, Literal

from vramprobe.architecture.images import parse_image_size
from vramprobe.catalog import Gpu
from vramprobe.errors import VramprobeError
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.verdict import verdict
from vramprobe.records.frozen import FrozenModel
from vramprobe.rules.sharding import ONE_GROUP
from vramprobe.spec import CellSpec
from vramprobe.techniques.registry import known_changes
from vramprobe.trainers import USUAL_LOOP

#: A cell's options that differ from what they are: the words of resolve.option_names(), num_gpus and sharding.
Options = dict[str, Any]
#: A saving below this share of what is needed is not worth a line.
LEAST_SHARE = 0.005


class Change(FrozenModel):
    """Other options, and the memory that is held against a GPU before and after; ``verdict`` is null without a GPU."""

    options: Options
    from_bytes: int
    to_bytes: int
    saved_bytes: int
    tight_bytes: int | None = None  # allocated, where only that fits and cached blocks go back
    verdict: Literal["fits", "tight", "does not fit"] | None
    trl: str = ""  # the same on TRL's command line; "" where it has no words for it
    slower_share: float | None = None  # by which a token takes longer; predicted, null where that is not known


def candidates(spec: CellSpec) -> list[Options]:
    """Options to try, the mildest first: of the step, of precision, of what is trained, less work; of several GPUs more
    of them, and other shardings.
    """
    found: list[Options] = [{"attn": "sdpa"}, {"optim": "adamw_torch_fused"}, *_others(spec, False)]
    found += [{"dtype": "bf16"}, {"autocast": "bf16"}]
    found += [{"loop": USUAL_LOOP}] if spec.loop != USUAL_LOOP else []
    if spec.method != "full":
        found += [{"lora_dtype": "bf16"}, {"kbit_prep": "none"}, {"lora_dropout": 0.0}, {"dora": False}]
    found += _others(spec, True)
    for name, value in (("batch_size", spec.batch_size), ("seq_len", spec.seq_len)):
        if value > 1:
            found += [{name: value // 2}]
    if spec.num_gpus > 1:
        found += [{"num_gpus": times * spec.num_gpus} for times in (2, 4, 8)]
        found += [{"sharding": kind} for kind in ONE_GROUP]
    return [one for one in found if any(getattr(spec, name) != value for name, value in one.items())]


def smaller_images(spec: CellSpec) -> list[Options]:
    """Images of half the width and height."""
    if not spec.images or spec.image_size is None:
        return []
    width, height = parse_image_size(spec.image_size)
    return [{"image_size": f"{max(width // 2, 1)}x{max(height // 2, 1)}"}]


def _others(spec: CellSpec, of_model: bool) -> list[Options]:
    """The techniques that ``spec`` has not, in the options in which it differs."""
    found: list[Options] = []
    for change in known_changes(of_model):
        other = {name: value for name, value in change.items() if getattr(spec, name) != value}
        if len(other) > 0:
            found += [other]
    return found


def what_would_save(
    now: Prediction, found: list[Options], predicted: Callable[[Options], Prediction], gpu: Gpu | None
) -> list[Change]:
    """Those of ``found`` that save; before them several together, where none by itself makes the cell fit ``gpu``.

    ``predicted`` gives what is predicted with other options, or raises VramprobeError where they cannot be.
    """
    needed = _needed_bytes(now)

    def tried(options: Options) -> Change | None:
        try:
            other = predicted(options)
        except VramprobeError:
            return None  # what cannot be predicted is no advice
        to_bytes = _needed_bytes(other)
        judged = verdict(other, gpu) if gpu else None
        return Change(
            options=options,
            from_bytes=needed,
            to_bytes=to_bytes,
            saved_bytes=needed - to_bytes,
            tight_bytes=other.peak_allocated_bytes.value
            if judged and judged.usable_bytes < to_bytes and judged.verdict == "tight"
            else None,
            verdict=judged.verdict if judged else None,
        )

    each = [one for options in found if (one := tried(options)) and _saves(one, needed)]
    is_wanted = gpu is not None and verdict(now, gpu).verdict != "fits" and not any(map(_fits, each))
    several = _together(each, needed, tried) if is_wanted else None
    first = [several] if several is not None and len(several.options) > 1 else []
    return [*first, *sorted(each, key=lambda one: one.to_bytes)]


def _together(each: list[Change], needed: int, tried: Callable[[Options], Change | None]) -> Change | None:
    """One change after the other, the mildest first, each kept if it saves beside those before, until it fits; then
    each that is not needed for it goes, the harshest first.
    """
    kept: Change | None = None
    for one in each:
        more = tried((kept.options if kept else {}) | one.options)
        if more and _saves(more, kept.to_bytes if kept else needed):
            kept = more
        if kept and _fits(kept):
            break
    if kept is None or not _fits(kept):
        return kept
    for name in reversed(list(kept.options)):
        fewer = tried({other: value for other, value in kept.options.items() if other != name})
        if fewer and _fits(fewer):
            kept = fewer
    return kept


def _saves(one: Change, before: int) -> bool:
    return one.to_bytes < (1 - LEAST_SHARE) * before


def _fits(one: Change) -> bool:
    return one.verdict == "fits"


def _needed_bytes(prediction: Prediction) -> int:
    """Bytes on which a verdict rests: the device tier, or the nearest to it that is known."""
    return (prediction.device_bytes or prediction.reserved_bytes or prediction.peak_allocated_bytes).value

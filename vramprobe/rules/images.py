"""The rules of a cell with images: which models have them, and what goes with them.

In: a cell. Out: a reason for each rule that it breaks.
"""

from vramprobe.architecture.images import has_images, image_of, parse_image_size
from vramprobe.errors import SpecError
from vramprobe.rules import Cell

#: Tokens of text that surround each image: its start and its end.
BESIDE_AN_IMAGE = 2


def reasons_against_images(spec: Cell) -> list[str]:
    """Return the reasons why this combination of image options cannot run; empty when it can."""
    if not has_images(spec.architecture):
        without = f"{spec.model} has no vision tower"
        return [
            f"{name} was given, but {without}; leave it out, or use a vision-language model such as qwen2.5-vl-7b"
            for name in ("images", "image_size", "freeze_vision")
            if getattr(spec, name)
        ]
    rules = [
        (spec.image_size is not None and not spec.images, "image_size is that of images; add images, or leave it out"),
        (spec.sharding is not None, f"{spec.model} has a vision tower, which is run on one GPU; leave sharding out"),
        (
            spec.trainer != "sft",
            f"trainer {spec.trainer} is of text alone here, and {spec.model} has a vision tower; leave trainer out",
        ),
        (spec.torch_compile, f"{spec.model} has a vision tower, which is not run compiled; leave torch_compile out"),
        (
            spec.images > 1 and spec.model_type == "llava_onevision",
            f"images {spec.images}: of {spec.model} one image to a row is known, cut into tiles; use 1",
        ),
        (
            spec.seq_len < BESIDE_AN_IMAGE * spec.images,
            f"seq_len {spec.seq_len} is the text alone, which has {BESIDE_AN_IMAGE} tokens beside each of "
            f"{spec.images} images; use at least {BESIDE_AN_IMAGE * spec.images}",
        ),
    ]
    return [reason for broken, reason in rules if broken] + _against_size(spec)


def _against_size(spec: Cell) -> list[str]:
    if not spec.images:
        return []
    if spec.image_size is None:
        return ["images have a size: give image_size, such as 640x480"]
    try:
        image_of(spec.architecture, *parse_image_size(spec.image_size))
    except SpecError as error:
        return [str(error)]
    return []

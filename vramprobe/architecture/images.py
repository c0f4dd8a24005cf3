"""Images: what a vision-language model's processor makes of an image of a given size, by arithmetic.

In: a config.json as a dict, an image's width and height in pixels. Out: a frozen Image: the tiles that enter the vision
tower, and the tokens of the text that they replace. The rules are those of the processors of transformers 5.23
(``image_processing_qwen2_vl.py``, ``image_processing_idefics3.py``, ``image_processing_gemma3.py``,
``image_processing_llama4.py``, ``image_processing_gemma4.py``, ``image_processing_got_ocr2.py`` for InternVL,
``processing_llava_onevision.py``, ``processing_llava_next.py``, ``image_processing_pixtral.py`` for Pixtral and Mistral
3, ``image_processing_idefics2.py``, ``image_processing_mllama.py``) with the settings that each family publishes. It
never asks transformers.
"""

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from vramprobe.errors import SpecError

DEFAULT_IMAGE_SIZE = "640x480"  # the usual size in COCO, which most of the public instruction sets with images use
DEFAULT_VIDEO_SIZE = "16x640x480"
MAX_IMAGE_SIDE, MAX_VIDEO_FRAMES = 16384, 4096
#: Pixels of an image, at least and at most, after it is resized (each family's preprocessor_config.json).
_QWEN2_PIXELS, _QWEN3_PIXELS = (3136, 12845056), (65536, 16777216)
#: Longest side after the first resize, in tiles; and what no image exceeds (``MAX_IMAGE_SIZE``).
_TILES_PER_SIDE, _LONGEST_SIDE = 4, 4096
_MOST_TILES = 16  # of an image of Llama 4's
_MOST_CROPS = 12  # of an image of InternVL's, without the whole image
_IDEFICS2_SIDES = (378, 980)  # pixels, at least and at most
_MOST_VIEWS = 6  # tiles along a side of an image of LLaVA-OneVision's


@dataclass(frozen=True)
class Image:
    """One image as it enters the tower: ``num_tiles`` tiles of ``height`` × ``width`` pixels; and its tokens, of which
    ``num_marks`` stand between features."""

    num_tiles: int
    height: int
    width: int
    num_tokens: int
    num_marks: int = 0


def parse_image_size(text: str) -> tuple[int, int]:
    """``WIDTHxHEIGHT`` in pixels. Raises SpecError."""
    found = re.fullmatch(r"(\d{1,5})\s*[x×]\s*(\d{1,5})", text.strip(), re.I)
    width, height = (int(found[1]), int(found[2])) if found else (0, 0)
    if not 1 <= min(width, height) <= max(width, height) <= MAX_IMAGE_SIDE:
        raise SpecError(
            f"--image-size {text}: give WIDTHxHEIGHT in pixels, 1 to {MAX_IMAGE_SIDE} each, "
            f"such as {DEFAULT_IMAGE_SIZE}"
        )
    return width, height


def parse_video_size(text: str) -> tuple[int, int, int]:
    """``FRAMESxWIDTHxHEIGHT`` → all three. Raises SpecError."""
    found = re.fullmatch(r"(\d{1,4})\s*[x×]\s*(\d{1,5})\s*[x×]\s*(\d{1,5})", text.strip(), re.I)
    frames, width, height = (int(part) for part in found.groups()) if found else (0, 0, 0)
    if not (1 <= frames <= MAX_VIDEO_FRAMES and 1 <= min(width, height) <= max(width, height) <= MAX_IMAGE_SIDE):
        raise SpecError(
            f"--video-size {text}: give FRAMESxWIDTHxHEIGHT, 1 to {MAX_VIDEO_FRAMES} frames of 1 to {MAX_IMAGE_SIDE} "
            f"pixels each way, such as {DEFAULT_VIDEO_SIZE}"
        )
    return frames, width, height


def image_of(config: Mapping[str, Any], width: int, height: int) -> Image:
    """An image of that size for this model. Raises SpecError for a family without images here, or a size that its
    processor refuses."""
    rule = _RULES.get(config["model_type"])
    if rule is None or not has_images(config):
        raise SpecError(f"images are known for {', '.join(_RULES)}, and this model is {config['model_type']}")
    return rule(config, width, height)


def has_images(config: Mapping[str, Any]) -> bool:
    """Return True for the config of a model with a vision tower."""
    return isinstance(config.get("vision_config"), Mapping)


def knows_images(config: Mapping[str, Any]) -> bool:
    """Return True if :func:`image_of` counts its images."""
    return has_images(config) and config["model_type"] in _RULES


def _qwen(config: Mapping[str, Any], width: int, height: int, *, patch: int, pixels: tuple[int, int]) -> Image:
    """``smart_resize``: both sides a multiple of a token's, their product within ``pixels``."""
    if max(height, width) > 200 * min(height, width):
        raise SpecError(f"an image of {width} × {height} pixels: Qwen's processor refuses sides beyond 200 to 1")
    merge = config["vision_config"].get("spatial_merge_size", 2)
    side = config["vision_config"].get("patch_size", patch) * merge
    least, most = pixels
    rows, columns = round(height / side), round(width / side)
    if rows * columns * side**2 > most:
        shrink = math.sqrt(height * width / most)
        rows, columns = (max(1, math.floor(length / shrink / side)) for length in (height, width))
    elif rows * columns * side**2 < least:
        grow = math.sqrt(least / (height * width))
        rows, columns = (math.ceil(length * grow / side) for length in (height, width))
    return Image(1, rows * side, columns * side, rows * columns)


def _qwen2(config: Mapping[str, Any], width: int, height: int) -> Image:
    return _qwen(config, width, height, patch=14, pixels=_QWEN2_PIXELS)


def _qwen3(config: Mapping[str, Any], width: int, height: int) -> Image:
    return _qwen(config, width, height, patch=16, pixels=_QWEN3_PIXELS)


def _gemma3(config: Mapping[str, Any], width: int, height: int) -> Image:
    """Every image the same: pan and scan is off, as it is published."""
    side = config["vision_config"].get("image_size", 224)
    return Image(1, side, side, config.get("mm_tokens_per_image", 256))


def _tiled(config: Mapping[str, Any], width: int, height: int) -> Image:
    """Enlarged to four tiles' length, cut into tiles, with the whole image as one more where there are several."""
    vision = config["vision_config"]
    tile, patch = vision.get("image_size", 224), vision.get("patch_size", 32)
    wide, high = _longest(width, height, _TILES_PER_SIDE * tile, even=True)
    if max(wide, high) > _LONGEST_SIDE:
        wide, high = _longest(wide, high, _LONGEST_SIDE)
    columns, rows = _in_tiles(wide, high, tile)
    num_tiles = rows * columns + 1 if max(rows, columns) > 1 else 1
    return Image(num_tiles, tile, tile, num_tiles * (tile // patch) ** 2 // config.get("scale_factor", 2) ** 2)


def _longest(width: int, height: int, longest: int, *, even: bool = False) -> tuple[int, int]:
    """Both sides where the longer one becomes ``longest``; the shorter one rounded down, then up to an even number."""
    ratio = width / height
    shorter = int(longest / ratio) if width >= height else int(longest * ratio)
    shorter = max(shorter + shorter % 2 if even else shorter, 1)
    return (longest, shorter) if width >= height else (shorter, longest)


def _in_tiles(width: int, height: int, tile: int) -> tuple[int, int]:
    """Columns and rows: the longer side rounded up to whole tiles, then the other one in its proportion."""
    ratio = width / height
    if width >= height:
        columns = math.ceil(width / tile)
        return columns, math.ceil(int(columns * tile / ratio) / tile)
    rows = math.ceil(height / tile)
    return math.ceil(int(rows * tile * ratio) / tile), rows


def _llama4(config: Mapping[str, Any], width: int, height: int) -> Image:
    """Cut into at most 16 tiles, in the shape that enlarges it least, or else shrinks it least, and of those the
    smallest; with the whole image as one more where there are several. Marks between tiles are not counted."""
    vision = config["vision_config"]
    tile, patch = vision.get("image_size", 448), vision.get("patch_size", 14)
    shapes = [
        (rows, most // rows) for most in range(1, _MOST_TILES + 1) for rows in range(1, most + 1) if most % rows == 0
    ]
    scales = {shape: min(shape[0] * tile / height, shape[1] * tile / width) for shape in shapes}
    enlarging = [scale for scale in scales.values() if scale >= 1]
    scale = min(enlarging) if enlarging else max(scales.values())
    rows, columns = min((shape for shape in shapes if scales[shape] == scale), key=math.prod)
    num_tiles = rows * columns + 1 if rows * columns > 1 else 1
    ratio = vision.get("pixel_shuffle_ratio", 0.5)
    return Image(num_tiles, tile, tile, num_tiles * int((tile // patch) ** 2 * ratio**2))


def _gemma4(config: Mapping[str, Any], width: int, height: int) -> Image:
    """The largest size of the same shape whose tokens are at most those of the config; sides whole tokens."""
    vision = config["vision_config"]
    side = vision.get("patch_size", 16) * vision.get("pooling_kernel_size", 3)
    most = config.get("vision_soft_tokens_per_image", 280)
    scale = math.sqrt(most * side**2 / (height * width))
    rows, columns = math.floor(scale * height / side), math.floor(scale * width / side)
    if not rows and not columns:
        raise SpecError(f"an image of {width} × {height} pixels: Gemma 4's processor makes nothing of it")
    if not rows:
        rows, columns = 1, min(width // height, most)
    elif not columns:
        rows, columns = min(height // width, most), 1
    return Image(1, rows * side, columns * side, rows * columns)


def _internvl(config: Mapping[str, Any], width: int, height: int) -> Image:
    """Cut into at most 12 tiles in the shape nearest to its own, with the whole image as one more where there are
    several; of shapes as near, the largest that has less than twice the image's pixels."""
    tile = config["vision_config"].get("image_size", 448)
    tile = tile[0] if isinstance(tile, list | tuple) else tile
    sides = range(1, _MOST_CROPS + 1)
    shapes = sorted(
        ((wide, high) for wide in sides for high in sides if wide * high <= _MOST_CROPS),
        key=lambda shape: math.prod(shape),
    )
    nearest, best = math.inf, (1, 1)
    for wide, high in shapes:
        off = abs(width / height - wide / high)
        if off < nearest or (off == nearest and 2 * width * height > tile**2 * wide * high):
            nearest, best = off, (wide, high)
    num_tiles = math.prod(best) + (math.prod(best) > 1)
    return Image(num_tiles, tile, tile, num_tiles * config.get("image_seq_length", 256))


def _llava_onevision(config: Mapping[str, Any], width: int, height: int) -> Image:
    """As LLaVA-NeXT's, of any grid; features shrunk to nine tiles' where they are more."""
    sides = range(1, _MOST_VIEWS + 1)
    most = int(str(config.get("vision_aspect_ratio", "anyres_max_9")).removeprefix("anyres_max_"))
    return _in_grid(
        config, width, height, tile=384, grids=[(rows, columns) for rows in sides for columns in sides], most=most
    )


def _llava_next(config: Mapping[str, Any], width: int, height: int) -> Image:
    tile = config["vision_config"].get("image_size", 336)
    grids = [(high // tile, wide // tile) for high, wide in config["image_grid_pinpoints"]]
    return _in_grid(config, width, height, tile=336, grids=grids, most=None)


def _in_grid(
    config: Mapping[str, Any], width: int, height: int, *, tile: int, grids: Sequence[tuple[int, int]], most: int | None
) -> Image:
    """The whole image as one tile, and tiles of the grid that keeps most of it; of their features those that show the
    image, at most ``most`` tiles', with one more for each row."""
    vision = config["vision_config"]
    tile = vision.get("image_size", tile)
    side = tile // vision.get("patch_size", 14)
    rows, columns = _best_grid(tile, width, height, grids)
    high, wide = side * rows, side * columns
    if width / height > wide / high:
        high -= (high - int(round(height * (wide / width), 7))) // 2 * 2
    else:
        wide -= (wide - int(round(width * (high / height), 7))) // 2 * 2
    ratio = math.sqrt(high * wide / (most * side**2)) if most else 1.0
    if ratio > 1.1:
        high, wide = int(high // ratio), int(wide // ratio)
    return Image(1 + rows * columns, tile, tile, side**2 + high * wide + high)


def _best_grid(tile: int, width: int, height: int, grids: Sequence[tuple[int, int]]) -> tuple[int, int]:
    """Rows and columns of tiles: most pixels of the image, then least left over (``select_best_resolution``)."""
    best, most, least = (1, 1), 0, math.inf
    for rows, columns in grids:
        scale = min(columns * tile / width, rows * tile / height)
        kept = min(int(width * scale) * int(height * scale), width * height)
        left = rows * columns * tile**2 - kept
        if kept > most or (kept == most and left < least):
            best, most, least = (rows, columns), kept, left
    return best


def _llava(config: Mapping[str, Any], width: int, height: int) -> Image:
    """Every image the same, or with Pixtral's tower as Mistral 3's."""
    if config["vision_config"].get("model_type") == "pixtral":
        return _pixtral(config, width, height)
    side = config["vision_config"].get("image_size", 336)
    return Image(1, side, side, config.get("image_seq_length", 576))


def _pixtral(config: Mapping[str, Any], width: int, height: int) -> Image:
    """Shrunk to the tower's size where it is larger; sides rounded up to whole tokens, a mark after each row."""
    vision = config["vision_config"]
    side = vision.get("patch_size", 16) * config.get("spatial_merge_size", 1)
    ratio = max(1.0, max(width, height) / vision.get("image_size", 1024))
    if ratio > 1:
        width, height = math.floor(width / ratio), math.floor(height / ratio)
    rows, columns = (height - 1) // side + 1, (width - 1) // side + 1
    return Image(1, rows * side, columns * side, rows * (columns + 1), rows)


def _paligemma(config: Mapping[str, Any], width: int, height: int) -> Image:
    """Every image the same."""
    side, patch = (config["vision_config"].get(name, own) for name, own in (("image_size", 224), ("patch_size", 14)))
    return Image(1, side, side, (side // patch) ** 2)


def _mllama(config: Mapping[str, Any], width: int, height: int) -> Image:
    """Four tiles, padding where it has fewer; one token, whose place cross-attention reads."""
    vision = config["vision_config"]
    return Image(vision.get("max_num_tiles", 4), vision.get("image_size", 448), vision.get("image_size", 448), 1)


def _idefics2(config: Mapping[str, Any], width: int, height: int) -> Image:
    """Its quarters and the whole image, each within 378 and 980 pixels, padded to the largest."""
    least, most = _IDEFICS2_SIDES
    sides = []
    for high, wide in ((height, width), *(((height // 2), (width // 2)),) * 4):
        ratio = wide / high
        if wide >= high and wide > most:
            wide, high = most, int(most / ratio)
        elif high > wide and high > most:
            high, wide = most, int(most * ratio)
        sides.append((max(high, least), max(wide, least)))
    latents = (config.get("perceiver_config") or {}).get("resampler_n_latents", 64)
    return Image(len(sides), max(high for high, _ in sides), max(wide for _, wide in sides), len(sides) * latents)


_RULES: dict[str, Callable[[Mapping[str, Any], int, int], Image]] = {
    "qwen2_vl": _qwen2,
    "qwen2_5_vl": _qwen2,
    "qwen3_vl": _qwen3,
    "qwen3_vl_moe": _qwen3,
    "qwen3_5": _qwen3,
    "qwen3_5_moe": _qwen3,
    "gemma3": _gemma3,
    "idefics3": _tiled,
    "smolvlm": _tiled,
    "llama4": _llama4,
    "gemma4": _gemma4,
    "gemma4_unified": _gemma4,
    "internvl": _internvl,
    "llava_onevision": _llava_onevision,
    "llava_next": _llava_next,
    "llava": _llava,
    "mistral3": _pixtral,
    "paligemma": _paligemma,
    "mllama": _mllama,
    "idefics2": _idefics2,
}

"""A cell's images: what a collator would hand to the model beside the tokens, and which modules see them.

In: a cell, tokens on its device. Out: the tokens with placeholders where the images' features go, and the tensors that
the family's processor makes of images of that size. Values are random: memory does not depend on them.
"""

from typing import Any

import torch
from torch import nn

from vramprobe.architecture.images import parse_image_size
from vramprobe.spec import CellSpec

#: The modules between pixels and the language model's embeddings, by their families' names.
VISION_MODULES = frozenset(
    {"visual", "vision_tower", "vision_model", "multi_modal_projector", "connector", "embed_vision"}
)


def is_vision(module_name: str) -> bool:
    """Return True if a module or parameter of this name is in a vision tower or its projector."""
    return not VISION_MODULES.isdisjoint(module_name.split("."))


def vision_pattern() -> str:
    """Regular expression of the vision tower's and projector's modules, for peft's ``exclude_modules``."""
    return rf"(.*\.)?({'|'.join(sorted(VISION_MODULES))})(\..*)?"


def freeze_vision(model: nn.Module) -> None:
    """Train none of their parameters."""
    for name, parameter in model.named_parameters():
        if is_vision(name):
            parameter.requires_grad_(False)


def text_tokens(spec: CellSpec, vocab_size: int) -> int:
    """Number of tokens of the vocabulary used as text: with images its first half, which holds no image tokens."""
    return vocab_size // 2 if spec.images else vocab_size


def add_images(spec: CellSpec, config: Any, batch: dict[str, torch.Tensor]) -> None:
    """Put placeholders into the batch's tokens, each image's between two equal parts of text, and add its pixels."""
    image = spec.image
    assert image is not None
    token = getattr(config, "image_token_id", None) or config.image_token_index
    for number in range(spec.images):
        start = (number + 1) * spec.seq_len // (spec.images + 1) + number * image.num_tokens
        batch["input_ids"][:, start : start + image.num_tokens - image.num_marks] = token
    kinds = (batch["input_ids"] == token).long()
    num_images, device = spec.batch_size * spec.images, spec.device
    vision = config.vision_config
    match spec.model_type:
        case "qwen2_vl" | "qwen2_5_vl" | "qwen3_vl" | "qwen3_vl_moe" | "qwen3_5" | "qwen3_5_moe":
            rows, columns = image.height // vision.patch_size, image.width // vision.patch_size
            width = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
            batch["mm_token_type_ids"] = kinds
            batch["image_grid_thw"] = torch.ones(num_images, 3, dtype=torch.int64, device=device)
            batch["image_grid_thw"][:, 1], batch["image_grid_thw"][:, 2] = rows, columns
            batch["pixel_values"] = torch.rand(num_images * rows * columns, width, device=device)
        case "gemma4" | "gemma4_unified":
            batch["mm_token_type_ids"] = kinds
            batch |= _patches_of_gemma4(spec, config, num_images)
        case "internvl" | "llava" | "mistral3" | "paligemma":
            size = (num_images * image.num_tiles, vision.num_channels, image.height, image.width)
            batch["pixel_values"] = torch.rand(*size, device=device)
            if vision.model_type == "pixtral":
                batch["image_sizes"] = torch.tensor([[image.height, image.width]] * num_images, device=device)
            if spec.model_type == "paligemma":  # 1: the answer, which reads backward alone
                batch["token_type_ids"] = 1 - kinds
        case "mllama":
            batch |= _tiles_of_mllama(spec, vision)
        case "llava_onevision" | "llava_next":
            width, height = parse_image_size(spec.image_size)
            tiles = (num_images, image.num_tiles, vision.num_channels, image.height, image.width)
            batch["pixel_values"] = torch.rand(*tiles, device=device)
            batch["image_sizes"] = torch.tensor([[height, width]] * num_images, device=device)
            if spec.model_type == "llava_onevision":
                batch["batch_num_images"] = torch.ones(spec.batch_size, dtype=torch.int64, device=device)
        case "gemma3":
            batch["token_type_ids"] = kinds
            batch["pixel_values"] = torch.rand(
                num_images, vision.num_channels, image.height, image.width, device=device
            )
        case "llama4":  # normalized in bfloat16, all images' tiles in one row
            size = (num_images * image.num_tiles, vision.num_channels, image.height, image.width)
            batch["pixel_values"] = torch.rand(*size, dtype=torch.bfloat16, device=device)
        case _:
            tiles = (spec.batch_size, spec.images * image.num_tiles)
            size = (image.height, image.width)
            batch["pixel_values"] = torch.rand(*tiles, vision.num_channels, *size, device=device)
            batch["pixel_attention_mask"] = torch.ones(*tiles, *size, dtype=torch.int64, device=device)


def _patches_of_gemma4(spec: CellSpec, config: Any, num_images: int) -> dict[str, torch.Tensor]:
    """Patches of each image, padded to as many as an image may have, and their columns and rows, -1 for padding."""
    image, vision = spec.image, config.vision_config
    side, merged = vision.patch_size, vision.pooling_kernel_size
    most = getattr(config, "vision_soft_tokens_per_image", 280)
    if spec.model_type == "gemma4_unified":  # its processor merges the patches of a token, gemma4's model does
        side *= merged
    else:
        most *= merged**2
    rows, columns = image.height // side, image.width // side
    places = torch.full((num_images, most, 2), -1, dtype=torch.int64, device=spec.device)
    places[:, : rows * columns, 0] = torch.arange(columns, device=spec.device).repeat(rows)
    places[:, : rows * columns, 1] = torch.arange(rows, device=spec.device).repeat_interleave(columns)
    pixels = torch.rand(num_images, most, 3 * side**2, device=spec.device)
    return {"pixel_values": pixels, "image_position_ids": places}


def _tiles_of_mllama(spec: CellSpec, vision: Any) -> dict[str, torch.Tensor]:
    """All tiles of each image, and the masks that show every tile to every token."""
    image, shown = spec.image, (spec.batch_size, spec.images)
    tiles = (*shown, image.num_tiles)
    return {
        "pixel_values": torch.rand(*tiles, vision.num_channels, image.height, image.width, device=spec.device),
        "aspect_ratio_ids": torch.full(shown, vision.max_aspect_ratio_id, device=spec.device),
        "aspect_ratio_mask": torch.ones(*tiles, dtype=torch.int64, device=spec.device),
        "cross_attention_mask": torch.ones(
            spec.batch_size, spec.row_tokens, spec.images, image.num_tiles, dtype=torch.int64, device=spec.device
        ),
    }

"""Vision towers by arithmetic, against the same cells recorded on an emulated GPU."""

from __future__ import annotations

from typing import Any

import pytest
from emulated import require_emulation
from factories import make_spec
from grids import exhaustive
from vision import VISION

from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import find_gpu
from vramprobe.errors import SpecError
from vramprobe.predict import questions, recorded
from vramprobe.predict.predict import predict
from vramprobe.spec import CellSpec, checked

A100 = find_gpu("A100-80GB")
CKPT, FROZEN, LORA, QLORA = (
    {"gradient_checkpointing": True},
    {"freeze_vision": True},
    {"method": "lora"},
    {"method": "qlora"},
)
#: Wide enough for what is left out (positions, indices, kernels' scratch) to count for little.
WIDE = {
    "vision_config": {"hidden_size": 256, "intermediate_size": 512, "num_heads": 4, "out_hidden_size": 256},
    "text_config": {
        "hidden_size": 256,
        "intermediate_size": 512,
        "head_dim": 64,
        "vocab_size": 16000,
        "rope_parameters": {"rope_type": "default", "mrope_section": [8, 12, 12], "rope_theta": 10000.0},
    },
}
CELLS: list[tuple[str, dict[str, Any]]] = [
    (family, options)
    for family in ("qwen2_5_vl", "qwen3_vl")
    for options in (
        {},
        LORA,
        LORA | FROZEN,
        LORA | FROZEN | CKPT,
        QLORA,
        QLORA | CKPT,
        CKPT,
        FROZEN,
        {"batch_size": 1, "images": 1},
        {"grad_accum": 2},
    )
]


def cell(family: str, **options: Any) -> CellSpec:
    """Two rows, of two images each."""
    words = {"batch_size": 2, "seq_len": 48, "device": "cuda", "timing_steps": 0} | options
    num_images = words.pop("images", 2)
    own = {"freeze_vision": words.pop("freeze_vision", False), "images": num_images}
    own |= {"image_size": "300x200"} if num_images else {}
    config = VISION[family] | {part: VISION[family][part] | wide for part, wide in WIDE.items()}
    config |= {"image_token_id": 15998, "video_token_id": 15999}  # as high as in the published vocabularies
    return checked(CellSpec, make_spec(**words).model_dump() | own | {"architecture": config})


@exhaustive
@pytest.mark.parametrize(("family", "options"), CELLS)
def test_the_peak_is_the_recorded_one(family: str, options: dict[str, Any]) -> None:
    require_emulation()
    spec = cell(family, **options)
    found, counted = recorded.predict(spec, gpu=A100), predict(spec, gpu=A100)
    requested = [one.peak_allocated_bytes.value - one.terms.get("block_remainders", 0) for one in (found, counted)]
    assert requested[1] == pytest.approx(requested[0], rel=0.005)
    for cause in ("weights", "optimizer_state", "batch"):
        assert counted.terms[cause] == found.terms[cause], cause


def test_a_frozen_tower_saves_what_it_would_have_kept() -> None:
    trained, frozen = (predict(cell("qwen3_vl", **LORA | more), gpu=A100) for more in ({}, FROZEN))
    assert frozen.terms["saved_activations"] < trained.terms["saved_activations"] / 2
    assert frozen.terms["optimizer_state"] < trained.terms["optimizer_state"]


@pytest.mark.parametrize(
    "options", [{"attn": "eager"}, {"dtype": "fp32", "autocast": "none"}, {"device": "cpu"}, {"images": 0}]
)
def test_what_is_not_counted_is_left_to_a_recording(options: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedArchitecture, match="--engine recipe"):
        predict(cell("qwen2_5_vl", **options))


def test_a_tower_is_predicted_on_one_gpu() -> None:
    words = {"model": "qwen2.5-vl-3b", "method": "lora", "batch_size": 1, "seq_len": 64, "images": 1}
    with pytest.raises(SpecError, match="predicted on one GPU; leave sharding, num_gpus out"):
        questions.predict(sharding="fsdp", num_gpus=8, **words)
    found = questions.predict(gpu="A100-80GB", **words)
    assert (found.engine, found.peak_phase) == ("formula", "backward")

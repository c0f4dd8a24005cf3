"""A vision-language model's questions: an answer by a recording, or a refusal that says what to do."""

import json
from pathlib import Path
from typing import Any

import pytest
from emulated import require_emulation
from factories import make_spec
from grids import exhaustive
from vision import VISION

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.errors import SpecError
from vramprobe.predict.changes import smaller_images

CELL = {"model": "qwen3-vl-8b", "method": "lora", "batch_size": 1, "seq_len": 512, "images": 1}


def test_ranks_are_refused_whichever_way_they_are_asked_for() -> None:
    said = "has a vision tower, which is predicted on one GPU"
    with pytest.raises(SpecError, match=f"{said}; leave sharding, num_gpus"):
        api.predict(sharding="fsdp", num_gpus=4, **CELL)
    for question, more in ((api.min_gpus, {"sharding": "fsdp"}), (api.min_gpus_by_sharding, {})):
        with pytest.raises(UnsupportedArchitecture, match=f"{said}, so no number"):
            question(gpu="RTX-4090", **more, **CELL)


@exhaustive
@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl"])
def test_what_arithmetic_does_not_have_is_recorded(family: str, tmp_path: Path) -> None:
    require_emulation()
    file = tmp_path / f"{family}.json"
    file.write_text(json.dumps(VISION[family]))
    words: dict[str, Any] = {"model": str(file), "method": "lora", "batch_size": 2, "seq_len": 128, "images": 1}
    trained, frozen = (
        api.predict(gpu="A100-80GB", image_size="300x200", freeze_vision=is_frozen, **words)
        for is_frozen in (False, True)
    )
    assert trained.engine == frozen.engine == "recipe"
    assert frozen.terms["optimizer_state"] < trained.terms["optimizer_state"]


def test_a_smaller_image_is_among_the_changes() -> None:
    config = VISION["qwen3_vl"]
    spec = make_spec(device="cuda").model_copy(update={"architecture": config, "images": 1, "image_size": "2350x2350"})
    assert smaller_images(spec) == [{"image_size": "1175x1175"}]

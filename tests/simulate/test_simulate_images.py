"""Cells with images: simulated against real runs on the CPU, and what their rules refuse."""

from __future__ import annotations

import gc
from typing import Any

import pytest
from factories import TINY_LLAMA_PATH, make_spec
from grids import grid
from vision import VISION

from vramprobe.catalog import find_model
from vramprobe.errors import SpecError
from vramprobe.measure.worker import run_cell
from vramprobe.simulate.run import simulate
from vramprobe.spec import CellSpec, checked, resolve

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
FP32 = {"dtype": "fp32", "autocast": "none"}
LORA = {"method": "lora", "lora_r": 8}
FROZEN = {"freeze_vision": True}


def cell(family: str, **options: Any) -> CellSpec:
    words = {"batch_size": 2, "seq_len": 24, "timing_steps": 0} | options
    own = {"images": 2, "image_size": "96x64"} if words.pop("with_images", True) else {}
    own |= {"architecture": VISION[family], "freeze_vision": words.pop("freeze_vision", False)}
    return checked(CellSpec, make_spec(**words).model_dump() | own)


CELLS: list[tuple[str, dict[str, Any]]] = [
    ("qwen2_5_vl", FP32),
    ("qwen3_vl", FP32 | LORA),
    ("gemma3", FP32 | LORA | {"gradient_checkpointing": True}),
    ("smolvlm", FP32 | FROZEN),
    ("qwen2_5_vl", FP32 | LORA | FROZEN | {"padding": True}),
    ("qwen3_vl", FP32 | {"with_images": False}),
    ("llama4", LORA | {"lora_targets": "q_v", "gradient_checkpointing": True}),
    ("llama4", FROZEN),
]


@pytest.mark.parametrize(("family", "options"), grid(CELLS, CELLS[3], CELLS[4]))
def test_every_phase_is_the_measured_one(family: str, options: dict[str, Any]) -> None:
    spec = cell(family, **options)
    gc.collect()
    measured, simulated = run_cell(spec, isolation="spawn"), simulate(spec).record
    assert (measured.outcome.kind, simulated.outcome.kind) == ("ok", "ok"), (measured.outcome, simulated.outcome)
    for real, fake in zip(measured.phases, simulated.phases, strict=True):
        for moment in ("peak", "end"):
            want, got = (getattr(one, f"allocated_{moment}_bytes") for one in (real, fake))
            assert abs(want - got) <= max(4096, 0.005 * want), (real.name, real.step, moment)
    assert simulated.ledger.batch_bytes == measured.ledger.batch_bytes
    assert simulated.facts == measured.facts
    trained = cell(family, **options | {"freeze_vision": False})
    if spec.freeze_vision:
        assert simulate(trained).record.facts.num_trainable_params > simulated.facts.num_trainable_params > 0


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"images": 1}, "no vision tower"),
        ({"freeze_vision": True}, "no vision tower"),
        ({"image_size": "640x480"}, "no vision tower"),
        ({"model": "qwen2.5-vl-3b", "image_size": "640x480"}, "add images"),
        ({"model": "qwen2.5-vl-3b", "images": -1}, "must be 0 or more"),
        ({"model": "qwen2.5-vl-3b", "images": 9}, "use at least 18"),
        ({"model": "qwen2.5-vl-3b", "images": 1, "image_size": "640"}, "give WIDTHxHEIGHT in pixels"),
        ({"model": "qwen2.5-vl-3b", "images": 1, "image_size": "9000x20"}, "beyond 200 to 1"),
        ({"model": "qwen2.5-vl-3b", "images": 1, "torch_compile": True}, "not run compiled"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, Any], said: str) -> None:
    with pytest.raises(SpecError, match=said):
        resolve(
            **{"model": str(TINY_LLAMA_PATH), "method": "full", "device": "cpu", "batch_size": 1, "seq_len": 16}
            | options
        )


def test_a_cell_with_images_names_them_and_has_their_tokens() -> None:
    words = {"method": "lora", "device": "cuda", "batch_size": 1, "seq_len": 512, "images": 2}
    plain = resolve(model="Qwen/Qwen2.5-VL-7B-Instruct", **words)
    assert plain.image_size == "640x480"
    assert plain.row_tokens == 512 + 2 * 23 * 17
    assert "2x640x480" in plain.cell_id
    frozen = resolve(model="qwen2.5-vl-7b", **words, freeze_vision=True)
    assert frozen.fingerprint != plain.fingerprint
    assert find_model("qwen2.5-vl-7b").hf_id == "Qwen/Qwen2.5-VL-7B-Instruct"

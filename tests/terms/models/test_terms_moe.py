"""The arithmetic of mixtures of experts: against real runs of tiny models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from arithmetic import LORA, QLORA, SCRATCH_BYTES, against_a_real_run, cell, closed, setup_for
from factories import TINY_LLAMA
from grids import grid
from mixtures import COUNTED, FAMILIES, moe_cell
from pydantic import ValidationError

from vramprobe.architecture import MIXTURES, UnsupportedArchitecture, architecture
from vramprobe.errors import SpecError
from vramprobe.predict.predict import predict
from vramprobe.rules.arithmetic import RECORDED
from vramprobe.spec import CellSpec
from vramprobe.terms import moments
from vramprobe.terms.step.walk import walk_layers, walk_of

CKPT, FP32, MIXED = {"gradient_checkpointing": True}, {"dtype": "fp32"}, {"dtype": "fp32", "autocast": "bf16"}
EAGER, PLAIN = {"attn": "eager"}, {"autocast": "none"}


def test_every_mixture_is_counted_or_recorded() -> None:
    assert set(FAMILIES) == set(MIXTURES)
    assert {*COUNTED, *RECORDED} >= set(MIXTURES)


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - set(COUNTED)))
def test_a_step_of_one_that_is_recorded_is_not_counted(family: str) -> None:
    with pytest.raises(UnsupportedArchitecture, match=f"a step of model type {family} is not counted"):
        moments(moe_cell(family))


@pytest.mark.parametrize("family", COUNTED)
@pytest.mark.parametrize(
    "options",
    [
        {},
        CKPT,
        LORA,
        LORA | CKPT | {"grad_accum": 2},
        QLORA,
        MIXED | {"grad_accum": 3, "batch_size": 1},
        EAGER | {"seq_len": 1},
    ],
    ids=str,
)
def test_three_layers_stand_for_a_deep_model(family: str, options: dict[str, Any]) -> None:
    spec = moe_cell(family, **options)
    spec = CellSpec(**(spec.model_dump() | {"architecture": spec.architecture | {"num_hidden_layers": 9}}))
    sizes = spec.batch_size, spec.seq_len
    short, whole = walk_of(setup_for(spec)), walk_layers(closed(spec), range(9))
    assert short.saved_bytes(*sizes) == whole.saved_bytes(*sizes)
    assert short.highest(*sizes) == whole.highest(*sizes)


@pytest.mark.parametrize("batch_size", [1, 2, 7])
@pytest.mark.parametrize("seq_len", [1, 2, 64])
@pytest.mark.parametrize("options", [{}, EAGER | MIXED | {"grad_accum": 2}, LORA | CKPT], ids=str)
def test_open_sizes_are_right_at_every_size(batch_size: int, seq_len: int, options: dict[str, Any]) -> None:
    sizes = {"batch_size": batch_size, "seq_len": seq_len}
    for family in COUNTED:
        spec = moe_cell(family, **options, **sizes)
        open_walk, closed_walk = walk_of(setup_for(spec)), walk_of(closed(spec))
        assert open_walk.saved_bytes(**sizes) == closed_walk.saved_bytes(**sizes)
        assert open_walk.highest(**sizes) == closed_walk.highest(**sizes)


def test_attention_that_transformers_lacks_is_no_cell() -> None:
    with pytest.raises(ValidationError, match="has no flash_attention_2 for gpt_oss; use attn eager"):
        cell(FAMILIES["gpt_oss"], attn="flash_attention_2", device="cuda")


def test_a_prediction_says_that_experts_are_not_quantised() -> None:
    def said(family: str, **words: Any) -> list[str]:
        return [text for text in predict(moe_cell(family, **words)).warnings if "reaches only" in text]

    [text] = said("mixtral", method="qlora")
    linears, everything = 3 * (2 * 64 * 64 + 2 * 64 * 32), architecture(FAMILIES["mixtral"]).num_params
    assert text.startswith(f"nf4 reaches only {linears:,} of {everything:,} parameters")
    assert not said("mixtral", method="lora")
    assert not [text for text in predict(cell(TINY_LLAMA, method="qlora")).warnings if "reaches only" in text]


# -- against the real libraries ----------------------------------------------------------------------------------------

MEASURED: list[tuple[str, dict[str, Any]]] = [
    *[(family, FP32) for family in COUNTED],
    *[(family, FP32 | CKPT | {"batch_size": 1}) for family in COUNTED],
    *[(family, LORA | FP32 | PLAIN) for family in COUNTED],
    ("mixtral", {}),
    ("mixtral", LORA | CKPT | {"lora_dtype": "bf16", "autocast": "none", "lora_alpha": 8, "lora_r": 8}),
    ("mixtral", FP32 | EAGER | CKPT | {"optim": "adafactor"}),
    ("qwen3_moe", MIXED),
    ("qwen3_moe", QLORA | CKPT),
    ("qwen3_moe", QLORA | {"quant": "int8"}),
    ("qwen3_moe", LORA | {"lora_targets": "q_v"}),
]
#: Every family, and every kind of step.
ALWAYS = [*MEASURED[: len(COUNTED)], *MEASURED[-7::3]]


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.filterwarnings("ignore:The following .*_pattern keys did not match:RuntimeWarning")
@pytest.mark.parametrize(
    ("family", "options"), grid(MEASURED, *ALWAYS), ids=lambda value: value if isinstance(value, str) else None
)
def test_measured_ledger_to_the_byte_and_peak_within_percents(family: str, options: dict[str, Any]) -> None:
    spec = moe_cell(family, **options)
    # Each thread packs operands of its own.
    against_a_real_run(spec, scratch_bytes=SCRATCH_BYTES // 2 * (1 + torch.get_num_threads()))


def test_dora_on_experts_is_refused_before_anything_is_recorded() -> None:
    """peft raises a bare ValueError for it, so that no other engine is to be tried."""
    spec = cell(FAMILIES["qwen3_moe"], **LORA, dora=True)
    with pytest.raises(SpecError, match="peft has no DoRA on the adapter"):
        predict(spec)

"""The dense families beyond the llamas, and layers that look through a window: against real runs."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
from arithmetic import against_a_real_run, closed, setup_for
from arithmetic import cell as any_cell
from factories import TINY_LLAMA
from grids import grid

from vramprobe import catalog
from vramprobe.architecture import RELATIVES, VARIANTS, UnsupportedArchitecture, architecture
from vramprobe.errors import VramprobeError
from vramprobe.rules.arithmetic import RECORDED
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import ledger_terms, moments
from vramprobe.terms.step.walk import Walk, walk_layers, walk_of

pytestmark = pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")

H, WINDOW = 64, 16
GEMMA = TINY_LLAMA | {"head_dim": 16, "num_hidden_layers": 3, "sliding_window": 256, "pad_token_id": 0}
FAMILIES: dict[str, dict[str, Any]] = {
    "gemma2": GEMMA | {"model_type": "gemma2"},
    "gemma3_text": GEMMA | {"model_type": "gemma3_text", "sliding_window_pattern": 2},
    "phi3": TINY_LLAMA | {"model_type": "phi3", "num_hidden_layers": 3, "pad_token_id": 0},
    "olmo2": TINY_LLAMA | {"model_type": "olmo2", "num_hidden_layers": 3},
    "olmo3": TINY_LLAMA | {"model_type": "olmo3", "num_hidden_layers": 3, "sliding_window": 256, "pad_token_id": 0},
    "gemma": TINY_LLAMA | {"model_type": "gemma", "head_dim": 16, "num_hidden_layers": 3, "pad_token_id": 0},
    "granite": TINY_LLAMA | {"model_type": "granite", "num_hidden_layers": 3, "pad_token_id": 0},
    "seed_oss": TINY_LLAMA | {"model_type": "seed_oss", "head_dim": 32, "num_hidden_layers": 3},
    "hunyuan_v1_dense": TINY_LLAMA | {"model_type": "hunyuan_v1_dense", "head_dim": 16, "num_hidden_layers": 3},
    "arcee": TINY_LLAMA | {"model_type": "arcee", "num_hidden_layers": 3, "hidden_act": "relu2"},
    "ministral3": TINY_LLAMA | {"model_type": "ministral3", "head_dim": 16, "num_hidden_layers": 3, "pad_token_id": 0},
}
#: Layers that slide all, in turns, by sixes, and from the third on.
WINDOWS: dict[str, dict[str, Any]] = {
    "mistral": TINY_LLAMA | {"model_type": "mistral", "num_hidden_layers": 4},
    "phi3": FAMILIES["phi3"] | {"num_hidden_layers": 4},
    "gemma2": FAMILIES["gemma2"] | {"num_hidden_layers": 7},
    "gemma3_text": FAMILIES["gemma3_text"] | {"num_hidden_layers": 9, "sliding_window_pattern": 3},
    "gemma3_by_sixes": FAMILIES["gemma3_text"] | {"num_hidden_layers": 14, "sliding_window_pattern": 6},
    "olmo3": FAMILIES["olmo3"] | {"num_hidden_layers": 9},
    "qwen2": TINY_LLAMA
    | {"model_type": "qwen2", "num_hidden_layers": 6, "use_sliding_window": True, "max_window_layers": 2},
}
FP32 = {"dtype": "fp32", "autocast": "none"}
MIXED = {"dtype": "fp32", "autocast": "bf16"}
LORA, QLORA = {"method": "lora", "lora_r": 8}, {"method": "qlora", "lora_r": 8}
CHECKPOINTED = {"gradient_checkpointing": True}


def cell(config: dict[str, Any], **options: Any) -> CellSpec:
    """A cell of 3 × 48 tokens; eager where the family has nothing else."""
    eager = {"attn": "eager"} if config["model_type"] == "gemma2" else {}
    return any_cell(config, **({"batch_size": 3, "seq_len": 48, "timing_steps": 0} | eager | options))


# -- against real runs -------------------------------------------------------------------------------------------------

MEASURED: list[tuple[str, dict[str, Any]]] = [
    *[(family, {}) for family in FAMILIES],
    *[(family, QLORA) for family in ("gemma3_text", "olmo2", "granite", "seed_oss", "arcee")],
    *[(family, FP32 | CHECKPOINTED | LORA) for family in ("gemma2", "phi3", *VARIANTS)],
    *[(family, MIXED | {"batch_size": 1}) for family in ("gemma3_text", "phi3")],
    *[(family, MIXED | {"batch_size": 1}) for family in ("granite", "ministral3")],
    *[(family, FP32 | {"attn": "eager"}) for family in ("gemma3_text", "phi3", "olmo2", "seed_oss", "gemma")],
    ("gemma2", QLORA | {"quant": "int8"} | CHECKPOINTED),
    ("gemma3_text", QLORA | {"kbit_prep": "trl", "lora_dtype": "bf16", "quant": "nf4-single"} | CHECKPOINTED),
    ("olmo2", QLORA | {"quant": "fp4", "autocast": "none"}),
    ("phi3", QLORA | {"quant": "int8", "grad_accum": 2}),
    ("gemma", LORA | {"lora_targets": "q_v", "lora_dropout": 0.1}),
]
#: Every third family, and every kind of step.
ALWAYS = [
    *MEASURED[: len(FAMILIES) : 3],
    ("seed_oss", QLORA),
    ("gemma2", FP32 | CHECKPOINTED | LORA),
    ("phi3", MIXED | {"batch_size": 1}),
    ("olmo2", FP32 | {"attn": "eager"}),
    *MEASURED[-5:],
]


@pytest.mark.parametrize(
    ("family", "options"), grid(MEASURED, *ALWAYS), ids=lambda value: value if isinstance(value, str) else None
)
def test_measured_ledger_to_the_byte_and_peak(family: str, options: dict[str, Any]) -> None:
    against_a_real_run(cell(FAMILIES[family], **options))


@pytest.mark.parametrize(
    ("family", "options"),
    grid(
        [
            *[(family, FP32) for family in WINDOWS],
            ("mistral", FP32 | {"seq_len": WINDOW, "batch_size": 1}),
            ("gemma2", QLORA | CHECKPOINTED),
            ("gemma3_text", QLORA | CHECKPOINTED),
            ("gemma3_by_sixes", MIXED | {"grad_accum": 2}),
            ("phi3", {"batch_size": 1}),
        ],
        ("mistral", FP32),
        ("olmo3", FP32),
        ("qwen2", FP32),
        ("mistral", FP32 | {"seq_len": WINDOW, "batch_size": 1}),
        ("gemma3_by_sixes", MIXED | {"grad_accum": 2}),
    ),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_measured_beyond_the_window(family: str, options: dict[str, Any]) -> None:
    against_a_real_run(cell(WINDOWS[family] | {"sliding_window": WINDOW}, **options))


# -- layers of several kinds -------------------------------------------------------------------------------------------


def assert_the_same(short: Walk, whole: Walk, batch_size: int, seq_len: int) -> None:
    """In every place, by cause. A checkpoint's tables are temporaries until a recomputed layer keeps them, and of two
    kinds of layers either may be the first to do so: these two causes are told together.
    """
    assert short.saved_bytes(batch_size, seq_len) == whole.saved_bytes(batch_size, seq_len)
    found, wanted = (
        {
            place: Counter(terms)
            + Counter({"temporaries": terms.get("recomputed_layer", 0)})
            - Counter({"recomputed_layer": terms.get("recomputed_layer", 0)})
            for place, terms in walk.highest(batch_size, seq_len).items()
        }
        for walk in (short, whole)
    )
    assert found == wanted


@pytest.mark.parametrize("family", WINDOWS)
@pytest.mark.parametrize("depth", [4, 14])
@pytest.mark.parametrize(
    "options", [{}, FP32 | CHECKPOINTED | {"grad_accum": 2}, QLORA | {"attn": "eager"} | CHECKPOINTED], ids=str
)
def test_one_layer_of_each_kind_stands_for_a_deep_model(family: str, depth: int, options: dict[str, Any]) -> None:
    """A few layers, walked with open sizes, against all of them walked with the cell's own, in every place."""
    spec = cell(WINDOWS[family] | {"sliding_window": WINDOW, "num_hidden_layers": depth}, **options)
    sizes = spec.batch_size, spec.seq_len
    assert_the_same(walk_of(setup_for(spec)), walk_layers(closed(spec), range(depth)), *sizes)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("options", [{}, LORA | CHECKPOINTED | {"batch_size": 1}, MIXED | {"grad_accum": 2}], ids=str)
def test_three_layers_stand_for_a_deep_model(family: str, options: dict[str, Any]) -> None:
    spec = cell(FAMILIES[family] | {"num_hidden_layers": 9, "n_layer": 9}, **options)
    sizes = spec.batch_size, spec.seq_len
    assert_the_same(walk_of(setup_for(spec)), walk_layers(closed(spec), range(9)), *sizes)


def test_a_mask_is_made_from_the_windows_own_length_on() -> None:
    config = WINDOWS["mistral"] | {"sliding_window": WINDOW}
    saved = [ledger_terms(cell(config, seq_len=length))["saved_activations"] for length in (14, 15, 16, 17)]
    assert saved[1] - saved[0] < saved[2] - saved[1] > saved[3] - saved[2]
    unmasked = WINDOWS["mistral"] | {"sliding_window": None}
    repeated = 2 * 2 * 3 * WINDOW * (H - H // 2)  # keys and values for each query head, of half as many
    bias = 2 * 3 * WINDOW**2
    extra = saved[2] - ledger_terms(cell(unmasked, seq_len=WINDOW))["saved_activations"]
    assert (
        extra == 4 * (repeated + bias) + WINDOW**2 - WINDOW**2
    )  # of four layers; the mask of bools itself is not kept


# -- what is covered ---------------------------------------------------------------------------------------------------


def test_every_family_is_tested_and_every_catalog_model_of_them_has_moments() -> None:
    assert set(FAMILIES) == {*RELATIVES, *VARIANTS} - {*RECORDED}
    for entry in catalog.list_models():
        if entry.model_type in FAMILIES:
            for method in ("full", "lora", "qlora"):
                spec = resolve(model=entry.name, method=method, device="cuda", batch_size=1, seq_len=4096)
                assert min(min(moment.terms.values()) for moment in moments(spec)) > 0


@pytest.mark.parametrize("key", ["alibi", "new_decoder_architecture", "multi_query", "parallel_attn"])
def test_other_falcons_say_what_they_are(key: str) -> None:
    other = {"alibi": True, "new_decoder_architecture": True, "multi_query": False, "parallel_attn": False}[key]
    with pytest.raises(
        UnsupportedArchitecture, match=f"falcon with {key} {str(other).lower()} has no arithmetic.*engine recipe"
    ):
        architecture({"model_type": "falcon", "num_attention_heads": 4, key: other})


@pytest.mark.parametrize(
    ("family", "options", "message"),
    [
        ("gemma3_text", {"layer_types": ["sliding_attention"]}, "layer_types .* it must be a list of 3 names"),
        ("gemma2", {"layer_types": ["full", "full", "full"]}, "each one of sliding_attention, full_attention"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "being no causal model"),
        ("phi3", {"hidden_size": 65}, "hidden_size must be a multiple of num_attention_heads"),
    ],
)
def test_wrong_configs_are_one_clear_error(family: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(VramprobeError, match=message):
        architecture(FAMILIES[family] | options)

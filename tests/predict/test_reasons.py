"""Reasons: each unexpected size is explained, with its bytes and a cure; what is expected is not."""

from pathlib import Path
from typing import Any

import pytest
from grids import exhaustive, grid

from vramprobe import api
from vramprobe.catalog import find_gpu
from vramprobe.log.log import ALL_CAUSES
from vramprobe.log.meanings import MEANINGS, PLAIN
from vramprobe.predict.reasons import reasons, without_flash
from vramprobe.resolve import resolve
from vramprobe.units import GIB, format_bytes

CELL = {"batch_size": 1, "seq_len": 2048, "gradient_checkpointing": True}
LLAMA = CELL | {"model": "llama-3.1-8b"}
EXPERTS = CELL | {"model": "qwen3-30b-a3b"}


#: A peak at which each of these parts is large enough to be explained.
PEAK = {"saved_activations": 60 * GIB, "checkpoint_store": 4 * GIB}
#: Cells, and what is said of them; the recipes of some ship, the others are recorded.
EXPLAINED = [
    (LLAMA | {"method": "qlora"}, "nf4 quantizes its scales again", "--quant nf4-single, 310.16 MiB more"),
    (LLAMA | {"method": "qlora", "quant": "int8", "batch_size": 4}, "int8 layers keep", "--quant nf4 keeps none"),
    (EXPERTS | {"method": "lora"}, "LoRA on experts: ", "768.00 MiB each; --lora-targets q_v leaves experts out"),
    (EXPERTS | {"method": "qlora"}, "nf4 reaches only", "110.37 GiB in fp32, to which PEFT's preparation raises"),
    (EXPERTS | {"method": "qlora", "kbit_prep": "trl"}, "nf4 reaches only", "55.18 GiB in bf16; Axolotl"),
    (LLAMA | {"method": "lora", "attn": "eager", "seq_len": 8192}, "attn eager holds", "4.00 GiB a copy"),
    (LLAMA | {"model": "llama-2-7b", "method": "lora", "seq_len": 8192}, "seq_len 8,192 is beyond", "the 4,096"),
]
PLAINLY = [
    LLAMA | {"method": "lora"},
    LLAMA | {"method": "qlora", "quant": "nf4-single"},
    LLAMA | {"method": "full", "seq_len": 4096},
    EXPERTS | {"method": "lora", "lora_targets": "q_v"},
    LLAMA | {"method": "lora", "attn": "eager", "seq_len": 128},
]


def notes(**words: Any) -> list[str]:
    return api.predict(gpu="H100-SXM", **words).warnings


@pytest.mark.parametrize(("words", "begins", "says"), [EXPLAINED[1], EXPLAINED[5]])
def test_a_size_that_options_do_not_show_has_a_reason(words: dict[str, Any], begins: str, says: str) -> None:
    [said] = [one for one in reasons(resolve(device="cuda", **words), PEAK) if one.startswith(begins)]
    assert says in said


@pytest.mark.parametrize(("words", "begins", "says"), grid(EXPLAINED, *(EXPLAINED[at] for at in (0, 2, 3, 6))))
def test_it_is_said_with_the_prediction(words: dict[str, Any], begins: str, says: str) -> None:
    [said] = [one for one in notes(**words) if one.startswith(begins)]
    assert says in said


def test_a_recorded_models_sizes_are_explained_too() -> None:
    words = CELL | {"model": "gpt-oss-20b", "method": "lora", "seq_len": 8192, "device": "cuda"}
    checkpoint, eager = reasons(resolve(**words), PEAK)
    assert eager.startswith("attn eager (transformers has no sdpa for gpt_oss)")
    assert "8.00 GiB a copy" in eager
    assert checkpoint.startswith("the checkpoint of gpt-oss-20b is mxfp4: counted are its weights")
    [eager] = reasons(resolve(**words | {"model": "unsloth/gpt-oss-20b-unsloth-bnb-4bit"}), PEAK)
    assert eager.startswith("attn eager")


@pytest.mark.parametrize("words", PLAINLY)
def test_what_is_expected_has_no_reason(words: dict[str, Any]) -> None:
    assert reasons(resolve(device="cuda", **words), PEAK) == []


@pytest.mark.parametrize("words", grid(PLAINLY, PLAINLY[0], PLAINLY[2]))
def test_of_what_is_expected_nothing_is_said(words: dict[str, Any]) -> None:
    starts = ("nf4", "int8", "LoRA", "attn", "the checkpoint")
    assert [one for one in notes(**words) if one.startswith(starts)] == []


@exhaustive
def test_the_bytes_that_reasons_name_are_the_predictions_own() -> None:
    two, one = (api.predict(gpu="H100-SXM", **LLAMA, method="qlora", quant=quant) for quant in ("nf4-single", "nf4"))
    more = two.terms["weights"] - one.terms["weights"]
    assert any(said.endswith(f"--quant nf4-single, {format_bytes(more)} more") for said in one.warnings)
    kept = api.predict(gpu="H100-SXM", **EXPERTS, method="qlora", kbit_prep="trl")
    raised = api.predict(gpu="H100-SXM", **EXPERTS, method="qlora")
    assert raised.terms["weights"] - kept.terms["weights"] > 55 * 2**30


def test_every_term_has_a_meaning_and_words_md_has_it() -> None:
    page = (Path(__file__).parents[2] / "docs" / "words.md").read_text(encoding="utf-8")
    terms = {*ALL_CAUSES, "gathered_weights", "gradient_buckets", "workspaces", "block_remainders", "constant", "other"}
    assert terms <= MEANINGS.keys()
    assert set(PLAIN) <= MEANINGS.keys()
    for name, meaning in MEANINGS.items():
        assert f"| `{name}` | {meaning} |" in page, name


@pytest.mark.parametrize(
    ("model", "attn", "gpu", "says"),
    [
        ("llama-3.2-1b", "sdpa", "T4", "T4 has no flash attention"),
        ("llama-3.2-1b", "eager", "T4", ""),
        ("llama-3.2-1b", "sdpa", "A10", ""),
        ("llama-3.2-1b", "sdpa", "MI300X", ""),
        ("gemma-7b", "sdpa", "L40S", ""),  # heads of 256
    ],
)
def test_a_card_without_flash_attention_is_noted(model: str, attn: str, gpu: str, says: str) -> None:
    spec = resolve(model=model, method="lora", attn=attn, device="cuda", **CELL)
    assert (" ".join(without_flash(spec, find_gpu(gpu)))).startswith(says)
    assert bool(without_flash(spec, find_gpu(gpu))) == bool(says)


@pytest.mark.parametrize(("padding", "ends"), [(False, "--padding asks for one"), (True, "as here")])
def test_a_card_without_flash_attention_says_how_a_mask_is_asked_for(padding: bool, ends: str) -> None:
    spec = resolve(model="llama-3.2-1b", method="lora", device="cuda", padding=padding, **CELL)
    assert without_flash(spec, find_gpu("T4"))[0].endswith(ends)


@pytest.mark.parametrize(("head_size", "dropout", "is_noted"), [(200, 0.0, True), (256, 0.0, False), (256, 0.1, True)])
def test_heads_that_ada_does_not_train_are_noted(head_size: int, dropout: float, is_noted: bool) -> None:
    own = {"head_dim": head_size, "attention_dropout": dropout}
    spec = resolve(model="llama-3.2-1b", method="lora", device="cuda", **CELL)
    spec = spec.model_copy(update={"architecture": spec.architecture | own})
    notes = without_flash(spec, find_gpu("L40S"))
    assert [f"for heads of {head_size}:" in one for one in notes] == [True] * is_noted
    assert without_flash(spec, find_gpu("H100-SXM")) == []

"""The largest part in words: its factors give its bytes, and what is said not to reduce it saves next to nothing."""

import re

import pytest
from command_line import flags, vramprobe
from factories import on_ranks

from vramprobe import api
from vramprobe.interop.questions import JudgedPrediction
from vramprobe.predict.reasons import largest_part, parts
from vramprobe.predict.shares import near

LORA = {"model": "llama-3.2-1b", "method": "lora", "batch_size": 2, "seq_len": 1024}
FULL = {"model": "llama-3.1-8b", "method": "full", "batch_size": 2, "seq_len": 2048, "gradient_checkpointing": True}
_UNITS = {"KiB": 2**10, "bytes": 1}


def _largest(**words: object) -> tuple[str, JudgedPrediction]:
    found = api.predict(**words, widen=True)
    return max(found.terms, key=lambda name: found.terms[name]), found


@pytest.mark.parametrize(
    ("words", "name", "factors"),
    [
        (LORA, "saved_activations", 3),
        (LORA | {"gradient_checkpointing": True, "batch_size": 8, "seq_len": 2048}, "logits", 3),
        (LORA | {"gradient_checkpointing": True, "batch_size": 1}, "weights", 2),
        (FULL, "optimizer_state", 2),
    ],
)
def test_factors_give_the_part(words: dict[str, object], name: str, factors: int) -> None:
    largest, found = _largest(**words)
    said = found.largest_part
    assert (largest, said.split(",")[0]) == (name, name)
    formula = said.split(" = ")[1].split(";")[0]
    numbers = [float(one.replace(",", "")) for one in re.findall(r"\d[\d,.]*", formula)]
    product = _UNITS[formula.split()[-1]] * (1e9 if "billion" in formula else 1)
    for number in numbers:
        product *= number
    assert len(numbers) == factors
    assert product == pytest.approx(found.terms[name], rel=0.02)


def test_each_part_is_said_with_its_product() -> None:
    found = api.predict(**LORA, widen=True)
    assert list(found.parts) == sorted(found.terms, key=lambda name: -found.terms[name])
    assert found.parts["weights"] == "1.236 billion parameters × 2.04 bytes; parameters, buffers, quantization state"
    product = r"2,048 tokens × 16 layers × [\d.,]+ KiB; made in forward, .*"
    assert re.fullmatch(product, found.parts["saved_activations"])
    assert all(found.parts.values())
    rank = on_ranks(api.cell(device="cuda", **LORA), 2, "fsdp")
    assert parts(rank, near(rank))["weights"] == "parameters, buffers, quantization state"


def test_explain_prints_the_parts_and_is_of_one_prediction() -> None:
    printed = " ".join(vramprobe("predict", *flags(LORA), "--explain").stdout.split())
    for name, said in api.predict(**LORA, widen=True).parts.items():
        assert f"{name}: {said}" in printed
    one_less = {name: value for name, value in LORA.items() if name != "batch_size"}
    refused = vramprobe("predict", *flags(one_less), "--explain", "--max-batch", "--gpu", "T4")
    assert refused.returncode == 2
    assert "--explain" in refused.stderr


def test_what_is_no_help_is_none() -> None:
    name, found = _largest(**LORA)
    assert found.largest_part.endswith("not reduced by quantization, a smaller LoRA rank or another optimizer")
    for change in ({"lora_r": 8}, {"lora_r": 64}):
        assert api.predict(**LORA | change).terms[name] > 0.95 * found.terms[name]
    name, found = _largest(**FULL)
    assert "not reduced by a smaller batch, shorter sequences or gradient checkpointing" in found.largest_part
    smaller = api.predict(**FULL | {"batch_size": 1, "seq_len": 4096})
    assert smaller.terms[name] == found.terms[name]


def test_a_rank_has_no_product_of_the_whole() -> None:
    rank = on_ranks(api.cell(device="cuda", **LORA), 2, "fsdp")
    said = largest_part(rank, near(rank))
    assert said
    assert " = " not in said
    assert api.predict(**LORA).largest_part == ""  # as the command line alone

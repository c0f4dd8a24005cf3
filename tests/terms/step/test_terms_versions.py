"""What transformers 4 holds otherwise: a mixture's experts as linear layers, counted by hand."""

from __future__ import annotations

from pathlib import Path

import pytest
from arithmetic import cell
from factories import TINY_LLAMA
from mixtures import moe_cell

from vramprobe.catalog.libraries import DECIDING, in_words, pinned_libraries
from vramprobe.predict.predict import predict
from vramprobe.terms.step.versions import less_as_linears_bytes, version_notes


def nf4_bytes(out: int, num_in: int) -> int:
    """Packed halves and a code book, an absmax of a byte for 64, an absmax of those for 256, its code, an offset."""
    blocks = -(-out * num_in // 64)
    return out * num_in // 2 + 64 + blocks + 4 * -(-blocks // 256) + 1024 + 4


def test_experts_and_router_as_linear_layers() -> None:
    spec = moe_cell("mixtral", method="qlora", kbit_prep="none")
    hidden, width, layers, experts = (
        spec.architecture[name]
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_local_experts")
    )
    fused = 2 * (3 * experts * hidden * width + experts * hidden)
    linears = experts * (2 * nf4_bytes(width, hidden) + nf4_bytes(hidden, width)) + nf4_bytes(experts, hidden)
    assert less_as_linears_bytes(spec) == layers * (fused - linears)
    in_fp32 = moe_cell("mixtral", method="qlora", kbit_prep="peft")  # peft's preparation casts what is not quantised
    assert less_as_linears_bytes(in_fp32) == layers * (2 * fused - linears)


@pytest.mark.parametrize(
    ("family", "method", "is_said"),
    [
        ("mixtral", "qlora", True),
        ("qwen3_moe", "qlora", True),
        ("mixtral", "lora", False),
    ],
)
def test_who_asks_for_a_quantised_mixture_is_told_of_transformers_4(family: str, method: str, is_said: bool) -> None:
    spec = moe_cell(family, method=method)
    notes = version_notes(spec)
    assert bool(notes) == is_said
    assert [text for text in predict(spec).warnings if text in notes] == notes
    assert not is_said or "transformers 4 has these experts as linear layers" in notes[0]


def test_a_prediction_says_which_libraries_it_holds_for() -> None:
    told = predict(cell(TINY_LLAMA)).libraries
    assert told == dict(pinned_libraries())
    constraints = (Path(__file__).parents[3] / "constraints.txt").read_text().splitlines()
    assert {f"{name}=={told[name]}" for name in DECIDING} <= set(constraints)
    assert in_words({"transformers": "4.48.0", "torch": None}) == "transformers 4.48.0"

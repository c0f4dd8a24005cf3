"""Weights of a quantized mixture with linear layers for experts, as in transformers 4: counted by hand, and said."""

from __future__ import annotations

import pytest
from mixtures import moe_cell

from vramprobe.architecture import architecture
from vramprobe.bounds.tensors import less_as_linears_bytes
from vramprobe.predict.predict import predict
from vramprobe.spec import CellSpec
from vramprobe.units import format_bytes


def nf4_bytes(out: int, num_in: int) -> int:
    """Packed halves and a code book, an absmax of a byte for 64, an absmax of those for 256, its code, an offset."""
    blocks = -(-out * num_in // 64)
    return out * num_in // 2 + 64 + blocks + 4 * -(-blocks // 256) + 1024 + 4


def less_of(spec: CellSpec) -> int:
    return less_as_linears_bytes(spec, architecture(spec.architecture))


def test_experts_and_router_as_linear_layers() -> None:
    spec = moe_cell("mixtral", method="qlora", kbit_prep="none")
    hidden, width, layers, experts = (
        spec.architecture[name]
        for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "num_local_experts")
    )
    fused = 2 * (3 * experts * hidden * width + experts * hidden)
    linears = experts * (2 * nf4_bytes(width, hidden) + nf4_bytes(hidden, width)) + nf4_bytes(experts, hidden)
    assert less_of(spec) == layers * (fused - linears)
    in_fp32 = moe_cell("mixtral", method="qlora", kbit_prep="peft")  # peft's preparation casts what is not quantised
    assert less_of(in_fp32) == layers * (2 * fused - linears)


@pytest.mark.parametrize(("family", "method"), [("mixtral", "qlora"), ("qwen3_moe", "qlora"), ("mixtral", "lora")])
def test_who_asks_for_a_quantized_mixture_is_told_of_transformers_4(family: str, method: str) -> None:
    spec = moe_cell(family, method=method)
    notes = [text for text in predict(spec).warnings if "transformers 4 has these experts as linear layers" in text]
    assert len(notes) == (method == "qlora")
    assert all(f"{format_bytes(less_of(spec))} less of weights" in text for text in notes)

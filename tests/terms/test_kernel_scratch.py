"""What kernels take for a while, against what the allocator's history of emulated runs shows that they took."""

from __future__ import annotations

import pytest

from vramprobe.terms.operators import summed
from vramprobe.terms.scratch import (
    Chip,
    attention_scratch,
    cudnn_backward,
    efficient_backward,
    flash_backward,
    flash_forward,
    fused_kernel,
    sum_of_rows,
)
from vramprobe.terms.tape import Tape

L4, L40S, RTX_4090 = (Chip((8, 9), num_sms) for num_sms in (58, 142, 128))
H100, B200, T4 = Chip((9, 0), 132), Chip((10, 0), 148), Chip((7, 5), 40)


@pytest.mark.parametrize(("chip", "num_rows", "width", "taken"), [
    (L40S, 1024, 576, 4_718_592), (L4, 1024, 896, 7_340_032), (RTX_4090, 1024, 768, 6_291_456),
    (RTX_4090, 1024, 3072, 25_165_824), (L4, 1024, 128, 1_048_576),
], ids=str)  # fmt: skip
def test_sums_over_rows(chip: Chip, num_rows: int, width: int, taken: int) -> None:
    """SmolLM2 135M's norm, Qwen2.5 0.5B's norm and key's bias, OPT 125M's biases; partial sums are of fp32."""
    assert sum_of_rows(chip, num_rows, width, 2)[0] == sum_of_rows(chip, num_rows, width, 4)[0] == taken


def test_few_rows_are_not_split() -> None:
    assert sum_of_rows(L4, 64, 896, 2) == []
    assert sum_of_rows(L4, 1024, 131072, 2) == []  # there are columns enough for all


def test_flash_splits_keys_where_queries_are_few() -> None:
    """9 heads of SmolLM2 135M and 12 of OPT 125M over 1,024 tokens by four; 32 over 2,048 keep 142 busy."""
    assert flash_forward(L40S, 1, 9, 1024, 64) == [147_456, 9_437_184]
    assert flash_forward(RTX_4090, 1, 12, 1024, 64) == [196_608, 12_582_912]
    assert flash_forward(L40S, 1, 32, 2048, 64) == []
    no_splits = attention_scratch(L40S, (1, 9, 1024, 64, 64), "bf16", has_bias=False, has_dropout=True)
    assert no_splits.forward == []


def test_attentions_backward() -> None:
    assert flash_backward(1, 32, 2048, 64) == [262_144, 16_777_216]  # Llama 3.2 1B
    assert flash_backward(1, 14, 1000, 96) == [4 * 14 * 1024, 4 * 14 * 1024 * 96]  # whole blocks of rows
    assert cudnn_backward(1, 32, 2048, 96) == [25_427_968]  # Phi-3 mini
    product, sums, *_ = efficient_backward(T4, 12, 1024, 64, 64, "fp32")  # Pythia 160M
    assert (product, sums) == (3_145_728, 49_152)


@pytest.mark.parametrize(("chip", "sizes", "dtype", "has_bias", "kernel"), [
    (L4, (64, 64), "bf16", False, "flash"), (L4, (64, 64), "bf16", True, "efficient"),
    (L4, (64, 64), "fp32", False, "efficient"), (L4, (192, 128), "bf16", False, "efficient"),
    (H100, (128, 128), "bf16", True, "cudnn"), (H100, (256, 256), "bf16", False, "cudnn"),
    (B200, (256, 256), "bf16", False, "flash"), (B200, (192, 128), "bf16", False, "cudnn"),
    (T4, (64, 64), "fp16", False, "efficient"),
], ids=str)  # fmt: skip
def test_which_attention_runs(chip: Chip, sizes: tuple[int, int], dtype: str, has_bias: bool, kernel: str) -> None:
    assert fused_kernel(chip, *sizes, dtype, has_bias=has_bias) == kernel


def test_a_sum_over_the_rows_of_an_expert_that_no_token_comes_to_asks_for_none() -> None:
    tape = Tape()
    assert summed(tape.new(0, "bf16"), 0).numel == 0
    assert tape.total_bytes == 0

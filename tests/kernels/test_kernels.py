"""Which kernels run and what they allocate, against torch 2.13 on emulated GPUs: ``torch._fused_sdp_choice``, and the
allocator's history of a forward and a backward.
"""

from __future__ import annotations

import pytest

from vramprobe.kernels.attention import (
    Kernel,
    chosen,
    cudnn_backward,
    efficient_backward,
    flash_backward,
    flash_forward,
    workspaces,
)
from vramprobe.kernels.chip import Chip
from vramprobe.kernels.reductions import sum_of_rows
from vramprobe.terms.models.operators import summed
from vramprobe.terms.tape.tape import Tape

L4, L40S, RTX_4090 = (Chip((8, 9), num_sms) for num_sms in (58, 142, 128))
A100, H100, B200, T4 = Chip(), Chip((9, 0), 132), Chip((10, 0), 148), Chip((7, 5), 40)


@pytest.mark.parametrize(
    ("chip", "num_rows", "width", "taken"),
    [
        (L40S, 1024, 576, 4_718_592),
        (L4, 1024, 896, 7_340_032),
        (RTX_4090, 1024, 768, 6_291_456),
        (RTX_4090, 1024, 3072, 25_165_824),
        (L4, 1024, 128, 1_048_576),
    ],
    ids=str,
)
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
    no_splits = workspaces(L40S, (1, 9, 1024, 64, 64), "bf16", has_mask=False, dropout=0.125)
    assert no_splits.forward == []


def test_attentions_backward() -> None:
    assert flash_backward(1, 32, 2048, 64) == [262_144, 16_777_216]  # Llama 3.2 1B
    assert flash_backward(1, 14, 1000, 96) == [4 * 14 * 1024, 4 * 14 * 1024 * 96]  # whole blocks of rows
    assert cudnn_backward(1, 32, 2048, 96) == [25_427_968]  # Phi-3 mini
    product, sums, *_ = efficient_backward(T4, 12, 1024, 1024, 64, 64, "fp32")  # Pythia 160M
    assert (product, sums) == (3_145_728, 49_152)


@pytest.mark.parametrize(
    ("head_size", "forward", "backward"),
    [
        (128, [32_768, 4_194_304], [16_384, 2_097_152]),
        (136, [49_152, 9_437_184], [16_384, 3_145_728]),  # as 192
        (192, [49_152, 9_437_184], [16_384, 3_145_728]),
        (200, [49_152, 12_582_912], [16_384, 4_194_304]),  # as 256
        (224, [49_152, 12_582_912], [16_384, 4_194_304]),
        (256, [49_152, 12_582_912], [16_384, 4_194_304]),
    ],
)
def test_flash_rounds_heads_up(head_size: int, forward: list[int], backward: list[int]) -> None:
    """8 heads over 512 tokens on an A100: to a multiple of 32, beyond 128 of 64."""
    taken = workspaces(A100, (1, 8, 512, head_size, head_size), "bf16", has_mask=False, dropout=0.0)
    assert taken == ("flash", forward, backward)


@pytest.mark.parametrize(
    ("chip", "sizes", "dtype", "has_mask", "kernel"),
    [
        (L4, (64, 64), "bf16", False, "flash"),
        (L4, (64, 64), "bf16", True, "efficient"),
        (L4, (64, 64), "fp32", False, "efficient"),
        (L4, (192, 128), "bf16", False, "efficient"),
        (A100, (264, 264), "bf16", False, "efficient"),
        (A100, (260, 260), "bf16", False, "math"),  # not a multiple of 8
        (A100, (193, 193), "fp32", False, "math"),
        (T4, (193, 193), "fp32", False, "efficient"),  # has no tensor cores for it
        (H100, (128, 128), "bf16", True, "cudnn"),
        (H100, (256, 256), "bf16", False, "cudnn"),
        (B200, (256, 256), "bf16", False, "flash"),
        (B200, (192, 128), "bf16", False, "cudnn"),
        (T4, (64, 64), "fp16", False, "efficient"),
        (T4, (64, 64), "bf16", False, "math"),
    ],
    ids=str,
)
def test_which_attention_runs(chip: Chip, sizes: tuple[int, int], dtype: str, has_mask: bool, kernel: Kernel) -> None:
    assert chosen(chip, *sizes, dtype, has_mask=has_mask) == kernel


@pytest.mark.parametrize(
    ("head_size", "dropout", "on_l4", "on_a100"),
    [
        (192, 0.1, "flash", "flash"),
        (200, 0.0, "efficient", "flash"),
        (224, 0.0, "efficient", "flash"),
        (232, 0.0, "flash", "flash"),
        (232, 0.1, "efficient", "flash"),
        (256, 0.125, "efficient", "flash"),
    ],
)
def test_flash_has_no_backward_for_some_wide_heads_on_some_cards(
    head_size: int, dropout: float, on_l4: Kernel, on_a100: Kernel
) -> None:
    """Compute capability 8.6, 8.9 and 12.0; math where heads are grouped, too."""
    for chip in (L4, Chip((8, 6), 84), Chip((12, 0), 170)):
        assert chosen(chip, head_size, head_size, "bf16", dropout=dropout) == on_l4
        grouped = chosen(chip, head_size, head_size, "bf16", dropout=dropout, is_grouped=True)
        assert grouped == ("flash" if on_l4 == "flash" else "math")
    assert chosen(A100, head_size, head_size, "bf16", dropout=dropout) == on_a100


@pytest.mark.parametrize(("dropout", "kernel"), [(0.0, "cudnn"), (0.1, "flash"), (0.125, "cudnn")])
def test_cudnn_drops_in_sixteenths(dropout: float, kernel: Kernel) -> None:
    assert chosen(H100, 64, 64, "bf16", dropout=dropout) == kernel


def test_a_sum_over_the_rows_of_an_expert_that_no_token_comes_to_asks_for_none() -> None:
    tape = Tape()
    assert summed(tape.new(0, "bf16"), 0).numel == 0
    assert tape.log[-1].entries == []

"""What CUDA's kernels take and give back, and in which order, against what torch's own did.

Sizes are of torch 2.13's CUDA build on emulated cards (vramprobe/emulate), whose allocator kept a history: what a
kernel asks for is decided on the host, by the card's properties.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch
from factories import TINY_LLAMA, make_spec
from torch.nn import functional

from vramprobe.catalog.gpus import cublas_workspace_bytes
from vramprobe.kernels.chip import Chip
from vramprobe.simulate.kernels.reductions import reduction_scratch
from vramprobe.simulate.kernels.scratch import cuda_scratch
from vramprobe.simulate.run import session
from vramprobe.spec import CellSpec

MIB = 2**20
A100, H100, RTX_4090, T4 = Chip(), Chip((9, 0), 132), Chip((8, 9), 128), Chip((7, 5), 40)
_aten = torch.ops.aten
SUM = _aten.sum.dim_IntList


def heads(*counts: int, length: int, size: int, dtype: torch.dtype, batch: int = 2) -> list[torch.Tensor]:
    return [torch.empty(batch, count, length, size, dtype=dtype, device="meta") for count in counts]


# -- sums --------------------------------------------------------------------------------------------------------------

SUMS: list[tuple[tuple[int, ...], list[int], torch.dtype, list[int]]] = [
    ((1024, 896), [0], torch.bfloat16, [7_340_032, 28]),  # a bias of Qwen2.5
    ((2, 512, 896), [0, 1], torch.bfloat16, [7_340_032, 28]),
    ((1024, 128), [0], torch.bfloat16, [1_048_576, 4]),
    ((1024, 768), [0], torch.float32, [6_291_456, 24]),
    ((2048, 4864), [0], torch.bfloat16, [79_691_776, 152]),
    ((4096, 256), [0], torch.float16, [8_388_608, 8]),
    ((2, 512, 14, 64), [0, 1, 2], torch.bfloat16, [1_835_008, 4]),
    ((1 << 20,), [], torch.float32, [512, 4]),
    ((1024, 50257), [0], torch.bfloat16, []),  # outputs enough for all blocks
    ((1024, 50257), [1], torch.float32, []),
    ((1024, 2048), [-1], torch.float32, []),
    ((1, 100_000), [-1], torch.float32, []),
    ((2, 14, 512, 64), [2], torch.bfloat16, []),
    ((2, 12, 512, 512), [0], torch.bfloat16, []),
    ((1024, 30), [0], torch.bfloat16, []),
    ((8192, 6), [0], torch.float32, []),
    ((1024, 96), [], torch.float32, []),
    ((2, 512), [], torch.int64, []),
    ((2, 512), [], torch.bool, [8192]),  # summed as int64
    ((2, 512), [-1], torch.int32, [8192]),
]


@pytest.mark.parametrize(("shape", "dims", "dtype", "taken"), SUMS)
def test_a_sum_that_is_split_among_blocks_takes_their_partial_sums(
    shape: tuple[int, ...], dims: list[int], dtype: torch.dtype, taken: list[int]
) -> None:
    given = torch.empty(shape, dtype=dtype, device="meta")
    assert reduction_scratch(SUM, (given, dims), given.sum(dims) if dims else given.sum(), H100) == taken


def test_how_far_a_sum_is_split_depends_on_the_card() -> None:
    given = torch.empty(2048, 4864, dtype=torch.bfloat16, device="meta")
    assert cuda_scratch(_aten.sum.dim_IntList, (given, [0]), given.sum(0), H100) == [79_691_776, 152]
    assert cuda_scratch(_aten.sum.dim_IntList, (given, [0]), given.sum(0), T4) == [22_413_312, 152]


def test_a_sum_follows_strides() -> None:
    """Columns of a transposed matrix lie in memory as rows do, and are summed by one block each."""
    rows = torch.empty(512, 2, 896, dtype=torch.bfloat16, device="meta").transpose(0, 1)
    columns = torch.empty(896, 1024, dtype=torch.bfloat16, device="meta").t()
    assert reduction_scratch(SUM, (rows, [0, 1]), rows.sum([0, 1]), H100) == [7_340_032, 28]
    assert reduction_scratch(SUM, (columns, [0]), columns.sum(0), H100) == []


def test_a_mean_takes_what_a_sum_takes() -> None:
    given = torch.empty(1024, 896, dtype=torch.bfloat16, device="meta")
    assert cuda_scratch(_aten.mean.dim, (given, [0]), given.mean(0), H100) == [7_340_032, 28]


def test_a_norm_of_columns_is_split_as_a_sum() -> None:
    """DoRA's of a Conv1D of GPT-2, which is stored the other way round."""
    weight = torch.empty(3072, 768, device="meta").t()
    operator = _aten.linalg_vector_norm.default
    assert cuda_scratch(operator, (weight, 2, [1]), weight.norm(dim=1), H100) == [18_874_368, 24]


# -- attention ---------------------------------------------------------------------------------------------------------


def test_flash_backward_takes_row_sums_an_fp32_dq_and_expanded_dk_dv() -> None:
    query, key = heads(8, 2, length=64, size=40, dtype=torch.bfloat16)
    operator = _aten._scaled_dot_product_flash_attention_backward.default
    rows = 2 * 8 * 128  # 64 tokens round up to 128
    assert cuda_scratch(operator, (query, query, key, key), None) == [
        4 * rows,
        4 * rows * 64,
        2 * 2 * 64 * 8 * 40,
        2 * 2 * 64 * 8 * 40,
    ]
    assert cuda_scratch(operator, (query, query, query, query), None) == [4 * rows, 4 * rows * 64]


def test_flash_with_dropout_keeps_the_generators_state_while_it_runs() -> None:
    query = heads(8, length=64, size=40, dtype=torch.bfloat16)[0]
    operator = _aten._scaled_dot_product_flash_attention.default
    assert cuda_scratch(operator, (query, query, query, 0.1), None) == [16]
    assert cuda_scratch(operator, (query, query, query, 0.0), None) == []


@pytest.mark.parametrize(
    ("counts", "length", "size", "batch", "taken"),
    [
        ((14, 2), 512, 64, 2, 3_727_360),
        ((14, 2), 96, 64, 2, 698_880),
        ((8, 8), 100, 128, 1, 412_800),
        ((8, 2), 2048, 128, 1, 8_454_144),
        ((4, 4), 48, 16, 2, 26_112),
        ((8, 8), 512, 256, 2, 8_421_376),
        ((4, 1), 512, 256, 2, 4_210_688),
    ],
)
def test_cudnn_backward_takes_one_workspace(
    counts: tuple[int, int], length: int, size: int, batch: int, taken: int
) -> None:
    query, key = heads(*counts, length=length, size=size, dtype=torch.bfloat16, batch=batch)
    operator = _aten._scaled_dot_product_cudnn_attention_backward.default
    assert cuda_scratch(operator, (query, query, key, key), None) == [taken]


HALF, FP32 = torch.float16, torch.float32


@pytest.mark.parametrize(
    ("chip", "dtype", "shape", "key_length", "workspace"),
    [
        (A100, HALF, (1, 2, 100, 64), 100, 65_600),
        (A100, HALF, (1, 2, 512, 32), 512, 262_400),
        (A100, HALF, (1, 2, 64, 96), 64, 131_104),
        (H100, HALF, (1, 2, 512, 128), 512, 524_416),
        (A100, HALF, (1, 2, 64, 160), 64, 458_848),
        (A100, HALF, (1, 2, 100, 192), 100, 720_992),
        (A100, HALF, (1, 2, 512, 256), 300, 2_359_808),
        (A100, HALF, (3, 50, 512, 256), 512, 98_342_400),
        (A100, HALF, (1, 2, 300, 128), 512, 393_312),
        (A100, HALF, (1, 2, 4096, 256), 4096, 25_169_920),
        (RTX_4090, HALF, (1, 2, 64, 64), 64, 32_800),
        (RTX_4090, HALF, (1, 2, 100, 96), 100, 131_136),
        (RTX_4090, HALF, (1, 2, 100, 128), 100, 393_344),
        (RTX_4090, HALF, (1, 2, 300, 128), 512, 1_376_576),
        (T4, HALF, (1, 2, 100, 128), 100, 131_136),
        (T4, HALF, (1, 2, 300, 128), 512, 393_408),
        (T4, HALF, (1, 2, 512, 256), 512, 3_146_240),
        (A100, FP32, (1, 2, 100, 64), 100, 65_600),
        (A100, FP32, (1, 2, 100, 96), 100, 131_136),
        (A100, FP32, (1, 2, 512, 192), 512, 786_816),
        (T4, FP32, (1, 2, 64, 128), 64, 65_600),
        (RTX_4090, FP32, (3, 50, 512, 256), 512, 78_720_000),
    ],
)
def test_efficient_backward_takes_an_fp32_dq_in_tiles_and_stages_dk_and_dv_of_wide_heads(
    chip: Chip, dtype: torch.dtype, shape: tuple[int, ...], key_length: int, workspace: int
) -> None:
    batch, count, length, size = shape
    query = heads(count, length=length, size=size, dtype=dtype, batch=batch)[0]
    key = heads(count, length=key_length, size=size, dtype=dtype, batch=batch)[0]
    operator = _aten._scaled_dot_product_efficient_attention_backward.default
    taken = cuda_scratch(operator, (query, query, key, key), None, chip)
    row_sums, product = 4 * batch * count * length, 4 * query.numel()
    before = [row_sums] if dtype == HALF else [product, row_sums, row_sums, -row_sums, -product]
    assert taken == [*before, workspace]


def test_efficient_backward_of_queries_wider_than_values() -> None:
    """192 and 128, as DeepSeek's."""
    query, value = (heads(8, length=512, size=size, dtype=HALF)[0] for size in (192, 128))
    operator = _aten._scaled_dot_product_efficient_attention_backward.default
    assert cuda_scratch(operator, (value, query, query, value), None) == [32_768, 18_877_440]


def test_efficient_forward_of_wide_heads_sums_in_fp32() -> None:
    operator = _aten._scaled_dot_product_efficient_attention.default
    for size, taken in ((128, []), (256, [8_388_608])):
        query = heads(8, length=512, size=size, dtype=HALF)[0]
        assert cuda_scratch(operator, (query, query, query), None) == taken
    query, value = (heads(8, length=512, size=size, dtype=HALF)[0] for size in (192, 128))
    assert cuda_scratch(operator, (query, query, value), None) == [4_194_304]
    query = heads(8, length=512, size=256, dtype=FP32)[0]
    assert cuda_scratch(operator, (query, query, query), None) == []


# -- others ------------------------------------------------------------------------------------------------------------


def test_embedding_backward_sorts_many_tokens() -> None:
    operator = _aten.embedding_dense_backward.default

    def taken(num_tokens: int) -> list[int]:
        gradient = torch.empty(num_tokens, 16, device="meta")
        return cuda_scratch(operator, (gradient, torch.empty(num_tokens, device="meta"), 100, -1, False), None)

    assert taken(3072) == []
    assert taken(4000) == [32_000] * 4 + [4 * 16 * (400 + 100)]
    assert taken(4001)[-1] == 4 * 16 * (400 + 100)


def test_an_operator_without_a_rule_takes_nothing() -> None:
    assert cuda_scratch(_aten.mm.default, (), None) == []


def events(program: Any, chip: Chip = A100, **options: Any) -> list[int]:
    """Bytes of allocations and, negative, frees of ``program`` on ``chip`` between its two yields."""
    words = make_spec(**options).model_dump() | {"architecture": TINY_LLAMA, "device": "cpu"}
    with session(CellSpec(**words), chip) as recorder:
        steps = program()
        next(steps)
        start = len(recorder.events)
        kept = next(steps)
        found = [event.size_bytes for event in recorder.events[start:]]
    del kept
    return found


def test_softmaxs_backward_multiplies_before_its_kernel() -> None:
    def program() -> Any:
        scores = torch.empty(2, 8, 64, 64, dtype=torch.bfloat16, requires_grad=True)
        out = scores.softmax(-1)
        upper = torch.empty_like(out)
        yield
        yield torch.autograd.grad(out, scores, upper)

    num_bytes = 2 * 8 * 64 * 64 * 2
    assert events(program) == [num_bytes, num_bytes, -num_bytes]


def test_a_product_is_made_before_cublas_takes_its_workspace() -> None:
    def program() -> Any:
        left, right = torch.empty(16, 32), torch.empty(32, 8)
        yield
        yield left @ right

    assert events(program) == [4 * 16 * 8, cublas_workspace_bytes(8)]


def test_cublas_gets_a_copy_of_a_batch_of_matrices_with_gaps_both_ways() -> None:
    operator, whole = _aten.bmm.default, torch.empty(4, 16, 32, device="meta")
    other = torch.empty(16, 4, 32, device="meta").transpose(0, 1)  # its rows have gaps between them
    columns = torch.empty(32, 16, 4, device="meta").permute(2, 1, 0)  # neither rows nor columns lie together
    assert cuda_scratch(operator, (whole, whole.transpose(1, 2)), None) == []
    assert cuda_scratch(operator, (other, whole.transpose(1, 2)), None) == []
    assert cuda_scratch(operator, (columns, whole.transpose(1, 2)), None) == [4 * 4 * 16 * 32]


def test_layer_norm_of_16_bits_keeps_its_statistics_in_fp32() -> None:
    def program() -> Any:
        hidden, weight = torch.empty(2, 64, 32, dtype=torch.bfloat16), torch.empty(32, dtype=torch.bfloat16)
        hidden.requires_grad_()
        yield
        yield functional.layer_norm(hidden, (32,), weight, weight)

    assert events(program) == [2 * 2 * 64 * 32, 4 * 2 * 64, 4 * 2 * 64]


def test_dropout_makes_its_mask_first() -> None:
    def program() -> Any:
        hidden = torch.empty(64, 32, requires_grad=True)
        yield
        yield functional.dropout(hidden, 0.1)

    assert events(program) == [64 * 32, 4 * 64 * 32]


def test_cudnn_makes_two_numbers_first_and_efficient_attention_none() -> None:
    def program() -> Any:
        query = torch.empty(1, 2, 64, 16, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.empty(1, 2, 64, 64, dtype=torch.bfloat16)
        yield
        yield functional.scaled_dot_product_attention(query, query, query, mask)

    assert events(program, H100)[:4] == [8, 8, 2 * 2 * 64 * 16, 4 * 2 * 64]
    assert events(program, A100) == [2 * 2 * 64 * 16, 4 * 2 * 64]


def test_a_mask_is_converted_once_into_the_queries_dtype() -> None:
    def program() -> Any:
        query = torch.empty(1, 2, 64, 16, dtype=torch.bfloat16, requires_grad=True)
        mask = torch.empty(1, 1, 64, 64, dtype=torch.bool)
        yield
        yield functional.scaled_dot_product_attention(query, query, query, mask)

    assert events(program)[:5] == [2, 2, 2 * 64 * 64, -2, -2]


def test_the_math_path_adds_its_mask_and_masks_whole_rows_in_place() -> None:
    """As the emulated card's history has it for fp32: the scores, their softmax, a comparison, rows, a zero."""

    def program() -> Any:
        query, key = torch.empty(1, 4, 32, 16, requires_grad=True), torch.empty(1, 1, 32, 16)
        mask = torch.empty(1, 1, 32, 32)
        yield
        yield functional.scaled_dot_product_attention(query, key, key, mask)

    scores, out = 4 * 4 * 32 * 32, 4 * 4 * 32 * 16
    large = [size for size in events(program) if abs(size) in (scores, scores // 4)]
    assert out not in (scores, scores // 4)
    assert large == [scores, scores, scores // 4, -scores // 4, -scores]


def test_a_list_of_indices_is_copied_to_the_device() -> None:
    def program() -> Any:
        hidden = torch.empty(4, 8, requires_grad=True)
        yield
        yield hidden[[1, 2]]

    assert events(program) == [8 * 2, 4 * 2 * 8]


def test_an_adapter_is_made_in_the_hosts_memory() -> None:
    """A is (8, 64) and B (64, 8), for bf16 layers: each is copied to the device in bf16, then cast to fp32 there."""
    from peft.tuners.lora import layer

    def program() -> Any:
        base = torch.nn.Linear(64, 64, bias=False, dtype=torch.bfloat16)
        from peft import LoraConfig

        yield
        yield layer.Linear(base, "default", LoraConfig(r=8), r=8, lora_alpha=8)

    assert events(program, method="lora") == [2 * 8 * 64, 2 * 64 * 8]
    assert "peft" in sys.modules


def test_the_kbit_preparation_empties_the_cache_as_on_a_card() -> None:
    """An event of no bytes; the replay gives back what is free at that moment."""
    import peft

    def program() -> Any:
        model = torch.nn.Linear(64, 64, dtype=torch.bfloat16)
        model.is_loaded_in_4bit = True
        yield
        peft.prepare_model_for_kbit_training(model, use_gradient_checkpointing=False)
        yield

    assert 0 in events(program, method="qlora", quant="nf4")


def test_a_four_bit_weight_keeps_its_types_values_on_the_device() -> None:
    from bitsandbytes import functional as bnb

    def program() -> Any:
        yield
        yield bnb.get_4bit_type("nf4", device="cpu")

    assert events(program, method="qlora", quant="nf4") == [64, 64, 4, -64, -4]

"""CUDA's view of a simulated cell, against bytes worked out by hand from the sources that cuda.py names."""

from __future__ import annotations

from typing import Any, get_args

import pytest
import torch
from factories import TINY_LLAMA, make_spec
from psutil import Process
from test_simulate import FAMILIES
from torch.nn import functional

from vramprobe.catalog import find_gpu
from vramprobe.errors import SpecError
from vramprobe.kernels.chip import Chip
from vramprobe.records.record import RunRecord
from vramprobe.simulate.fake.quantised import _real_skeleton
from vramprobe.simulate.kernels.cuda import backend, chip_of
from vramprobe.simulate.run import session, simulate
from vramprobe.spec import Attention, CellSpec, Optim, Quant

MIB = 2**20
A100, H100, RTX_4090 = Chip(), Chip((9, 0), 132), Chip((8, 9), 128)
TALL = TINY_LLAMA | {"vocab_size": 4096}


def cell(architecture: dict[str, Any] = TINY_LLAMA, **options: Any) -> CellSpec:
    words = {"device": "cuda", "batch_size": 2, "seq_len": 48, "timing_steps": 0} | options
    return CellSpec(**(make_spec(**words).model_dump() | {"architecture": architecture}))


def run(architecture: dict[str, Any] = TINY_LLAMA, gpu: str | None = None, **options: Any) -> RunRecord:
    record = simulate(cell(architecture, **options), gpu=find_gpu(gpu) if gpu else None).record
    assert record.outcome.kind == "ok", record.outcome
    assert record.instrument == "simulated"
    return record


def peak_bytes(record: RunRecord, phase: str, step: int = 2) -> int:
    return next(
        p.requested_peak_bytes or p.allocated_peak_bytes for p in record.phases if (p.name, p.step) == (phase, step)
    )


# -- the chip ----------------------------------------------------------------------------------------------------------


def test_the_chip_comes_from_the_catalog() -> None:
    assert chip_of(find_gpu("H100-SXM")) == H100
    assert chip_of(find_gpu("RTX-4090")) == RTX_4090
    assert chip_of(None) == A100


def test_a_gpu_without_cuda_is_refused() -> None:
    with pytest.raises(SpecError, match="NVIDIA"):
        simulate(cell(), gpu=find_gpu("MI300X"))


def test_two_threads_hold_a_workspace_of_8_125_mib_or_32_on_hopper() -> None:
    a100, h100 = (run(gpu=gpu, attn="eager") for gpu in ("A100-80GB", "H100-SXM"))
    assert a100.ledger.unaccounted_bytes - 2 * 8_519_680 == h100.ledger.unaccounted_bytes - 2 * 32 * MIB


def tensors(heads: int, kv_heads: int, size: int | tuple[int, int], dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries, keys and values; ``size`` of a head, or of queries' and keys' and of values'."""
    size, value_size = size if isinstance(size, tuple) else (size, size)
    shapes = (heads, size), (kv_heads, size), (kv_heads, value_size)
    return [torch.empty(2, count, 64, width, dtype=dtype, device="meta") for count, width in shapes]


@pytest.mark.parametrize(
    ("chip", "heads", "kv_heads", "size", "dtype", "masked", "chosen"),
    [
        (A100, 8, 2, 128, torch.bfloat16, False, "flash"),
        (A100, 8, 8, 128, torch.bfloat16, True, "efficient"),
        (A100, 8, 2, 128, torch.bfloat16, True, "math"),  # grouped heads only in flash and cuDNN
        (A100, 8, 8, 128, torch.float32, False, "efficient"),
        (A100, 8, 2, 128, torch.float32, False, "math"),
        (A100, 8, 8, 512, torch.bfloat16, False, "efficient"),
        (A100, 8, 8, 5, torch.float32, False, "math"),
        (H100, 8, 2, 128, torch.bfloat16, False, "cudnn"),
        (H100, 8, 2, 128, torch.bfloat16, True, "cudnn"),
        (H100, 8, 2, 124, torch.float16, False, "flash"),  # not a multiple of 8
        (A100, 8, 8, (192, 128), torch.bfloat16, False, "efficient"),
        (H100, 8, 8, (192, 128), torch.bfloat16, False, "cudnn"),
        (Chip((10, 0), 148), 8, 8, (192, 128), torch.bfloat16, False, "cudnn"),
        (Chip((10, 0), 148), 8, 8, (192, 192), torch.bfloat16, False, "flash"),
        (Chip((10, 0), 148), 8, 8, 256, torch.bfloat16, False, "flash"),  # cuDNN: 256 on Hopper alone
        (RTX_4090, 8, 8, 128, torch.bfloat16, False, "flash"),
        (RTX_4090, 8, 8, 224, torch.bfloat16, False, "efficient"),
        (Chip((7, 5), 40), 8, 8, 64, torch.float16, False, "efficient"),
        (Chip((7, 5), 40), 8, 8, 64, torch.bfloat16, False, "math"),  # bf16 from Ampere on alone
        (Chip((7, 5), 40), 8, 2, 64, torch.float16, False, "math"),
    ],
)
def test_attention_kernels(
    chip: Chip, heads: int, kv_heads: int, size: int | tuple[int, int], dtype: torch.dtype, masked: bool, chosen: str
) -> None:
    mask = torch.empty(2, 1, 64, 64, dtype=torch.bool, device="meta") if masked else None
    assert backend(chip, *tensors(heads, kv_heads, size, dtype), mask) == chosen


@pytest.mark.parametrize(
    ("dropout", "learned", "chosen"),
    [
        (0.0, False, "cudnn"),
        (0.125, False, "cudnn"),
        (0.1, False, "efficient"),
        (0.0, True, "efficient"),
    ],
)
def test_cudnn_takes_no_learned_mask_and_drops_in_sixteenths(dropout: float, learned: bool, chosen: str) -> None:
    """As torch 2.13 chooses on an emulated H100 (``torch._fused_sdp_choice``); T5 has both."""
    mask = torch.empty(1, 8, 64, 64, dtype=torch.bfloat16, device="meta", requires_grad=learned)
    assert backend(H100, *tensors(8, 8, 64, torch.bfloat16), mask, dropout) == chosen


def test_without_grouped_heads_only_the_math_path_takes_fewer_keys() -> None:
    """As torch 2.13 chooses on emulated cards for Falcon, whose one head of keys is not repeated."""
    for chip in (A100, H100):
        assert backend(chip, *tensors(8, 1, 64, torch.bfloat16), None, enable_gqa=False) == "math"
        assert backend(chip, *tensors(8, 8, 64, torch.bfloat16), None, enable_gqa=False) != "math"


def test_int8_gives_back_its_inputs_dtype() -> None:
    """bitsandbytes' product on a GPU, not its CPU's: after an fp32 norm the MLP stays in fp32."""
    architecture = TINY_LLAMA | {"hidden_size": 256, "intermediate_size": 512}
    spec = cell(architecture, method="qlora", lora_r=8, quant="int8").model_copy(update={"device": "cpu"})
    seen = []
    with session(spec, A100):
        import bitsandbytes as bnb
        from bitsandbytes.autograd._functions import MatmulLtState

        state = MatmulLtState()
        state.CB, state.SCB = torch.empty(32, 16, dtype=torch.int8), torch.empty(32)
        for dtype in (torch.float32, torch.bfloat16):
            weight = torch.empty(32, 16, dtype=torch.int8)
            seen.append(bnb.matmul(torch.empty(2, 4, 16, dtype=dtype), weight, state=state, threshold=6.0).dtype)
    assert seen == [torch.float32, torch.bfloat16]


def test_cross_entropy_in_16_bits_is_cast_after_its_logarithm() -> None:
    """CUDA's autocast: the 16-bit logarithms, then a cast for nll_loss; the CPU's would cast the logits first."""
    with session(make_spec(device="cpu"), A100) as recorder, torch.autocast("cpu", dtype=torch.bfloat16):
        logits, labels = torch.empty(64, 100, dtype=torch.bfloat16), torch.empty(64, dtype=torch.int64)
        before = len(recorder.events)
        functional.cross_entropy(logits, labels)
        sizes = [event.size_bytes for event in recorder.events[before:] if event.size_bytes >= 64 * 100]
    assert sizes == [2 * 64 * 100, 4 * 64 * 100]


def test_attention_kernels_of_a_run_are_facts() -> None:
    assert run().facts.attention_kernels == ["ScaledDotProductFlashAttention"]
    assert run(gpu="H100-SXM").facts.attention_kernels == ["ScaledDotProductCudnnAttention"]
    assert run(attn="flash_attention_2", gpu="H100-SXM").facts.attention_kernels == ["ScaledDotProductFlashAttention"]


@pytest.mark.parametrize(("family", "gpu", "word"), [("t5", "A100-80GB", "t5"), ("llama", "T4", "Ampere")])
def test_flash_attn_is_refused_where_it_would_not_run(family: str, gpu: str, word: str) -> None:
    with pytest.raises(SpecError, match=word):
        run(FAMILIES[family], gpu=gpu, attn="flash_attention_2")


def test_flash_attn_saves_what_sdpa_saves() -> None:
    sdpa, flash = run(attn="sdpa"), run(attn="flash_attention_2")
    assert flash.ledger.saved_activations_bytes == sdpa.ledger.saved_activations_bytes


# -- autocast, dropout, host tensors -----------------------------------------------------------------------------------


def test_autocast_casts_as_cuda_does_and_only_while_open() -> None:
    spec = cell().model_copy(update={"device": "cpu"})

    def dtypes() -> list[torch.dtype]:
        x = torch.empty(4, 8, dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            norm = functional.layer_norm(x, (8,), torch.empty(8, dtype=torch.bfloat16))
            return [
                y.dtype
                for y in (norm, x.pow(3.0), x.sum(), x.sum(-1), x.cumsum(0), torch.softmax(x, -1), x.exp(), x @ x.T)
            ]

    with session(spec, A100):
        assert dtypes() == [torch.float32] * 7 + [torch.bfloat16]
    with session(spec, None):
        assert dtypes() == [torch.bfloat16] * 8


def test_autocast_casts_the_mask_of_attention_too() -> None:
    """T5 adds its position bias as one: each layer keeps a 16-bit copy."""
    with session(cell().model_copy(update={"device": "cpu"}), A100) as recorder:
        query, key, mask = torch.empty(1, 4, 64, 8), torch.empty(1, 4, 32, 8), torch.empty(1, 4, 64, 32)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            functional.scaled_dot_product_attention(query, key, key, mask)
    assert 2 * mask.numel() in [event.size_bytes for event in recorder.events]


def test_a_sum_keeps_the_dtype_that_was_asked_for() -> None:
    with session(cell().model_copy(update={"device": "cpu"}), A100):
        x = torch.empty(4, 8, dtype=torch.bfloat16)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.softmax(x, -1, dtype=torch.bfloat16).dtype == torch.bfloat16
            assert x.sum(0, dtype=torch.float64).dtype == torch.float64


def test_libraries_that_ask_for_autocast_without_a_device_hear_yes() -> None:
    with session(cell().model_copy(update={"device": "cpu"}), A100):
        assert not torch.is_autocast_enabled()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert torch.is_autocast_enabled()
        assert not torch.is_autocast_enabled()


def test_nothing_is_left_patched() -> None:
    before = functional.scaled_dot_product_attention, functional.dropout, torch.get_rng_state
    run(gradient_checkpointing=True)
    assert (functional.scaled_dot_product_attention, functional.dropout, torch.get_rng_state) == before
    assert torch.nn.functional.layer_norm(torch.ones(2, 8).bfloat16(), (8,)).dtype == torch.bfloat16


def test_layer_norms_of_gpt2_save_fp32_under_autocast() -> None:
    """Each keeps its input as fp32 and hands the next layer fp32: what the CPU leaves at 16 bits."""
    options = {"dtype": "bf16", "autocast": "bf16"}
    gpt2 = FAMILIES["gpt2"] | {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    gpu, cpu = (run(gpt2, **options, device=device).ledger.saved_activations_bytes for device in ("cuda", "cpu"))
    assert gpu > 1.2 * cpu


def test_dropout_keeps_one_byte_an_element() -> None:
    """peft drops the input of an adapter: A saves the dropped copy in place of the input, and there is a mask.

    Not in the first layer, whose input needs no gradient: nothing goes back through its dropout.
    """
    targets = {"method": "lora", "lora_r": 8, "lora_targets": "q_proj", "autocast": "none", "lora_dtype": "bf16"}
    kept, dropped = (run(**targets, lora_dropout=p).ledger.saved_activations_bytes for p in (0.0, 0.1))
    assert dropped - kept == (TINY_LLAMA["num_hidden_layers"] - 1) * 2 * 48 * TINY_LLAMA["hidden_size"]


def test_the_state_of_random_generators_stays_on_the_host() -> None:
    record = run(gradient_checkpointing=True)
    cpu = run(gradient_checkpointing=True, device="cpu")
    assert cpu.ledger.saved_activations_bytes - record.ledger.saved_activations_bytes >= 5056


# -- optimizers --------------------------------------------------------------------------------------------------------


def num_params(record: RunRecord) -> int:
    return record.facts.num_trainable_params


def test_foreach_adamw_takes_one_extra_copy_and_fused_none() -> None:
    """All-bf16 full fine-tuning: weights, gradients and two states, 8 B a parameter; a square root's copy makes 10."""
    spaces = {}
    for optim in ("adamw_torch", "adamw_torch_fused"):
        record = run(TALL, batch_size=1, seq_len=2, optim=optim)
        spaces[optim] = peak_bytes(record, "optimizer_step"), record
    foreach, record = spaces["adamw_torch"]
    fused, _ = spaces["adamw_torch_fused"]
    extra = foreach - fused
    assert 2 * num_params(record) - 1024 <= extra <= 2 * num_params(record)
    assert record.ledger.optimizer_state_bytes == 4 * num_params(record)  # step counters are on the host


def test_fused_adamw_keeps_its_step_counters_on_the_device() -> None:
    record = run(optim="adamw_torch_fused")
    state = record.ledger.optimizer_state_bytes - 4 * num_params(record)
    assert state > 0
    assert state % 4 == 0


def test_paged_state_is_not_torchs() -> None:
    """Tensors from 100,000 elements are in managed memory; the embedding, 4096 × 64, is one of them."""
    paged, plain = (run(TALL, optim=name) for name in ("paged_adamw_32bit", "adamw_bnb_32bit"))
    large = [TALL["vocab_size"] * TALL["hidden_size"]] * 2
    assert min(large) >= 100_000
    assert plain.ledger.optimizer_state_bytes - paged.ledger.optimizer_state_bytes == 8 * sum(large)


def test_paged_state_is_at_no_time_in_the_devices_memory() -> None:
    """bitsandbytes maps it (``functional.get_paged``): the first step ends at its peak, as nothing is freed in it."""
    first = next(p for p in run(TALL, optim="paged_adamw_32bit").phases if (p.name, p.step) == ("optimizer_step", 1))
    assert first.allocated_peak_bytes == first.allocated_end_bytes


@pytest.mark.parametrize("optim", get_args(Optim))
def test_every_optimizer(optim: str) -> None:
    assert run(optim=optim).peak.allocated_bytes > 0


@pytest.mark.parametrize("quant", [name for name in get_args(Quant) if name != "none"])
@pytest.mark.parametrize("gpu", ["A100-80GB", "H100-SXM"])
def test_every_quantisation(quant: str, gpu: str) -> None:
    architecture = TINY_LLAMA | {"hidden_size": 256, "intermediate_size": 512}
    record = run(architecture, gpu=gpu, method="qlora", lora_r=8, quant=quant)
    assert record.ledger.weights_bytes < 2 * record.facts.num_params


@pytest.mark.parametrize("attn", get_args(Attention))
@pytest.mark.parametrize("family", [name for name in FAMILIES if name not in ("t5",)])
def test_every_family_and_attention(family: str, attn: str) -> None:
    assert run(FAMILIES[family], attn=attn, gradient_checkpointing=True).peak.allocated_bytes > 0


def test_the_skeleton_of_a_quantised_model_writes_no_zeros() -> None:
    """Llama 4 makes its experts of zeros: 2.5 GiB a layer that would be real until they are on ``meta``."""
    from accelerate import init_empty_weights

    before = Process().memory_info().rss
    with session(cell().model_copy(update={"device": "cpu"}), A100), _real_skeleton(init_empty_weights)():
        zeros = torch.zeros(2**26)
        assert zeros.device.type == "cpu"
        assert Process().memory_info().rss - before < 2**26


def test_4_bit_layers_of_few_tokens_are_multiplied_without_a_dequantised_copy() -> None:
    """bitsandbytes' own kernel serves up to 4 tokens: forward has no copy, backward always does."""
    architecture = TINY_LLAMA | {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 64}
    options = {"method": "qlora", "lora_r": 1, "lora_targets": "q_proj", "batch_size": 1}
    few, many = (run(architecture, **options, seq_len=length) for length in (4, 2048))
    copy = 2 * 512 * 2048
    assert peak_bytes(few, "forward") - few.ledger.weights_bytes - 2 * 8_519_680 < copy
    assert peak_bytes(few, "backward") - few.ledger.weights_bytes - 2 * 8_519_680 >= copy
    assert many.peak.allocated_bytes > few.peak.allocated_bytes

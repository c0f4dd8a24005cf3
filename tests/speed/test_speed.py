"""Speed: work against counts by hand, seconds against a roofline by hand, rates against rates that are known."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace

import pytest

from benchmarks.speed.rates_fit import EXPECTED, StepObservation, fit_rates, log_error
from vramprobe.architecture import architecture
from vramprobe.catalog import find_gpu, find_model, list_gpus
from vramprobe.errors import FitError
from vramprobe.spec import CellSpec, resolve
from vramprobe.speed import rates as rates_module
from vramprobe.speed.rates import Rates, shipped_speed
from vramprobe.speed.shapes import attention_share, product_share, sent_bytes_per_second
from vramprobe.speed.step import Parts, estimate, parts_of
from vramprobe.speed.work import work_of

CONFIG = find_model("llama-2-7b").config
PER_LAYER = 4 * 4096 * 4096 + 3 * 4096 * 11008
HEAD = 32_000 * 4096
IDEAL = Rates(
    product=1,
    attention=1,
    stream=1,
    dequantise=1,
    dequantise_gptq=1,
    link=1,
    kernel_seconds=1e-12,
    step_seconds=1e-12,
)


def cell(**options: object) -> CellSpec:
    usual = {"model": "llama-2-7b", "method": "full", "device": "cuda", "batch_size": 2, "seq_len": 1024}
    return resolve(**{**usual, **options})


def test_products_of_full_training_are_six_operations_per_weight_and_token() -> None:
    work = work_of(cell())
    assert work.product_flops == 6 * 2048 * (32 * PER_LAYER + HEAD)
    scores = 1024 * 1025 / 2
    forward = 2 * (2 * 32 * 256 * scores) * 32
    assert (work.attention_flops, work.attention_backward_flops) == (forward, 2.5 * forward)
    assert work.model_flops == pytest.approx(work.product_flops + 3.5 * forward)


def test_checkpointing_repeats_the_layers_and_not_the_head() -> None:
    plain, again = work_of(cell()), work_of(cell(gradient_checkpointing=True))
    assert again.product_flops - plain.product_flops == 2 * 2048 * 32 * (PER_LAYER - 4096 * 11008)
    assert again.attention_flops == 2 * plain.attention_flops
    assert again.attention_backward_flops == plain.attention_backward_flops
    assert again.model_flops == pytest.approx(plain.model_flops)
    assert again.num_kernels > plain.num_kernels


def test_a_checkpoint_stops_before_the_last_product_of_a_layer_unless_it_is_adapted_or_reentrant() -> None:
    """As torch's does: backward wants nothing of what down_proj gives, but what it takes."""
    spec, down = cell(gradient_checkpointing=True), 2 * 2048 * 32 * 4096 * 11008
    assert work_of(spec, is_reentrant=True).product_flops - work_of(spec).product_flops == down
    words = {"method": "lora", "lora_r": 8, "gradient_checkpointing": True}
    for targets, stops in (("q_proj,v_proj", True), ("all-linear", False)):
        one = cell(**words, lora_targets=targets)
        assert work_of(one, is_reentrant=True).product_flops - work_of(one).product_flops == (down if stops else 0)


def test_a_linear_layer_is_three_products_of_their_own_shapes() -> None:
    """Forward [tokens, in] by [in, out]; the gradient of the input; the gradient of the weight, which sums tokens."""
    shapes: Counter[tuple[float, ...]] = Counter()
    for one in work_of(cell()).products:
        shapes[one.m, one.n, one.k] += one.copies if 11008 in one[:3] else 0
    assert +shapes == {
        (2048, 11008, 4096): 64 + 32,  # gate_proj and up_proj; the gradient of down_proj's input
        (2048, 4096, 11008): 32 + 64,
        (11008, 4096, 2048): 64,
        (4096, 11008, 2048): 32,
    }


def test_frozen_weights_have_no_gradient_and_adapters_are_counted() -> None:
    work = work_of(cell(method="lora", lora_r=8))
    adapters = 8 * (4 * 2 * 4096 + 3 * (4096 + 11008))
    into_the_first = 3 * 4096 * 4096 + 3 * 4096 * 8  # queries, keys and values have no gradient of what they take
    whole = 4 * 2048 * (32 * PER_LAYER + HEAD) + 6 * 2048 * 32 * adapters
    assert work.product_flops == whole - 2 * 2048 * into_the_first
    assert work.dequantised_bytes == 0
    assert work.gradient_bytes == 4 * 32 * adapters


def test_each_use_of_a_packed_weight_reads_half_a_byte_and_writes_two() -> None:
    assert work_of(cell(method="qlora")).dequantised_bytes == 2.5 * 32 * PER_LAYER * 2
    assert work_of(cell(method="qlora", gradient_checkpointing=True)).dequantised_bytes == 2.5 * 32 * PER_LAYER * 3


def test_a_window_bounds_attention_and_length_squares_it() -> None:
    wide, narrow = work_of(cell(seq_len=8192, batch_size=1)), work_of(cell(seq_len=4096, batch_size=1))
    assert wide.attention_flops / narrow.attention_flops == pytest.approx(4, rel=1e-3)
    inside = work_of(cell(model="mistral-7b-v0.1", seq_len=16_384, batch_size=1))
    whole = work_of(cell(model="mistral-7b-v0.3", seq_len=16_384, batch_size=1))
    assert inside.attention_flops < 0.5 * whole.attention_flops


def test_eager_attention_multiplies_whole_squares_and_none_again_in_backward() -> None:
    flash, eager = work_of(cell()), work_of(cell(attn="eager"))
    square = 2 * 2 * 32 * 1024 * 1024 * 128  # of one product: sequences, heads, scores, width
    assert eager.product_flops - flash.product_flops == 32 * 6 * square
    assert (eager.attention_flops, eager.attention_backward_flops) == (0, 0)
    assert eager.attention_bytes == 32 * 20 * 3 * 2 * 32 * 1024 * 1024
    assert eager.model_flops == flash.model_flops


def test_what_has_kernels_of_its_own_moves_less_and_a_compiler_makes_less_of_it_still() -> None:
    """Liger's and Unsloth's norms, rotations and loss; a model without RMS norms has but their loss."""
    eager, own, all_ = (work_of(cell(), fused=fused) for fused in ("none", "kernels", "all"))
    tokens, hidden = 2048, 4096
    norms = 2 * hidden * (50 + 132 - 4.8 - 9.6)
    rotated = 2 * hidden * (40 + 48 - 4.3 - 4.3)
    assert eager.stream_bytes - own.stream_bytes == pytest.approx(
        tokens * (32 * (norms + rotated) + 32_000 * (61.5 - 8))
    )
    assert own.stream_bytes - all_.stream_bytes == pytest.approx(tokens * 32 * 11008 * (30 - 18))
    assert eager.num_kernels > own.num_kernels > all_.num_kernels
    assert eager.products == all_.products
    plain, loss = (work_of(cell(model="gpt2"), fused=fused) for fused in ("none", "kernels"))
    assert plain.stream_bytes - loss.stream_bytes == pytest.approx(tokens * 50_257 * (61.5 - 8))
    assert plain.num_kernels == loss.num_kernels


def test_a_linear_layer_casts_what_it_takes_of_an_fp32_stream() -> None:
    narrow, wide = work_of(cell(dtype="bf16")), work_of(cell(dtype="fp32", autocast="bf16"))
    norms = 2 * 4096 * (2 * 66 - 182) + 2 * 4096 * 18  # in fp32: no casts of their own; twice the residual stream
    casts = 5 * 4096 * 6 * 3  # queries, keys, values, gate and up; backward twice
    assert wide.stream_bytes - narrow.stream_bytes == pytest.approx(2048 * (32 * (norms + casts) + 4 * 4096))


def test_a_token_goes_through_some_experts_alone() -> None:
    work = work_of(cell(model="mixtral-8x7b", method="lora", lora_targets="q_proj,v_proj"))
    arch = architecture(find_model("mixtral-8x7b").config)
    active = 12.9e9 - arch.vocab_size * arch.head_width  # 12.9B are used by a token, as its authors say
    assert work.product_flops == pytest.approx(4 * 2048 * active, rel=0.02)


def test_the_foreach_step_reads_and_writes_more_than_twice_what_the_fused_one_does() -> None:
    """Of 2 bytes an element: 7 and 20 passes, and 3 to read and scale the gradient for its norm."""
    fused, foreach = (work_of(cell(optim=name)).optimizer_bytes for name in ("adamw_torch_fused", "adamw_torch"))
    assert foreach / fused == pytest.approx(23 / 10)


def test_a_fused_loss_moves_fewer_bytes() -> None:
    plain, liger = work_of(cell()), work_of(cell(fused_linear_cross_entropy=True))
    assert plain.stream_bytes - liger.stream_bytes == 53.5 * 2048 * 32_000


def test_seconds_are_those_of_the_data_sheet_at_full_rates() -> None:
    gpu, work = find_gpu("A100-80GB-SXM"), work_of(cell())
    parts = parts_of(work, gpu, 1, "ddp", IDEAL)
    by_peak = [p.count * p.flops / 312e12 / product_share(gpu, p.m, p.n, p.k) for p in work.products]
    by_bytes = [p.count * p.num_bytes / 2039e9 for p in work.products]
    assert parts.products == pytest.approx(sum(map(max, by_peak, by_bytes)))
    forward, backward = (attention_share(gpu, 1024, 128, backward=back) for back in (False, True))
    attention = work.attention_flops / forward + work.attention_backward_flops / backward
    assert parts.attention == pytest.approx(attention / 312e12)
    assert parts.stream == pytest.approx(work.stream_bytes / 2039e9)
    assert parts.optimizer == pytest.approx(work.optimizer_bytes / 2039e9)
    assert parts.collectives == parts.reduction == 0


def test_sharded_weights_are_sent_twice_and_gradients_once() -> None:
    gpu, work = find_gpu("H100-SXM"), work_of(cell())
    gathered, reduced = 2 * work.gathered_bytes, work.gradient_bytes
    gathering, scattering, reducing = (
        sent_bytes_per_second(gpu, kind, 8) for kind in ("all_gather", "reduce_scatter", "all_reduce")
    )
    fsdp = parts_of(work, gpu, 8, "fsdp", IDEAL).collectives
    assert fsdp == pytest.approx((gathered / gathering + reduced / scattering) * 7 / 8)
    assert parts_of(work, gpu, 8, "ddp", IDEAL).reduction == pytest.approx(2 * reduced / reducing * 7 / 8)
    assert parts_of(work, gpu, 8, "fsdp1", IDEAL) == parts_of(work, gpu, 8, "fsdp", IDEAL)
    near, far = (parts_of(work, gpu, count, "fsdp", IDEAL).collectives for count in (8, 16))
    assert far == pytest.approx(max(near, (gathered + reduced) / 2 / 8 / 50e9))
    l40s = find_gpu("L40S")
    two, eight = (parts_of(work, l40s, count, "fsdp", IDEAL).collectives for count in (2, 8))
    assert eight > 10 * two  # eight cards share the host's PCIe


def test_the_host_or_the_card_decides_a_micro_step() -> None:
    parts = Parts(3.0, 0, 0, 0, 0.1, 0, 1.0, 2.0, 0.5)
    assert parts.micro_seconds() == pytest.approx(3.0, rel=1e-6)
    assert parts._replace(launches=30.0).micro_seconds() == pytest.approx(30.0, rel=1e-4)
    assert parts.step_seconds(4) == pytest.approx(4 * 3 + 1 + 1 + 0.5, rel=1e-6)


def test_rates_that_made_the_steps_are_found_again() -> None:
    expected = {name: value for name, (value, _) in EXPECTED.items()}
    true = Rates(**expected | {"product": 0.86, "stream": 0.68, "kernel_seconds": 1e-5})
    made = []
    for number, (method, length, batch) in enumerate(
        (m, s, b) for m in ("full", "lora", "qlora") for s in (128, 1024, 4096) for b in (1, 4)
    ):
        work = work_of(cell(method=method, seq_len=length, batch_size=batch, gradient_checkpointing=True))
        made.append(
            StepObservation(
                source=f"s{number}",
                work=work,
                grad_accum=2,
                gpu=find_gpu("A100-80GB"),
                num_gpus=1,
                sharding="ddp",
                kernel="bitsandbytes",
                tokens_per_second=1.0,
            )
        )
    made = [replace(one, tokens_per_second=math.exp(log_error(one, true))) for one in made]
    found = fit_rates(made)
    assert all(abs(log_error(one, found)) < 0.05 for one in made)
    assert found.product == pytest.approx(0.86, rel=0.05)
    assert found.stream == pytest.approx(0.68, rel=0.1)
    assert found.kernel_seconds == pytest.approx(1e-5, rel=0.1)
    with pytest.raises(FitError, match="no published step"):
        fit_rates([])


def test_every_card_with_a_peak_has_an_estimate_and_an_unseen_one_a_wider_interval() -> None:
    fit, one = shipped_speed(), cell(method="qlora", batch_size=4, seq_len=2048, gradient_checkpointing=True)
    found = {gpu.short_name: estimate(one, gpu) for gpu in list_gpus()}
    for name, made in found.items():
        assert 0 < made.mfu < 1
        assert made.tokens_per_second.low < made.tokens_per_second.value < made.tokens_per_second.high
        assert (made.condition == "card never seen") == (name not in fit.cards)
    spread = {name: made.tokens_per_second.high / made.tokens_per_second.value for name, made in found.items()}
    assert spread["B200"] > spread["A100-80GB-SXM"]
    speeds = [found[name].tokens_per_second.value for name in ("T4", "L4", "RTX-4090", "H100-SXM", "B200")]
    assert speeds == sorted(speeds)


def test_a_damaged_fit_says_what_to_do(tmp_path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "speed.json").write_text("{")
    monkeypatch.setattr(rates_module, "data_file", lambda name: tmp_path / "speed.json")
    with pytest.raises(FitError, match="install it anew"):
        shipped_speed.__wrapped__()

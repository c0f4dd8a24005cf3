"""Predictions: they add up, say what they rest on, widen outside the fitted range and refuse far outside it."""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, replace

import pytest
from factories import CONSTANT_BYTES, TRUE, make_spec, specs, synthetic

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import find_gpu
from vramprobe.errors import OutOfRange, VramprobeError
from vramprobe.model.fit import fit
from vramprobe.model.memory_model import MemoryModel, Spread, is_same_gpu
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import ALONE, Interval, Prediction
from vramprobe.predict.uncertainty import interval_around
from vramprobe.predict.verdict import CONTEXT_ALLOWANCE_BYTES, usable_bytes, verdict
from vramprobe.spec import resolve
from vramprobe.units import GIB


@dataclass(frozen=True)
class Card:
    name: str
    total_bytes: int | None
    shares_host_memory: bool = False
    cuda_total_bytes: int | None = None
    context_bytes: int | None = None
    context_basis: str = ""


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    return fit([synthetic(spec, TRUE, CONSTANT_BYTES) for spec in specs()])


def test_terms_and_constant_add_up_to_the_value(model: MemoryModel) -> None:
    for given in (None, model):
        prediction = predict(specs()[0], given)
        assert sum(prediction.terms.values()) + prediction.constant_bytes == prediction.peak_allocated_bytes.value
        assert all(isinstance(size, int) for size in prediction.terms.values())


def test_arithmetic_alone_says_so_and_has_an_interval() -> None:
    prediction = predict(make_spec())
    assert prediction.fit is None
    assert prediction.warnings == ["arithmetic alone: no fit was given"]
    peak = prediction.peak_allocated_bytes
    assert peak.low < peak.value < peak.high


def test_a_held_out_model_is_predicted_from_the_others(model: MemoryModel) -> None:
    spec = resolve(model="smollm2-360m", method="lora", device="cpu", batch_size=2, seq_len=512)
    truth = synthetic(spec, TRUE, CONSTANT_BYTES).peak.allocated_bytes
    prediction = predict(spec, model)
    assert prediction.peak_allocated_bytes.value == pytest.approx(truth, rel=0.01)
    assert prediction.peak_allocated_bytes.low <= truth <= prediction.peak_allocated_bytes.high
    assert prediction.fit.data_fingerprint == model.data_fingerprint
    assert any("num_params 361,821,120 is outside the fitted range" in warning for warning in prediction.warnings)


def test_inside_the_range_there_is_no_warning_and_the_interval_is_narrow(model: MemoryModel) -> None:
    prediction = predict(specs()[0].model_copy(update={"seq_len": 256}), model)
    assert prediction.warnings == []
    peak = prediction.peak_allocated_bytes
    assert (peak.high - peak.low) / peak.value < 0.05


def test_outside_the_range_the_interval_widens(model: MemoryModel) -> None:
    def width(seq_len: int) -> float:
        spec = resolve(model="smollm2-135m", method="lora", device="cpu", batch_size=2, seq_len=seq_len)
        peak = predict(spec, model).peak_allocated_bytes
        return (peak.high - peak.low) / peak.value

    assert width(2048) < width(4096) < width(8192)  # fitted up to 2048


def test_a_choice_never_seen_warns(model: MemoryModel) -> None:
    spec = resolve(model="pythia-70m", method="full", optim="adafactor", device="cpu", batch_size=2, seq_len=128)
    assert predict(spec, model).warnings == ["optim adafactor was never seen; the fit knows adamw_torch_fused"]


def test_far_outside_is_refused_with_the_number_on_the_exception(model: MemoryModel) -> None:
    spec = resolve(model="llama-2-7b", method="lora", device="cpu", batch_size=2, seq_len=512)
    with pytest.raises(OutOfRange, match=r"num_params 6,738,415,616 .* untrusted number is [\d.]+ GiB") as refused:
        predict(spec, model)
    allowed = predict(spec, model, allow_extrapolation=True)
    assert refused.value.prediction == allowed
    assert allowed.peak_allocated_bytes.value > 13 * 10**9


def test_a_method_never_seen_is_refused() -> None:
    only_lora = fit([synthetic(spec, {}) for spec in specs() if spec.method == "lora"])
    with pytest.raises(OutOfRange, match="method full was never seen; the fit knows lora"):
        predict(specs()[0], only_lora)


def test_a_fit_from_another_device_is_named(model: MemoryModel) -> None:
    spec = resolve(model="pythia-70m", method="full", device="cuda", batch_size=2, seq_len=128)
    assert "the fit comes from cpu (Test CPU @ 2.00GHz), the cell is for cuda" in predict(spec, model).warnings


def test_unsupported_architecture_is_an_error() -> None:
    with pytest.raises(UnsupportedArchitecture, match="t5"):
        predict(resolve(model="t5-small", method="full", device="cpu", batch_size=1, seq_len=8))


def test_reserved_and_device_tiers_build_on_allocated(model: MemoryModel) -> None:
    tiers = model.model_copy(
        update={
            "reserved_over_allocated": Spread(value=1.1, low=1.0, high=1.2),
            "device_over_reserved_bytes": Spread(value=5e8, low=4e8, high=6e8),
        }
    )
    prediction = predict(specs()[0], tiers)
    peak = prediction.peak_allocated_bytes
    assert prediction.reserved_bytes == Interval(
        value=round(peak.value * 1.1), low=peak.low, high=round(peak.high * 1.2)
    )
    assert prediction.device_bytes.value == prediction.reserved_bytes.value + 500_000_000


@pytest.mark.parametrize("with_fit", [False, True])
@pytest.mark.parametrize("batch_size", [10**23, 10**155, 10**400])
def test_absurd_sizes_are_arithmetic_or_a_clear_error(with_fit: bool, batch_size: int, model: MemoryModel) -> None:
    spec = resolve(model="pythia-70m", method="full", device="cpu", batch_size=1, seq_len=128)
    absurd = spec.model_copy(update={"batch_size": batch_size})
    if batch_size > 10**200:
        with pytest.raises(VramprobeError, match=r"more than 10\^300 bytes"):
            predict(absurd, model if with_fit else None, allow_extrapolation=True)
        return
    prediction = predict(absurd, model if with_fit else None, allow_extrapolation=True)
    assert prediction.peak_allocated_bytes.value > 10**6 * batch_size


def with_peak(value: int, high: int) -> Prediction:
    return predict(make_spec()).model_copy(update={"peak_allocated_bytes": Interval(value=value, low=value, high=high)})


@pytest.mark.parametrize(
    ("value_gib", "high_gib", "answer"),
    [(10, 11, "fits"), (21, 22, "tight"), (22, 24, "tight"), (23.5, 24, "does not fit"), (30, 31, "does not fit")],
)
def test_verdicts_on_a_24_gib_card(value_gib: float, high_gib: float, answer: str) -> None:
    found = verdict(with_peak(int(value_gib * GIB), int(high_gib * GIB)), Card("card", 24 * GIB))
    assert found.verdict == answer
    assert found.usable_bytes == 24 * GIB - CONTEXT_ALLOWANCE_BYTES
    assert "set aside for the CUDA context" in found.reason


def test_the_driver_s_part_and_the_most_of_a_context_are_set_aside() -> None:
    card = Card("card", 24 * GIB, False, 23 * GIB, 400 * 2**20, "published")
    found = verdict(with_peak(10 * GIB, 11 * GIB), card)
    assert found.usable_bytes == 23 * GIB - 400 * 2**20
    assert "1.39 GiB set aside for the driver and the CUDA context (published): 10.00 GiB" in found.reason
    limited = replace(card, total_bytes=8 * GIB)  # as --limit-vram
    assert usable_bytes(limited, device_is_known=False) == 8 * GIB - 400 * 2**20


def test_a_known_device_tier_is_compared_with_the_whole_card() -> None:
    device = Interval(value=20 * GIB, low=19 * GIB, high=21 * GIB)
    found = verdict(with_peak(1, 1).model_copy(update={"device_bytes": device}), Card("card", 24 * GIB))
    assert (found.verdict, found.usable_bytes, found.needed_bytes) == ("fits", 24 * GIB, device)


def test_a_card_of_unknown_size_is_an_error() -> None:
    with pytest.raises(VramprobeError, match="memory of card is not known"):
        verdict(with_peak(1, 1), Card("card", None))


def test_a_deep_model_takes_milliseconds() -> None:
    spec = resolve(model="llama-3.1-405b", method="qlora", device="cuda", batch_size=1, seq_len=4096)
    predict(spec)
    began = time.perf_counter()
    predict(spec)
    assert time.perf_counter() - began < 0.2


@pytest.mark.parametrize(
    ("tiers", "answer", "said"),
    [
        ({}, "fits", r"predicted allocated memory, .*: 20.00 GiB \(up to 21.20 GiB\) of 22.90 GiB"),
        ({"reserved_bytes": 20 * GIB}, "fits", r"predicted reserved memory, .*: 20.00 GiB \(up to 21.60 GiB\) of"),
        ({"reserved_bytes": 22 * GIB}, "tight", "predicted reserved memory, .*: 22.00 GiB"),
        ({"reserved_bytes": 23 * GIB}, "does not fit", "predicted reserved memory, .*: 23.00 GiB"),
    ],
)
def test_reserved_memory_is_judged_where_it_is_known(tiers: dict[str, int], answer: str, said: str) -> None:
    found = predict(make_spec(device="cuda"))
    allocated = interval_around(20 * GIB, (0.95, 1.06))
    reserved = {name: interval_around(size, (0.95, 1.08)) for name, size in tiers.items()}
    judged = verdict(found.model_copy(update={"peak_allocated_bytes": allocated, **reserved}), find_gpu("RTX-4090"))
    assert judged.verdict == answer
    assert re.search(said, judged.reason)


# -- the fit that ships ------------------------------------------------------------------------------------------------


def test_without_a_fit_the_one_that_ships_for_the_device_predicts_and_says_so() -> None:
    words = {"model": "smollm2-360m", "method": "lora", "batch_size": 1, "seq_len": 64}
    shipped = api.predict(**words, device="cpu")
    assert shipped.fit.instrument == "cpu"
    assert shipped.fit.num_records > 40
    assert api.predict(**words, device="cpu", fit="none").fit is None
    on_a_gpu = api.predict(**words)
    assert on_a_gpu.fit.instrument == "emulated"  # no GPU has been measured
    assert any("fitted to emulated runs, which reproduce published A100 runs" in note for note in on_a_gpu.warnings)
    assert api.predict(**words, fit="none").fit is None
    assert api.predict(**words, gpu="MI300X").fit is None


def test_beyond_the_fit_that_ships_arithmetic_alone_answers_and_says_why() -> None:
    words = {"model": "llama-3.1-70b", "method": "lora", "batch_size": 1, "seq_len": 64, "device": "cpu"}
    alone = api.predict(**words)
    assert alone.fit is None
    assert alone.warnings[-1].startswith("arithmetic alone: the fit that ships for cpu does not reach so far")
    assert ALONE not in alone.warnings, "a fit ships, and is not used"
    assert api.predict(**words, allow_extrapolation=True).fit is not None


def test_a_gpus_fit_is_for_that_gpu_alone(model: MemoryModel) -> None:
    h100 = model.model_copy(update={"device": "cuda", "device_name": "NVIDIA H100 80GB HBM3"})
    assert is_same_gpu(h100, find_gpu("H100-SXM"))
    assert not is_same_gpu(h100, find_gpu("A100-80GB"))
    assert not is_same_gpu(h100.model_copy(update={"device_name": "Some Card"}), find_gpu("H100-SXM"))


def test_a_gpu_that_shares_the_cpu_s_memory_leaves_it_a_part() -> None:
    spark = find_gpu("GB10")
    assert spark.total_bytes == 122570 * 2**20
    assert usable_bytes(spark, device_is_known=False) == spark.total_bytes - 16 * GIB - spark.context_bytes
    told = verdict(predict(make_spec(device="cuda")), spark).reason
    assert "16.00 GiB for the CPU, which shares this memory" in told


def test_fp16_eager_attention_takes_its_softmax_in_one_kernel() -> None:
    """Emulated on a T4 under torch 2.13: 1,638,923,776 bytes allocated, 2,214,592,512 reserved; bf16 copies more."""
    words = {"model": "smollm2-135m", "method": "lora", "batch_size": 1, "seq_len": 2048, "gpu": "T4", "attn": "eager"}
    words |= {"gradient_checkpointing": True, "autocast": "none"}
    half, other = (api.predict(dtype=dtype, **words) for dtype in ("fp16", "bf16"))
    assert (half.peak_allocated_bytes.value, half.reserved_bytes.value) == (1_638_923_776, 2_214_592_512)
    assert other.reserved_bytes.value > half.reserved_bytes.value

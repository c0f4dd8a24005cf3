"""How wide intervals are: learnt from what was left out, and 90 % of what is larger than anything fitted is inside."""

from __future__ import annotations

import random
from collections.abc import Callable

import numpy as np
import pytest
from test_fit import CONSTANT_BYTES, TRUE, specs, synthetic

from vramprobe.architecture import architecture
from vramprobe.fit import fit
from vramprobe.interval import (
    DEFAULT_GROWTH,
    DEFAULT_UNSEEN_FAMILY,
    LEAST_GROWTH,
    conformal_quantile,
    few_models_factor,
    likeliest_power,
)
from vramprobe.memory_model import MemoryModel
from vramprobe.predict import LARGEST_GROWTH, MIN_HALF_WIDTH, bounds, half_width, predict
from vramprobe.record import RunRecord
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import CAUSES


def test_the_conformal_quantile_is_the_ceil_of_n_plus_one_times_coverage() -> None:
    values = [float(n) for n in range(1, 20)]  # 19 values: ceil(20 × 0.9) = 18
    assert conformal_quantile(values) == 18
    assert conformal_quantile(values[:8]) == 8  # ceil(9 × 0.9) = 9, more than there are: the largest
    assert conformal_quantile([3.0, 1.0, 2.0]) == 3


def test_the_power_with_which_errors_grow_comes_back() -> None:
    sizes = np.exp(np.linspace(0, 3, 400))
    noise = abs(np.random.default_rng(0).standard_normal(400))
    for power in (0.0, 0.5, 1.0):
        assert likeliest_power(noise * sizes**power, sizes) == pytest.approx(power, abs=0.1)
    assert likeliest_power(noise / sizes, sizes) == 0  # never narrower with size
    assert likeliest_power(0 * sizes, sizes) == 0


def test_few_models_widen_as_students_t_does() -> None:
    """Where a model's records agree, they count as one: of five models the normal's 1.645 becomes t's 2.132."""
    folds = np.repeat(["a", "b", "c", "d", "e"], 8)
    own = np.repeat([1.0, -1.0, 2.0, -2.0, 0.5], 8)
    assert few_models_factor(own, folds) == pytest.approx(2.1318 / 1.6449, abs=1e-3)
    apart = np.random.default_rng(1).standard_normal(40)
    assert 1 < few_models_factor(apart, folds) < 1.1
    assert few_models_factor(own[:16], folds[:16]) == pytest.approx(6.3138 / 1.6449, abs=1e-3)  # two models
    assert few_models_factor(0 * own, folds) == pytest.approx(few_models_factor(apart * 0 + 3, folds))


# -- what a fit learns -------------------------------------------------------------------------------------------------

SIZES = ("pythia-70m", "opt-125m", "smollm2-135m", "smollm2-360m", "qwen2.5-0.5b", "llama-3.2-1b")


def num_params(record: RunRecord) -> int:
    return architecture(record.spec.architecture).num_params


def scaled(record: RunRecord, factor: float) -> RunRecord:
    peak = record.peak.model_copy(update={"allocated_bytes": round(record.peak.allocated_bytes * factor)})
    return record.model_copy(update={"peak": peak})


def test_an_interval_grows_as_larger_models_left_out_of_smaller_ones_show() -> None:
    """Errors that grow with the model are learnt as growth; where they do not grow the allowance stands."""
    exact = [synthetic(spec, TRUE, CONSTANT_BYTES) for spec in specs(models=SIZES) if spec.seq_len < 2048]
    rng = random.Random(0)
    even = fit([scaled(one, 1 + rng.gauss(0, 0.01)) for one in exact])
    drifting = fit([scaled(one, 1 + 0.01 * np.log2(num_params(one) / 7e7) ** 2) for one in exact])

    def growth(model: MemoryModel) -> float:
        """Of the interval, for a model and a peak four times the largest fitted."""
        largest = max(one.peak.allocated_bytes for one in exact)
        return half_width(model, 4 * largest, 2.0) / half_width(model, largest, 0.0)

    assert 1 < growth(even) < 1.5 < growth(drifting)


def test_one_model_or_one_family_teaches_nothing_and_the_defaults_hold() -> None:
    one = [synthetic(spec, TRUE, CONSTANT_BYTES, 0.001 * (spec.seq_len == 128)) for spec in specs()]
    llama = [record for record in one if record.spec.model_type == "llama"]
    assert {record.spec.model_type for record in llama} == {"llama"}
    assert fit(llama).interval.unseen_family == DEFAULT_UNSEEN_FAMILY
    single = fit([record for record in one if record.spec.model == one[0].spec.model])
    assert single.interval.growth_per_doubling == DEFAULT_GROWTH
    assert single.interval.half_width == 2 * single.residuals["overall"].worst_absolute > 0


def test_too_few_sizes_teach_no_growth() -> None:
    """Two smaller models say how wrong a fit of two models is, not how errors grow: the allowance stands."""
    noise = random.Random(0)
    two = [synthetic(spec, TRUE, CONSTANT_BYTES, noise.gauss(0, 0.01)) for spec in specs(models=SIZES[:3])]
    assert fit(two).interval.growth_per_doubling == LEAST_GROWTH


# -- the formula -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> MemoryModel:
    one = fit([synthetic(spec, TRUE, CONSTANT_BYTES) for spec in specs()])
    width = {"half_width": 0.004, "from_bytes": 10**9, "power": 0.5, "growth_per_doubling": 0.1}
    return one.model_copy(update={"interval": one.interval.model_copy(update=width)})


@pytest.mark.parametrize(
    ("value", "doublings", "expected"),
    [(10**9, 0.0, 0.004), (10**6, 0.0, 0.004), (4 * 10**9, 0.0, 0.008), (4 * 10**9, 2.0, 0.0096)],
)
def test_the_half_width_is_the_documented_product(
    value: int, doublings: float, expected: float, model: MemoryModel
) -> None:
    assert half_width(model, value, doublings) == pytest.approx(expected, rel=1e-12)
    assert bounds("cpu", expected, 0.02) == pytest.approx((0.98 - expected, 1.02 + expected))


def test_a_half_width_stays_a_number_and_on_cuda_above_the_floor(model: MemoryModel) -> None:
    assert half_width(model, 10**300, 3000.0) == 0.004 * LARGEST_GROWTH
    assert MIN_HALF_WIDTH["cuda"] == 0.005
    assert bounds("cuda", 1e-9, 0.0) == (0.995, 1.005)
    assert bounds("cuda", 0.02, 0.0) == (0.98, 1.02)


# -- coverage beyond the fitted sizes ----------------------------------------------------------------------------------

FITTED = ("pythia-70m", "gpt2", "opt-125m", "smollm2-135m", "pythia-160m")
LARGER = ("smollm2-360m", "qwen2.5-0.5b", "gpt2-large", "pythia-1b", "llama-3.2-1b", "opt-1.3b", "qwen2.5-1.5b")
NUM_WORLDS = 20
#: Standard deviation of a measured peak, in bytes, for a peak of so many bytes.
NOISE: dict[str, Callable[[float], float]] = {
    "constant bytes": lambda size: 4e6,
    "a constant share": lambda size: 0.004 * size,
    "a share that grows": lambda size: 0.004 * size * (size / 1e9) ** 0.5,
}


def cells(models: tuple[str, ...], *setups: tuple[int, bool]) -> list[CellSpec]:
    return [
        resolve(model=model, method=method, device="cpu", batch_size=1, seq_len=seq_len, gradient_checkpointing=on)
        for model in models
        for method in ("full", "lora", "qlora")
        for seq_len, on in setups
    ]


@pytest.mark.parametrize("law", NOISE)
def test_nine_in_ten_of_larger_models_are_inside_whatever_the_noise(law: str) -> None:
    """Fitted up to 162M, 350M to 1.5B predicted, in worlds of other coefficients: 85 to 97 % inside on average."""
    fitted, larger = cells(FITTED, (64, False), (256, False), (128, True)), cells(LARGER, (64, False), (128, True))
    num_inside = 0
    for seed in range(NUM_WORLDS):
        rng = random.Random(f"{law} {seed}")
        true = {cause: rng.uniform(0.9, 1.15) for cause in CAUSES}

        def measured(spec: CellSpec, rng: random.Random = rng, true: dict[str, float] = true) -> RunRecord:
            record = synthetic(spec, true, CONSTANT_BYTES)
            size = record.peak.allocated_bytes
            return scaled(record, 1 + rng.gauss(0, NOISE[law](size)) / size)

        model = fit([measured(spec) for spec in fitted])
        for spec in larger:
            interval = predict(spec, model, allow_extrapolation=True).peak_allocated_bytes
            num_inside += interval.low <= measured(spec).peak.allocated_bytes <= interval.high
    assert 0.85 <= num_inside / (NUM_WORLDS * len(larger)) <= 0.97

"""The regression: what no record decides is exactly the physics, and out-of-memory records only raise."""

from __future__ import annotations

import random

import pytest
from factories import CONSTANT_BYTES, TRUE, make_record, specs, synthetic
from grids import grid

from vramprobe.model.fit import fit
from vramprobe.model.memory_model import MemoryModel, peak_moment
from vramprobe.model.regression import FittedValues, PeakObservation, design_of, solve
from vramprobe.records.record import Oom, RunRecord
from vramprobe.spec import CellSpec, resolve
from vramprobe.terms import moments


def constant_of(spec: CellSpec, model: MemoryModel | FittedValues) -> int:
    return model.constant_bytes.get(spec.method, max(model.constant_bytes.values()))


def predicted(spec: CellSpec, model: MemoryModel | FittedValues) -> int:
    return peak_moment(moments(spec), model.coefficients).total_bytes + constant_of(spec, model)


# -- what the records decide -------------------------------------------------------------------------------------------


def test_an_exact_world_leaves_every_number_exactly_where_physics_has_it() -> None:
    model = fit([synthetic(spec, {}) for spec in specs()])
    assert set(model.coefficients.values()) == {1.0}
    assert set(model.constant_bytes.values()) == {0}
    assert set(model.interval.half_width.values()) == {0}


def test_what_no_record_decides_stays_exactly_at_one() -> None:
    """Records a tenth of a percent off: what is in their peaks may move, and nothing else does."""
    some = [spec for spec in specs(models=("pythia-70m", "smollm2-135m")) if spec.method == "full"]
    model = fit([synthetic(spec, {}, noise=0.001 * (number % 2)) for number, spec in enumerate(some)])
    at_peaks = {cause for spec in some for cause, size in peak_moment(moments(spec), {}).terms.items() if size}
    silent = set(model.coefficients) - at_peaks
    assert silent
    assert {model.coefficients[cause] for cause in silent} == {1.0}
    assert any(model.coefficients[cause] != 1.0 for cause in at_peaks)


# -- out-of-memory records ---------------------------------------------------------------------------------------------


def test_an_out_of_memory_record_is_a_lower_bound() -> None:
    base = [synthetic(spec, {}) for spec in specs()]
    spec = specs()[0].model_copy(update={"seed": 9})
    size = max(moment.total_bytes for moment in moments(spec))

    def with_bound(share: float) -> MemoryModel:
        oom = Oom(phase="backward", allocated_bytes=round(size * share), requested_bytes=0, message="out of memory")
        return fit([*base, make_record(spec, outcome=oom)])

    def predicted(model: MemoryModel) -> int:
        return peak_moment(moments(spec), model.coefficients).total_bytes + constant_of(spec, model)

    assert with_bound(0.5).num_lower_bounds == 1
    assert with_bound(0.5).coefficients == fit(base).coefficients  # far below: it says nothing
    assert predicted(with_bound(1.05)) > predicted(fit(base)) * 1.002


def out_of_memory(spec: CellSpec, size: int) -> RunRecord:
    oom = Oom(phase="backward", allocated_bytes=size // 2, requested_bytes=size - size // 2, message="out of memory")
    return make_record(spec, outcome=oom, attempt_id=f"{spec.fingerprint}-{size}")


def learnt(records: list[RunRecord]) -> FittedValues:
    """The regression alone: what intervals are made of takes no part in a predicted value."""
    sizes = [
        (one.peak.allocated_bytes, False)
        if one.peak
        else (one.outcome.allocated_bytes + one.outcome.requested_bytes, True)
        for one in records
    ]
    return solve(
        design_of([PeakObservation(one, moments(one.spec), *size, 1) for one, size in zip(records, sizes, strict=True)])
    )


OTHERS = [
    resolve(model=model, method=method, device="cpu", batch_size=batch_size, seq_len=seq_len)
    for model in ("smollm2-360m", "qwen2.5-0.5b", "gpt2")
    for method in ("full", "lora", "qlora")
    for batch_size, seq_len in ((1, 64), (4, 1024))
]


@pytest.mark.parametrize("noise", [0.0, 0.003, 0.03])
@pytest.mark.parametrize("seed", grid(range(4), 0))
def test_an_added_out_of_memory_record_never_lowers_a_prediction(seed: int, noise: float) -> None:
    """Of no cell, whatever ran out before: fitted cells, the ones that ran out, and cells nobody ran."""
    rng = random.Random(seed)
    records = [synthetic(spec, TRUE, CONSTANT_BYTES, rng.gauss(0, noise)) for spec in rng.sample(specs(), 20)]
    before = learnt(records)
    for number in range(5):
        spec = rng.choice([*specs(), *OTHERS])
        size = round(predicted(spec, before) * rng.choice([0.5, 0.99, 1.01, 1.1, 2.0]))
        cells = [spec] if rng.random() < 0.7 else [spec, spec.model_copy(update={"seed": 99})]  # once, or twice
        records = [*records, *[out_of_memory(cell.model_copy(update={"seed": number}), size) for cell in cells]]
        after = learnt(records)
        for cell in (spec, *specs(), *OTHERS):
            assert predicted(cell, after) >= predicted(cell, before), (number, cell.cell_id)
        before = after


def test_a_bound_that_no_record_contradicts_is_reached() -> None:
    """After LoRA alone, what a full cell needs beside is raised until it covers what was seen to be too little."""
    lora = [synthetic(spec, {}) for spec in specs() if spec.method == "lora"]
    full = specs()[0]
    without = fit(lora)
    size = round(predicted(full, without) * 1.05)
    assert predicted(full, fit([*lora, out_of_memory(full, size)])) == pytest.approx(size, rel=0.005)

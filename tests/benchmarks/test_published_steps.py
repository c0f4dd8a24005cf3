"""Published speed: every row is typed, counted or refused for a reason; the fit that ships is what the rows give."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import get_args

import pytest
from pydantic import ValidationError

from benchmarks.speed.published_steps import (
    NoCase,
    Reason,
    SpeedCase,
    SpeedRow,
    case_of,
    list_published_speed,
    observations,
)
from benchmarks.speed.rates_fit import fit_rates, log_error
from vramprobe.architecture import architecture
from vramprobe.catalog.shipped import data_file
from vramprobe.errors import FitError
from vramprobe.speed.rates import shipped_speed
from vramprobe.speed.work import work_of

ROWS = list_published_speed()
CASES = [(row, case_of(row)) for row in ROWS]


def row_like(**values: object) -> SpeedRow:
    """The first LoRA row of two GPUs, changed."""
    first = next(row for row, case in CASES if isinstance(case, SpeedCase) and row.method == "lora" and row.n_gpus == 2)
    return first.model_copy(update=values)


def test_every_row_is_there_and_counted_or_refused() -> None:
    assert len(ROWS) == 1307
    refused = Counter(case.reason for _, case in CASES if isinstance(case, NoCase))
    assert set(refused) == set(get_args(Reason))
    assert sum(refused.values()) + sum(isinstance(case, SpeedCase) for _, case in CASES) == 1307
    assert Counter(row.family for row in ROWS)["mlperf"] == 97


def test_shapes_have_the_parameters_that_their_rows_say() -> None:
    checked = set()
    for row, case in CASES:
        if isinstance(case, SpeedCase) and row.n_params:
            count = architecture(case.spec.architecture).num_params
            assert count == pytest.approx(row.n_params, rel=0.01), row.model
            checked.add(row.model)
    assert len(checked) > 20


@pytest.mark.parametrize(
    ("values", "reason"),
    [
        ({"tokens_per_s_per_gpu": None}, "no tokens per second"),
        ({"notes": "SUSPECT: above the peak"}, "suspect"),
        ({"method": "peft-other:vera"}, "another method"),
        ({"model": "a model of ours"}, "shape not known"),
        ({"dtype": "float8"}, "not 16 bit"),
        ({"gpu": "H100-SXM-HBM2e-500W"}, "card not in the catalog"),
        ({"seq_len": None, "packed": "padding-free"}, "lengths vary"),
        ({"batch_size": None}, "conditions not stated"),
        ({"sharding": "TP2 PP1 CP1"}, "parallel otherwise"),
        ({"sharding": "FSDP full_shard + CPU offload (True)"}, "offload"),
        ({"grad_checkpointing": "selective"}, "checkpoints some"),
    ],
)
def test_what_is_not_known_is_not_guessed(values: dict[str, object], reason: str) -> None:
    case = case_of(row_like(**values))
    assert isinstance(case, NoCase)
    assert case.reason == reason


def test_a_case_is_the_row() -> None:
    row = row_like()
    case = case_of(row)
    assert isinstance(case, SpeedCase)
    assert (case.spec.method, case.num_gpus, case.spec.batch_size) == ("lora", 2, row.batch_size)
    assert case.tokens_per_second == row.tokens_per_s_per_gpu
    assert case_of(row_like(fused_kernels="none")).fused == "none"
    assert case_of(row_like(fused_kernels="fms-foak+liger")).fused == "kernels"
    assert case_of(row_like(fused_kernels="compile")).fused == "all"


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("n_gpus", 0),
        ("tokens_per_s_per_gpu", -1.0),
        ("seq_len", "long"),
        ("source", ""),
        ("tokens_per_s_total", "nan"),
    ],
)
def test_a_row_with_a_value_that_cannot_be_is_refused(name: str, value: object) -> None:
    values = ROWS[0].model_dump() | {name: value}
    with pytest.raises(ValidationError, match=name):
        SpeedRow.model_validate(values)


def test_the_fit_that_ships_is_what_the_rows_give() -> None:
    found = [one for *_, one in observations()]
    fit = shipped_speed()
    assert fit_rates([one for one in found if not one.is_aside]) == fit.rates
    assert fit.num_configurations == sum(not one.is_aside for one in found) == sum(fit.sources.values())
    assert hashlib.sha256(data_file("published_speed.csv").read_bytes()).hexdigest()[:16] in fit.data


def test_what_its_source_ran_is_what_is_counted() -> None:
    """fms-acceleration: the Trainer's default AdamW, a foreach; dropout in adapters; reentrant checkpoints.
    llm-foundry: the first FlashAttention, whose attention takes as long as twice the operations of the second."""
    found = {row.family: (case, one) for row, case, one in observations() if row.method in ("full", "pretrain")}
    case, one = found["fms-acceleration"]
    assert case.spec.optim == "adamw_torch"
    assert one.work.products == work_of(case.spec, is_reentrant=True).products
    case, one = found["llm-foundry"]
    assert case.spec.optim == "adamw_torch_fused"
    assert one.work.attention_flops == 2 * work_of(case.spec).attention_flops
    adapted = [case for row, case, _ in observations() if row.family == "fms-acceleration" and case.spec.lora_r]
    assert {case.spec.lora_dropout for case in adapted} == {0.1}


def test_steps_whose_links_are_not_known_are_predicted_and_not_fitted_to() -> None:
    found = [one for *_, one in observations()]
    aside = [one for one in found if one.is_aside]
    assert Counter(one.source for one in aside) == {"fsdp_qlora": 4, "qwen-readme": 2}
    with pytest.raises(FitError, match="no published step"):
        fit_rates(aside)


def test_a_source_left_out_is_predicted() -> None:
    """The goal that benchmarks/speed/speed_model.md reports on, for the source that has most of the rows."""
    found = observations()
    rates = fit_rates([one for *_, one in found if one.source != "fms-acceleration"])
    errors = sorted(
        abs(log_error(one, rates))
        for _, case, one in found
        if one.source == "fms-acceleration" and case.is_well_conditioned
    )
    assert errors[len(errors) // 2] < 0.08
    assert errors[int(0.9 * len(errors))] < 0.20

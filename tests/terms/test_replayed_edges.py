"""The arithmetic's replay on a card that is too small for what its allocator would keep: does it end as the run did?

The runs are of tests/oracles (boundary), on an emulated L4.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import pytest

from vramprobe import api, catalog
from vramprobe.model.card_fit import shipped_fit
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Prediction
from vramprobe.predict.replay import with_retries
from vramprobe.predict.verdict import usable_bytes, verdict
from vramprobe.spec import CellSpec
from vramprobe.sweep.definition import load_sweep
from vramprobe.terms.replayed import num_alloc_retries, replayed

#: As it was when the runs were emulated: 480 MiB of the 23,654,825,984 bytes that CUDA sees were the context's.
L4 = replace(catalog.find_gpu("L4"), context_bytes=480 * 2**20)
ROOM = 23_654_825_984 - 480 * 2**20
ONCE, TWICE, NEVER, OUT = (
    "qwen2.5-0.5b_lora-r16-all_bf16+bf16_adamw-fused_b1s9920_ckpt",
    "gemma-3-1b_qlora-nf4-peft-r16-all_bf16+bf16_adamw-fused_b1s5248_ckpt",
    "smollm2-360m_lora-r16-all_bf16+bf16_adamw-fused_b1s9920",
    "smollm2-360m_lora-r16-all_bf16+bf16_adamw-fused_b1s10048",
)


@cache
def specs() -> dict[str, CellSpec]:
    return {spec.cell_id: spec for spec in load_sweep("emulated-edges-l4", device="cuda").cells}


@pytest.mark.parametrize(("cell", "retries"), [(ONCE, 1), (TWICE, 2), (NEVER, 0), (OUT, None)])
def test_it_ends_as_the_run_did(cell: str, retries: int | None) -> None:
    assert num_alloc_retries(specs()[cell], L4, ROOM) == retries


def predicted(cell: str) -> Prediction:
    spec = specs()[cell]
    return with_retries(predict(spec, shipped_fit("cuda", L4), gpu=L4, replays=True), spec, L4)


def test_what_fits_by_giving_blocks_back_is_tight() -> None:
    found = predicted(ONCE)
    judged = verdict(found, L4)
    assert judged.usable_bytes == usable_bytes(L4, device_is_known=False)
    assert (
        found.peak_allocated_bytes.value
        == judged.needed_bytes.value
        <= judged.usable_bytes
        < found.reserved_bytes.value
    )
    assert found.within is not None
    assert (judged.verdict, found.within.num_alloc_retries) == ("tight", 1)
    assert "gives its cached blocks back once" in judged.reason


def test_what_runs_out_even_so_does_not_fit() -> None:
    found = predicted(OUT)
    assert found.within is None
    assert verdict(found, L4).verdict == "does not fit"


def test_a_smaller_card_is_not_judged_by_a_larger_one() -> None:
    found = predicted(ONCE)
    assert verdict(found, catalog.find_gpu("T4")).verdict == "does not fit"


def test_with_room_for_all_nothing_is_given_back() -> None:
    spec = specs()[ONCE]
    assert num_alloc_retries(spec, L4, replayed(spec, L4).reserved_bytes) == 0
    assert num_alloc_retries(spec, L4, 2**30) is None


def test_whoever_asks_about_a_card_is_told() -> None:
    found = api.predict(
        gpu="L4", model=specs()[ONCE].model, method="lora", gradient_checkpointing=True, batch_size=1, seq_len=10112
    )
    assert found.within is not None
    assert found.within.limit_bytes == usable_bytes(catalog.find_gpu("L4"), device_is_known=False)

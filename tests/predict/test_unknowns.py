"""Unknowns: what nobody said widens an answer by its own bytes, and what was said does not."""

from __future__ import annotations

import pytest
from factories import on_ranks

from vramprobe import api, catalog
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.shares import near
from vramprobe.predict.unknowns import (
    FRAGMENTATION,
    VERSIONS,
    in_words,
    unknowns,
    wide_verdict,
    with_repeated_keys,
    with_unknowns,
)

CELL = {"model": "llama-3.2-1b", "method": "lora", "batch_size": 2, "seq_len": 1024}
#: The logits that a loop keeps: rows, tokens, vocabulary, two bytes.
LOGITS_BYTES = 2 * 1024 * 128256 * 2


def _ends(widen: bool = True, **words: object) -> tuple[dict[str, tuple[int, int]], Interval]:
    found = api.predict(**CELL, **words, engine="formula", widen=widen)
    return {one.name: one.allocated for one in found.unknowns}, found.peak_allocated_bytes


def test_each_unknown_widens_by_its_own_bytes() -> None:
    plain, (open_ends, widened) = api.predict(**CELL, engine="formula").peak_allocated_bytes, _ends()
    below, above = (round(share * plain.value) for share in VERSIONS)
    assert open_ends == {"loop": (0, LOGITS_BYTES), "versions": (below, above), "fragmentation": (0, 0)}
    assert widened == Interval(value=plain.value, low=plain.low - below, high=plain.high + above + LOGITS_BYTES)


def test_what_is_told_does_not_widen() -> None:
    assert set(_ends(loop="trainer")[0]) == {"versions", "fragmentation"}
    assert _ends(widen=False)[0] == {}
    spec, plain = api.cell(**CELL, device="cuda"), api.predict(**CELL, engine="formula", loop="trainer")
    told = unknowns(spec, plain, None, ("loop", "versions"))
    assert [one.name for one in told] == ["fragmentation"]  # which is of reserved memory alone
    assert with_unknowns(plain, told).peak_allocated_bytes == plain.peak_allocated_bytes


def test_fragmentation_widens_reserved_memory_at_both_ends() -> None:
    plain, found = (api.predict(**CELL, engine="formula", loop="trainer", widen=yes) for yes in (False, True))
    versions = next(one.reserved for one in found.unknowns if one.name == "versions")
    share = round(plain.reserved_bytes.value * FRAGMENTATION)
    assert found.reserved_bytes.low == plain.reserved_bytes.low - versions[0] - share
    assert found.reserved_bytes.high == plain.reserved_bytes.high + versions[1] + share


def test_a_card_without_flash_attention_may_repeat_keys() -> None:
    told = {"loop": "step-function", "dtype": "fp16", "autocast": "none"}
    cell = {"model": "tinyllama-1.1b", "method": "lora", "seq_len": 2048, "batch_size": 2, "lora_r": 32}
    cell |= {"gradient_checkpointing": True, "lora_targets": "q_proj,k_proj,v_proj,o_proj", "engine": "formula"}
    whole = api.predict(**cell, **told, gpu="T4", widen=True)
    flash = api.predict(**cell, **told, gpu="A100-80GB-SXM", widen=True)  # whose kernel repeats no key either
    kernel = {one.name: one.allocated for one in whole.unknowns}["kernel"]
    assert whole.peak_allocated_bytes.value - kernel[0] == pytest.approx(flash.peak_allocated_bytes.value, rel=0.01)
    assert kernel[0] > 2**30
    assert "kernel" not in {one.name for one in flash.unknowns}


def test_verdict_is_not_fits_where_an_unknown_decides() -> None:
    """Qwen2.5-7B ran out of a T4 in a loop that keeps its outputs (benchmarks/truth/t4.md)."""
    cell = {"model": "qwen2.5-7b", "method": "qlora", "quant": "nf4-single", "lora_r": 16, "batch_size": 2}
    cell |= {"seq_len": 1024, "dtype": "fp16", "autocast": "none", "gradient_checkpointing": True, "gpu": "T4"}
    cell |= {"lora_targets": "q_proj,k_proj,v_proj,o_proj", "optim": "adamw_torch", "engine": "formula"}
    verdicts = [api.predict(**cell, widen=yes).verdict for yes in (False, True)]
    assert [one.verdict for one in verdicts if one is not None] == ["fits", "tight"]


def test_fragmentation_decides_no_verdict() -> None:
    card, plain = catalog.find_gpu("T4"), api.predict(**CELL, engine="formula", loop="trainer", gpu="T4")
    told = unknowns(api.cell(**CELL, device="cuda"), plain, None, ("loop", "versions"))
    assert wide_verdict(plain, told, card) == plain.verdict
    assert with_unknowns(plain, told).reserved_bytes.high > plain.reserved_bytes.high


def test_widest_is_first_and_said_in_words() -> None:
    found = api.predict(**CELL, engine="formula", widen=True)
    sizes = [sum(one.allocated) + sum(one.reserved) for one in found.unknowns]
    assert sizes == sorted(sizes, reverse=True)
    said = {one.name: in_words(one) for one in found.unknowns}
    assert said["loop"] == "loop, +501.00 MiB allocated: --loop names yours"
    assert said["versions"].startswith("versions, -")
    assert " and +" in said["versions"]
    assert " reserved: " in said["fragmentation"]


def test_of_several_gpus_no_option_is_named_that_they_do_not_take() -> None:
    rank = on_ranks(api.cell(**CELL, device="cuda"), 2, "fsdp")
    tells = {one.name: one.tell for one in unknowns(rank, near(rank), None, ())}
    assert set(tells) == {"loop", "versions"}
    assert not [tell for tell in tells.values() if "--loop" in tell]


def test_lower_end_is_no_less_than_nothing() -> None:
    found = api.predict(**CELL, engine="formula")
    many = unknowns_of(found) * 100
    assert with_unknowns(found, many).peak_allocated_bytes.low == 0


def unknowns_of(found: Prediction) -> list:
    return unknowns(api.cell(**CELL, device="cuda"), found, None, ())


def test_cpu_cells_have_none() -> None:
    spec = api.cell(**CELL, device="cpu")
    assert unknowns(spec, api.predict(**CELL, device="cpu", engine="formula"), None, ()) == []


def test_repeated_keys_are_as_many_as_queries() -> None:
    spec = api.cell(**CELL, device="cuda")
    assert with_repeated_keys(spec).architecture["num_key_value_heads"] == 32
    assert catalog.find_model("llama-3.2-1b").config["num_key_value_heads"] == 8

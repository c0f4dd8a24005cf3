"""Unknowns: what nobody said widens an answer by its own bytes, and what was said does not."""

from factories import on_ranks

from vramprobe import api, catalog
from vramprobe.predict.prediction import Interval
from vramprobe.predict.shares import near
from vramprobe.predict.unknowns import FRAGMENTATION, VERSIONS, in_words, unknowns, wide_verdict, with_unknowns

#: A recipe of it ships.
CELL = {"model": "llama-3.2-1b", "method": "lora", "batch_size": 2, "seq_len": 1024}
#: The logits that a loop keeps: rows, tokens, vocabulary, two bytes.
LOGITS_BYTES = 2 * 1024 * 128256 * 2


def _ends(widen: bool = True, **words: object) -> tuple[dict[str, tuple[int, int]], Interval]:
    found = api.predict(**CELL, **words, widen=widen)
    return {one.name: one.allocated for one in found.unknowns}, found.peak_allocated_bytes


def test_each_unknown_widens_by_its_own_bytes() -> None:
    plain, (open_ends, widened) = api.predict(**CELL).peak_allocated_bytes, _ends()
    below, above = (round(share * plain.value) for share in VERSIONS)
    assert open_ends == {"loop": (0, LOGITS_BYTES), "versions": (below, above), "fragmentation": (0, 0)}
    assert widened == Interval(value=plain.value, low=plain.low - below, high=plain.high + above + LOGITS_BYTES)


def test_what_is_told_does_not_widen() -> None:
    assert set(_ends(loop="trainer")[0]) == {"versions", "fragmentation"}
    assert _ends(widen=False)[0] == {}
    spec, plain = api.cell(**CELL, device="cuda"), api.predict(**CELL, loop="trainer")
    told = unknowns(spec, plain, ("loop", "versions"))
    assert [one.name for one in told] == ["fragmentation"]  # which is of reserved memory alone
    assert with_unknowns(plain, told).peak_allocated_bytes == plain.peak_allocated_bytes


def test_fragmentation_widens_reserved_memory_at_both_ends() -> None:
    plain, found = (api.predict(**CELL, loop="trainer", widen=yes) for yes in (False, True))
    versions = next(one.reserved for one in found.unknowns if one.name == "versions")
    share = round(plain.reserved_bytes.value * FRAGMENTATION)
    assert found.reserved_bytes.low == plain.reserved_bytes.low - versions[0] - share
    assert found.reserved_bytes.high == plain.reserved_bytes.high + versions[1] + share


def test_verdict_is_not_fits_where_an_unknown_decides() -> None:
    verdicts = [api.predict(**CELL, gpu="12GiB", widen=yes).verdict for yes in (False, True)]
    assert [one.verdict for one in verdicts if one is not None] == ["fits", "tight"]


def test_fragmentation_decides_no_verdict() -> None:
    card, plain = catalog.find_gpu("L4"), api.predict(**CELL, loop="trainer", gpu="L4")
    told = unknowns(api.cell(**CELL, device="cuda"), plain, ("loop", "versions"))
    assert wide_verdict(plain, told, card) == plain.verdict
    assert with_unknowns(plain, told).reserved_bytes.high > plain.reserved_bytes.high


def test_widest_is_first_and_said_in_words() -> None:
    found = api.predict(**CELL, widen=True)
    sizes = [sum(one.allocated) + sum(one.reserved) for one in found.unknowns]
    assert sizes == sorted(sizes, reverse=True)
    said = {one.name: in_words(one) for one in found.unknowns}
    assert said["loop"] == "loop, +501.00 MiB allocated: --loop names yours"
    assert said["versions"].startswith("versions, -")
    assert " and +" in said["versions"]
    assert " reserved: " in said["fragmentation"]


def test_of_several_gpus_no_option_is_named_that_they_do_not_take() -> None:
    rank = on_ranks(api.cell(**CELL, device="cuda"), 2, "fsdp")
    tells = {one.name: one.tell for one in unknowns(rank, near(rank), ())}
    assert set(tells) == {"loop", "versions"}
    assert not [tell for tell in tells.values() if "--loop" in tell]


def test_lower_end_is_no_less_than_nothing() -> None:
    found = api.predict(**CELL)
    many = unknowns(api.cell(**CELL, device="cuda"), found, ()) * 100
    assert with_unknowns(found, many).peak_allocated_bytes.low == 0

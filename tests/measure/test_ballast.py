"""A smaller card on a larger one: the ballast's arithmetic with a made-up driver, and its place in the cuda tiers."""

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
from factories import make_spec

from vramprobe.errors import VramprobeError
from vramprobe.measure import ballast
from vramprobe.measure.ballast import Ballast, hold_the_rest
from vramprobe.units import GIB, MIB

CARD = 140 * GIB
CONTEXT = 500 * MIB
PAGE = 2 * MIB


@dataclass
class FakeCard:
    """A card with a context and others' memory on it; the driver gives no piece above ``largest``, and rounds to pages.

    ``overhead``: what each allocation takes beyond its size, as page tables do.
    """

    others: int = 0
    own: int = CONTEXT
    largest: int = 2**62
    overhead: int = 0
    pieces: list[int] = field(default_factory=list)
    refused: int = 0

    @property
    def used(self) -> int:
        return self.others + self.own + sum(self.pieces) + self.overhead * len(self.pieces)

    def free_bytes(self) -> int:
        return CARD - self.used

    def allocate(self, num_bytes: int) -> bool:
        if num_bytes > min(self.largest, self.free_bytes()):
            self.refused += 1
            return False
        self.pieces.append(-(-num_bytes // PAGE) * PAGE)
        return True


@pytest.mark.parametrize("limited", [24 * GIB, 80 * GIB, 24_564 * MIB, 24 * GIB + 12_345, CARD - 1])
def test_the_cell_finds_what_an_empty_card_of_that_size_would_have(limited: int) -> None:
    card = FakeCard()
    held = hold_the_rest(card, limit_bytes=limited, own_bytes=CONTEXT)
    assert 0 <= card.free_bytes() - (limited - CONTEXT) < PAGE
    assert held == Ballast(
        limit_bytes=limited, held_bytes=sum(card.pieces), num_pieces=len(card.pieces), free_bytes=card.free_bytes()
    )
    assert card.refused == 0


@pytest.mark.parametrize(("others", "num_pieces"), [(0, 29), (60, 14)])
def test_by_hand(others: int, num_pieces: int) -> None:
    """24 GiB of 140: 500 MiB are the context, 23.5 GiB and 12 MiB stay free, so 116 GiB are held, in 29 pieces of 4;
    others' 60 GiB are in nobody's way."""
    card = FakeCard(others=others * GIB)
    held = hold_the_rest(card, limit_bytes=24 * GIB, own_bytes=CONTEXT)
    assert (held.held_bytes, held.num_pieces) == (num_pieces * 4 * GIB, num_pieces)
    assert held.free_bytes == card.free_bytes() == 24 * GIB - 500 * MIB


@pytest.mark.parametrize("largest", [3 * GIB, 100 * MIB, 5 * MIB, PAGE])
def test_fragments_are_filled_with_smaller_pieces(largest: int) -> None:
    card = FakeCard(largest=largest, others=100 * GIB)
    held = hold_the_rest(card, limit_bytes=24 * GIB, own_bytes=CONTEXT)
    assert card.free_bytes() == 24 * GIB - CONTEXT
    assert max(card.pieces) <= largest
    assert held.held_bytes == 16 * GIB
    assert card.refused <= 12  # halved at most from 4 GiB to one page


def test_what_allocations_take_besides_is_made_up_for() -> None:
    card = FakeCard(overhead=300_000)
    hold_the_rest(card, limit_bytes=24 * GIB, own_bytes=CONTEXT)
    assert abs(card.free_bytes() - (24 * GIB - CONTEXT)) <= PAGE


@pytest.mark.parametrize(
    ("card", "limited", "said"),
    [
        (FakeCard(others=120 * GIB), 24 * GIB, r"24\.00 GiB.*19\.51 GiB free.*allow at most 20\.00 GiB"),
        (FakeCard(), 141 * GIB, r"allow at most 140\.00 GiB"),
        (FakeCard(), CONTEXT, "context of this process alone takes 500"),
        (FakeCard(), 100 * MIB, "context of this process alone takes 500"),
        (FakeCard(largest=0), 24 * GIB, "the driver refuses to give it"),  # and no endless loop
    ],
    ids=["others", "larger than the card", "only the context", "less than the context", "a driver that gives nothing"],
)
def test_a_size_that_cannot_be_had_is_refused(card: FakeCard, limited: int, said: str) -> None:
    with pytest.raises(VramprobeError, match=said):
        hold_the_rest(card, limit_bytes=limited, own_bytes=CONTEXT)
    assert card.pieces == []


def test_a_refusal_is_no_out_of_memory() -> None:
    """An impossible limit is the user's to mend; it must not be taken for the cell's OOM."""
    pytest.importorskip("torch")
    from vramprobe.measure.run_cell import outcome_of

    with pytest.raises(VramprobeError) as refusal:
        hold_the_rest(FakeCard(others=139 * GIB), limit_bytes=24 * GIB, own_bytes=CONTEXT)
    assert outcome_of(refusal.value, None).kind == "error"


def test_the_record_says_what_is_not_limited() -> None:
    words = Ballast(limit_bytes=24 * GIB, held_bytes=116 * GIB, num_pieces=29, free_bytes=23 * GIB).in_words()
    for word in ("24.00 GiB", "116.00 GiB", "29 ", "speed", "architecture", "driver keeps", "other processes"):
        assert word in words
    assert "\n" not in words


@pytest.fixture
def instrument(monkeypatch: pytest.MonkeyPatch) -> tuple[Any, FakeCard]:
    """The cuda instrument of a fake card with 3 GiB of others' on it, after its context was made."""
    pytest.importorskip("torch")
    from vramprobe.measure import cuda

    card = FakeCard(others=3 * GIB, own=0)
    watched = SimpleNamespace(used_bytes=lambda: card.used)
    monkeypatch.setattr(cuda.torch.cuda, "get_device_properties", lambda index: SimpleNamespace(uuid="0"))
    monkeypatch.setattr(cuda.torch.cuda, "memory_reserved", lambda *_: 2 * MIB)
    monkeypatch.setattr(cuda, "open_device", lambda uuid: watched)
    made = cuda.CudaInstrument(24 * GIB)
    card.own = CONTEXT + 2 * MIB  # with torch's first segment
    return made, card


def test_the_ballast_is_in_the_baseline_and_not_in_the_cell(instrument: tuple[Any, FakeCard]) -> None:
    made, card = instrument
    before = made._device_used_bytes(), made._context_bytes()
    assert before == (CONTEXT + 2 * MIB, CONTEXT)
    made._become_smaller(card, 24 * GIB)
    assert (made._device_used_bytes(), made._context_bytes()) == before
    assert card.free_bytes() == 24 * GIB - CONTEXT - 2 * MIB
    card.own += GIB  # the cell's own use still counts
    assert made._device_used_bytes() == before[0] + GIB
    (words,) = made.warnings
    assert words.startswith("limited to 24.00 GiB: ")


def test_without_nvml_nothing_is_limited(instrument: tuple[Any, FakeCard]) -> None:
    made, card = instrument
    made._nvml = None
    with pytest.raises(VramprobeError, match="needs NVML"):
        made._become_smaller(card, 24 * GIB)
    assert card.pieces == []


def test_the_worker_hands_the_size_to_the_instrument(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    from vramprobe.measure import cuda, run_cell

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(cuda, "CudaInstrument", lambda limit_vram_bytes, device_index: limit_vram_bytes)
    assert run_cell.instrument_for(make_spec(device="cuda", limit_vram="24GiB")) == 24 * GIB
    assert run_cell.instrument_for(make_spec(device="cuda")) is None


class FakeLibrary:
    """libcuda with one context; answers as the driver does."""

    def __init__(self, status: int = 0, context: int = 1, free: int = 7 * GIB) -> None:
        def take_context(pointer: Any) -> int:
            pointer._obj.value = context
            return 0

        def tell_memory(free_pointer: Any, total_pointer: Any) -> int:
            free_pointer._obj.value, total_pointer._obj.value = free, CARD
            return 0

        def allocate(pointer: Any, num_bytes: int) -> int:
            self.asked = num_bytes
            return status

        self.cuCtxGetCurrent, self.cuMemGetInfo_v2, self.cuMemAlloc_v2 = take_context, tell_memory, allocate


def test_the_drivers_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    def driver(**answers: int) -> tuple[ballast.CudaDriver, FakeLibrary]:
        library = FakeLibrary(**answers)
        monkeypatch.setattr(ballast.ctypes, "CDLL", lambda name: library)
        return ballast.CudaDriver(), library

    card, library = driver()
    assert card.free_bytes() == 7 * GIB
    assert card.allocate(116 * GIB)
    assert library.asked == 116 * GIB
    assert not driver(status=2)[0].allocate(GIB)  # CUDA_ERROR_OUT_OF_MEMORY
    with pytest.raises(VramprobeError, match="error 700"):
        driver(status=700)[0].allocate(GIB)
    with pytest.raises(VramprobeError, match="no CUDA context"):
        driver(context=0)


def test_a_machine_without_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ballast.ctypes, "CDLL", missing)
    with pytest.raises(VramprobeError, match=r"libcuda\.so\.1"):
        ballast.CudaDriver()

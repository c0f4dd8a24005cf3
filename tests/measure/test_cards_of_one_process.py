"""Several cards of one process: their entries in a record, and what the terminal says of them."""

import pytest
import torch
from factories import make_record, make_spec

from vramprobe.cli import display_record
from vramprobe.measure import environment, isolation
from vramprobe.measure.cards import with_cards
from vramprobe.measure.observation import Observation
from vramprobe.records.outcomes import Error, Invalid, Ok
from vramprobe.records.phase_memory import PhaseMemory
from vramprobe.records.record import record_from_json
from vramprobe.workload.storages import Storages, storages_of

SPEC = make_spec(device="cuda", num_gpus=2, sharding="device-map")
MODULES = [["model.embed_tokens", "model.layers.0", "model.layers.1"], ["model.layers.2", "lm_head"]]
WEIGHTS = 4096


def seen(more_bytes: int = 0, **held: int) -> Observation:
    """A card on which every step is the same, with a peak that is higher by so much."""
    sizes = {"forward": 6 * WEIGHTS + more_bytes, "backward": 5 * WEIGHTS, "optimizer_step": 2 * WEIGHTS}
    phases = [PhaseMemory(name="load", allocated_end_bytes=WEIGHTS, allocated_peak_bytes=WEIGHTS)]
    for step in (1, 2, 3):
        phases += [
            PhaseMemory(name=name, step=step, allocated_end_bytes=WEIGHTS, allocated_peak_bytes=size)
            for name, size in (*sizes.items(), ("zero_grad", WEIGHTS))
        ]
    return Observation(phases, {"weights": WEIGHTS, "batch": 0} | held)


def test_every_card_has_its_own_peak_and_what_lies_on_it() -> None:
    record = with_cards(make_record(SPEC), [seen(), seen(512)], MODULES)
    assert isinstance(record.outcome, Ok)
    assert [(card.rank, card.modules) for card in record.ranks] == list(enumerate(MODULES))
    assert [card.peak.allocated_bytes for card in record.ranks] == [6 * WEIGHTS, 6 * WEIGHTS + 512]
    assert record_from_json(record.to_json_line()) == record


def test_doubts_name_their_card() -> None:
    """One that holds less between steps than its tensors add up to."""
    record = with_cards(make_record(SPEC), [seen(), seen(weights=2 * WEIGHTS)], MODULES)
    assert isinstance(record.outcome, Invalid)
    assert record.outcome.reasons == [
        f"card 1: the allocator holds {WEIGHTS} B less between steps than the live tensors add up to"
    ]


def test_a_cell_that_failed_keeps_what_its_cards_saw_and_its_outcome() -> None:
    failed = make_record(SPEC, outcome=Error(error_type="Broken", message="broke")).model_copy(update={"peak": None})
    record = with_cards(failed, [seen(), seen()], None)
    assert (record.outcome.kind, len(record.ranks)) == ("error", 2)
    assert all(card.phases and card.peak is None and card.modules is None for card in record.ranks)


def test_storages_know_their_card() -> None:
    both = storages_of([torch.zeros(4), torch.zeros(8)])
    assert both.cards == {}  # the host's are on none
    first, second = both
    both.cards = {first: 0, second: 1}
    assert (both.on_card(0), both.on_card(1), both.on_card(2)) == ({first: 16}, {second: 32}, {})
    other = Storages({1: 2})
    other.cards = {1: 1}
    assert (both | other).on_card(1) == {second: 32, 1: 2}


def test_the_terminal_says_which_layers_lie_where(capsys: pytest.CaptureFixture[str]) -> None:
    record = with_cards(make_record(SPEC), [seen(), seen(512)], MODULES)
    display_record.print_record(record)
    said = capsys.readouterr().out
    assert 'one process over 2 cards (device_map="auto"), the highest is shown above:' in said
    assert "model.embed_tokens, model.layers.0 to 1\n" in said
    assert "model.layers.2, lm_head\n" in said


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], ""),
        (["lm_head"], "lm_head"),
        (["a.0", "a.1", "a.2", "a.4", "b.5", "b.6"], "a.0 to 2, a.4, b.5 to 6"),
        (["model.layers.9", "model.layers.10", "model.norm"], "model.layers.9 to 10, model.norm"),
    ],
)
def test_runs_of_layers_are_said_in_short(names: list[str], said: str) -> None:
    assert display_record._in_short(names) == said


def test_no_rank_alone_is_offered_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "num_visible_gpus", lambda: 1)
    monkeypatch.delenv("VRAMPROBE_EMULATED_MACHINE", raising=False)
    with pytest.raises(Exception, match="needs as many GPUs, and 1 are visible") as raised:
        isolation.require_packages([SPEC])
    assert "only-rank" not in str(raised.value)

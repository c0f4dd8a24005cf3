"""The fewest GPUs, by recordings of a few numbers of them: which are recorded, which kinds are left out, and why."""

from typing import Any

import pytest
from factories import on_ranks
from predictions import some_prediction

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import find_gpu
from vramprobe.cli.display_prediction import print_min_gpus
from vramprobe.errors import SpecError
from vramprobe.predict import recorded
from vramprobe.predict.at_hand import NoRecipe
from vramprobe.predict.fewest import RECORDED_NUMBERS
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.verdict import verdict
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec
from vramprobe.units import GIB

#: The kinds that divide what a rank holds.
DIVIDING = ("zero1", "zero2", "zero3", "fsdp", "fsdp-shard-grad-op")
CELL = {"batch_size": 1, "seq_len": 512, "gradient_checkpointing": True}
FULL = CELL | {"model": "llama-3.1-8b", "method": "full", "recipe": "mixed"}


def test_what_none_does_is_refused() -> None:
    with pytest.raises(SpecError, match="no kind of sharding that divides a model does this: offload optimizer: FSDP"):
        api.min_gpus_by_sharding(gpu="RTX-4090", offload="optimizer", **FULL | {"optim": "adafactor"})
    with pytest.raises(SpecError, match="offload: 'weights' given; allowed: none, optimizer, params"):
        api.min_gpus_by_sharding(gpu="RTX-4090", offload="weights", **FULL)
    with pytest.raises(SpecError, match=r"ddp divides nothing.*use zero1, zero2, zero3, fsdp"):
        api.min_gpus(gpu="RTX-4090", sharding="ddp", **FULL)
    with pytest.raises(UnsupportedArchitecture, match="ask how many make a group: sharding fsdp1"):
        api.min_gpus(gpu="RTX-4090", sharding="fsdp1-hybrid", **FULL)
    with pytest.raises(NoRecipe, match="device-map has one process for all GPUs; it is run instead"):
        api.min_gpus(gpu="RTX-4090", sharding="device-map", **FULL)


def ranks_that_share(own: float, shared: float, asked: list[int]) -> Any:
    """In place of a recording: GiB of each rank, and those that all divide among them."""

    def predicted(one: CellSpec, **_: Any) -> Prediction:
        asked.append(one.num_gpus)
        assert one.is_sharded == (one.num_gpus > 1 or one.offload != "none")
        size = int((own + shared / one.num_gpus) * GIB)
        return some_prediction(**{"reserved_bytes": Interval(value=size, low=size, high=round(size * 1.04))})

    return predicted


@pytest.mark.parametrize(
    ("own", "shared"), [(3.0, 5.0), (3.0, 60.0), (2.0, 140.0), (21.8, 9.0), (1.0, 2000.0), (30.0, 100.0), (22.5, 12.0)]
)
def test_by_recordings_the_least_power_of_two_in_few_of_them(
    monkeypatch: pytest.MonkeyPatch, own: float, shared: float
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(recorded, "predict", ranks_that_share(own, shared, asked))
    found = api.min_gpus(gpu="RTX-4090", sharding="fsdp", model="glm-4-9b", method="lora", batch_size=1, seq_len=512)
    recordings = len(asked)
    assert recordings == len(set(asked)) <= 6
    card = find_gpu("RTX-4090")
    words = {"model": "pythia-70m", "method": "lora", "device": "cuda", "batch_size": 1, "seq_len": 8}
    one = resolve(**words)
    cells = {number: on_ranks(one, number, "fsdp") if number > 1 else one for number in RECORDED_NUMBERS}
    each = {number: verdict(recorded.predict(cell), card).verdict for number, cell in cells.items()}
    fits = next((number for number in each if each[number] == "fits"), None)
    tight = next((number for number in each if each[number] != "does not fit"), None)
    assert (found.num_gpus, found.tight_num_gpus) == (fits, None if tight == fits else tight)
    assert found.verdict.verdict == each[found.verdict_num_gpus]


def test_the_verdict_is_that_of_the_forward_question(monkeypatch: pytest.MonkeyPatch) -> None:
    """19.5 GiB of 22.9 on 2 GPUs fit as they are, and not with what other releases may add."""
    monkeypatch.setattr(recorded, "predict", ranks_that_share(3.0, 33.0, []))
    words = {"gpu": "RTX-4090", "sharding": "fsdp", "model": "glm-4-9b", "method": "lora", "batch_size": 1}
    narrow, wide = (api.min_gpus(**words, seq_len=512, widen=widen) for widen in (False, True))
    assert (narrow.num_gpus, wide.num_gpus, wide.tight_num_gpus) == (2, 4, 2)
    forward = [api.predict(**words, seq_len=512, widen=True, num_gpus=number).verdict for number in (4, 2)]
    assert [one.verdict for one in forward] == ["fits", "tight"]
    assert wide.verdict == forward[0]


def test_one_kind_is_recorded_and_the_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "predict", ranks_that_share(3.0, 60.0, []))
    words = CELL | {"gpu": "RTX-4090", "model": "glm-4-9b", "method": "lora"}
    found = api.min_gpus_by_sharding(**words)
    assert [(one.sharding, one.num_gpus) for one in found.answers] == [("fsdp", 4)]
    others = [kind for kind in DIVIDING if kind != "fsdp"]
    assert found.left_out == {"each is recorded where it is named: --sharding": others}
    with pytest.raises(SpecError, match="engine: 'formula' given; allowed: auto, recipe, measured"):
        api.min_gpus(engine="formula", sharding="fsdp", **words)


@pytest.mark.parametrize(
    ("offload", "first", "left_out"), [("params", "fsdp", "zero1, zero2"), ("optimizer", "zero1", "fsdp")]
)
def test_offloaded_the_first_kind_that_can(
    monkeypatch: pytest.MonkeyPatch, offload: str, first: str, left_out: str
) -> None:
    monkeypatch.setattr(recorded, "predict", ranks_that_share(3.0, 60.0, []))
    found = api.min_gpus_by_sharding(gpu="RTX-4090", offload=offload, **FULL)
    [one] = found.answers
    assert (one.sharding, one.offload) == (first, offload)
    assert one.host_bytes == pytest.approx(16 * 8_030_261_248, rel=0.2)
    assert any(", ".join(kinds).startswith(left_out) for reason, kinds in found.left_out.items() if offload in reason)


def test_what_is_near_is_recorded_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Full training of an 8B in mixed precision on 24 GB cards: near 16 of them, and not the eight of a machine."""
    asked: list[int] = []
    monkeypatch.setattr(recorded, "predict", ranks_that_share(5.0, 160.0, asked))
    found = api.min_gpus(gpu="RTX-4090", sharding="fsdp", **FULL)
    assert found.num_gpus == 16
    assert asked == [16, 8]


def test_the_table_says_what_was_recorded(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(recorded, "predict", ranks_that_share(3.0, 60.0, []))
    found = api.min_gpus_by_sharding(gpu="RTX-4090", offload="params", **FULL)
    print_min_gpus(found.answers, found.left_out)
    told = " ".join(capsys.readouterr().out.split())
    assert told.startswith(
        "fewest GeForce RTX 4090 of 1, 2, 4 … 128, by recordings of the first rank, emulated: sharding"
    )
    assert f"on a host fsdp {found.answers[0].num_gpus} " in told
    assert "note: without zero1, zero2: offload params: DeepSpeed keeps parameters" in told

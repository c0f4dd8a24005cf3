"""The fewest GPUs by every kind of sharding: which are asked, which are left out, and why."""

from __future__ import annotations

from typing import Any

import pytest
from command_line import vramprobe
from grids import exhaustive

from vramprobe import api
from vramprobe.architecture import UnsupportedArchitecture
from vramprobe.catalog import find_gpu
from vramprobe.errors import SpecError
from vramprobe.predict import recorded
from vramprobe.predict.fewest import RECORDED_NUMBERS
from vramprobe.predict.predict import predict
from vramprobe.predict.prediction import Interval, Prediction
from vramprobe.predict.verdict import verdict
from vramprobe.spec import CellSpec, resolve
from vramprobe.units import GIB

#: The kinds that divide what a rank holds.
DIVIDING = ("zero1", "zero2", "zero3", "fsdp", "fsdp-shard-grad-op")
CELL = {"batch_size": 1, "seq_len": 512, "gradient_checkpointing": True}
FULL = CELL | {"model": "llama-3.1-8b", "method": "full", "recipe": "mixed"}


def test_every_kind_is_asked_as_if_it_were_named() -> None:
    words = CELL | {"model": "llama-3.1-8b", "method": "qlora", "gpu": "T4"}
    found = api.min_gpus_by_sharding(**words)
    assert [one.sharding for one in found.answers] == [*DIVIDING, "device-map"]
    assert found.answers == [api.min_gpus(sharding=one.sharding, **words) for one in found.answers]
    assert found.left_out == {}


@pytest.mark.parametrize(
    ("offload", "kinds"),
    [("params", ["zero3", "fsdp", "fsdp-shard-grad-op"]), ("optimizer", ["zero1", "zero2", "zero3"])],
)
def test_offloaded_the_kinds_that_can(offload: str, kinds: list[str]) -> None:
    found = api.min_gpus_by_sharding(gpu="RTX-4090", offload=offload, **FULL)
    assert [(one.sharding, one.offload) for one in found.answers] == [(kind, offload) for kind in kinds]
    assert found.answers == [api.min_gpus(gpu="RTX-4090", sharding=kind, offload=offload, **FULL) for kind in kinds]
    assert sorted(kind for named in found.left_out.values() for kind in named) == sorted(
        {*DIVIDING, "device-map"} - set(kinds)
    )


@exhaustive
def test_a_kind_that_cannot_is_left_out_with_its_reason() -> None:
    found = api.min_gpus_by_sharding(gpu="RTX-4090", model="pythia-6.9b", method="full", **CELL)
    assert [one.sharding for one in found.answers] == list(DIVIDING)
    [(reason, kinds)] = found.left_out.items()
    assert kinds == ["device-map"]
    assert reason.startswith("there is no arithmetic for sharding device-map of a gpt_neox")


def test_what_none_does_is_refused() -> None:
    with pytest.raises(SpecError, match="no kind of sharding that divides a model does this: offload optimizer: Deep"):
        api.min_gpus_by_sharding(gpu="RTX-4090", offload="optimizer", **FULL | {"optim": "adafactor"})
    with pytest.raises(SpecError, match="offload: 'weights' given; allowed: none, optimizer, params"):
        api.min_gpus_by_sharding(gpu="RTX-4090", offload="weights", **FULL)
    with pytest.raises(UnsupportedArchitecture, match="under zero1: its layers differ"):
        api.min_gpus_by_sharding(gpu="RTX-4090", **FULL | {"model": "deepseek-v2-lite"})


def test_the_command_line_says_what_fits_and_what_was_left_out() -> None:
    words = [
        "--model",
        "llama-3.1-8b",
        "--method",
        "full",
        "--batch-size",
        "1",
        "--seq-len",
        "512",
        "--gpu",
        "RTX-4090",
    ]
    shown = vramprobe("predict", *words, "--min-gpus", "--offload", "params")
    assert shown.returncode == 0, shown.stderr
    title, heading, *rows = shown.stdout.splitlines()
    assert title == "fewest GeForce RTX 4090 by arithmetic, per rank or card, not measured:"
    assert heading.split() == ["sharding", "fits", "tight", "on", "each", "up", "to", "of", "on", "a", "host"]
    assert [row.split()[0] for row in rows[:3]] == ["zero3", "fsdp", "fsdp-shard-grad-op"]
    assert "note: without zero1, zero2: offload params: DeepSpeed keeps parameters" in " ".join(rows[3:])


def test_what_each_holds_is_of_the_number_that_is_shown() -> None:
    """Of the fewest that fit, else of those on which it is tight; where none are, of one machine, never of 4,096."""
    words = FULL | {"gpu": "RTX-4090"}
    shown = set()
    for one in api.min_gpus_by_sharding(**words).answers:
        at = one.num_gpus or one.tight_num_gpus
        assert one.verdict_num_gpus == (at or 8)
        shown.add("fits" if one.num_gpus else "tight" if at else "none")
        if at and at > 1 and one.sharding != "device-map":
            cell = {name: value for name, value in words.items() if name != "gpu"}
            found = api.predict(gpu="RTX-4090", sharding=one.sharding, num_gpus=at, **cell)
            assert one.verdict == verdict(found, find_gpu("RTX-4090"))
    assert shown == {"fits", "tight", "none"}


def ranks_that_share(own: float, shared: float, asked: list[int]) -> Any:
    """In place of a recording: GiB of each rank, and those that all divide among them."""

    def predicted(one: CellSpec, **_: Any) -> Prediction:
        asked.append(one.num_gpus)
        assert (one.sharding is None) == (one.num_gpus == 1)
        size = int((own + shared / one.num_gpus) * GIB)
        any_cell = resolve(model="pythia-70m", method="lora", device="cuda", batch_size=1, seq_len=8)
        return predict(any_cell).model_copy(
            update={"engine": "recipe", "reserved_bytes": Interval(value=size, low=size, high=round(size * 1.04))}
        )

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
    each = {
        number: verdict(
            recorded.predict(
                resolve(**words).model_copy(update={"num_gpus": number, "sharding": "fsdp" if number > 1 else None})
            ),
            card,
        ).verdict
        for number in RECORDED_NUMBERS
    }
    fits = next((number for number in each if each[number] == "fits"), None)
    tight = next((number for number in each if each[number] != "does not fit"), None)
    assert (found.num_gpus, found.tight_num_gpus) == (fits, None if tight == fits else tight)
    assert found.engine == "recipe"
    assert found.verdict.verdict == each[found.verdict_num_gpus]


def test_without_arithmetic_one_kind_is_recorded_and_the_others_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorded, "predict", ranks_that_share(3.0, 60.0, []))
    words = CELL | {"gpu": "RTX-4090", "model": "glm-4-9b", "method": "lora"}
    found = api.min_gpus_by_sharding(**words)
    assert [(one.sharding, one.num_gpus) for one in found.answers] == [("fsdp", 4)]
    assert found.left_out == {
        "each is recorded where it is named: --sharding": [*(kind for kind in DIVIDING if kind != "fsdp"), "device-map"]
    }
    with pytest.raises(UnsupportedArchitecture, match="'glm' cannot be predicted"):
        api.min_gpus(engine="formula", sharding="fsdp", **words)


def test_tensor_parallel_ranks_are_as_many_as_divide_the_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    monkeypatch.setattr(recorded, "predict", ranks_that_share(30.0, 60.0, asked))
    words = CELL | {"gpu": "RTX-4090", "model": "glm-4-9b", "method": "lora"}
    found = api.min_gpus(sharding="tp", **words)  # 32 heads, 2 of keys and values
    assert max(asked) == found.verdict_num_gpus == 2
    assert found.num_gpus is None

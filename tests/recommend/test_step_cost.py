"""The time and cost of a cell's step beside its memory: recommend's own figures, and nothing where none are at hand."""

import json
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import flags, vramprobe
from factories import on_ranks

from vramprobe import api
from vramprobe.catalog import find_gpu, gpu_or_size
from vramprobe.predict import at_hand
from vramprobe.predict.questions import cell_on_ranks
from vramprobe.recipe import book
from vramprobe.recipe.shipped import shipped_recipe
from vramprobe.recommend import recorded
from vramprobe.recommend.prices import Offer
from vramprobe.recommend.step_cost import StepCost, step_cost
from vramprobe.spec import CellSpec

QLORA = {
    "model": "llama-3.1-8b", "method": "qlora", "batch_size": 1, "seq_len": 2048, "gradient_checkpointing": True,
}  # fmt: skip


def cell(**words: Any) -> CellSpec:
    return cell_on_ranks(**{"device": "cuda"} | words)


@pytest.fixture(autouse=True)
def _nothing_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(at_hand, "kept_for", lambda *words: None)


def recommended(gpu: str, num_gpus: int, words: dict[str, Any]) -> tuple[Any, ...]:
    """Seconds of a step, tokens per second, dollars and provider that recommend has for the cell."""
    asked = {"grad_accum": 1} | words | {"gpus": [gpu], "max_gpus": num_gpus, "tokens": "1M"}
    option = next(one for one in api.recommend(**asked).options if one.num_gpus == num_gpus)
    made = option.setting.estimate
    return made.seconds, made.tokens_per_second, option.usd, option.offer and option.offer.provider, made.condition


def same_figures(cost: StepCost | None) -> tuple[Any, ...]:
    rate = cost.tokens_per_second
    return cost.step_seconds.value, rate, cost.million_tokens_usd, cost.provider, cost.condition


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "sharding", "words"),
    [
        ("RTX-4090", 1, None, QLORA | {"grad_accum": 4}),
        ("A100-80GB-SXM", 1, None, QLORA | {"method": "full", "model": "qwen2.5-1.5b", "batch_size": 2}),
        ("H100-SXM", 4, "fsdp", QLORA | {"method": "lora", "batch_size": 2}),
    ],
)
def test_the_figures_are_recommend_s(gpu: str, num_gpus: int, sharding: str | None, words: dict[str, Any]) -> None:
    spec = cell(**words) if sharding is None else on_ranks(cell(**words), num_gpus, sharding)
    ranks = {} if sharding is None else {"sharding": sharding}
    assert same_figures(step_cost(spec, find_gpu(gpu))) == recommended(gpu, num_gpus, words | ranks)


def test_eight_micro_steps_take_seven_more_than_one() -> None:
    costs = (step_cost(cell(**QLORA | {"grad_accum": accum}), find_gpu("L40S")) for accum in (1, 2, 8))
    one, two, eight = (cost.step_seconds.value for cost in costs)
    assert eight - two == pytest.approx(6 * (two - one), rel=0.02)


def test_a_million_tokens_cost_their_hours_at_the_cheapest_price() -> None:
    """At $3.60 an hour for two, so rented whole, a second costs $0.001; 1,000,000 tokens take 1,000,000 / rate of them.
    One step has 4 x 2,048 tokens."""
    words = {"date": "2026-11", "terms": "on-demand", "gpu": "RTX-4090", "source": "a test"}
    offers = [
        Offer(provider="dear", num_gpus=1, usd_per_hour=3.7, **words),
        Offer(provider="two", num_gpus=2, usd_per_hour=3.6, **words),
    ]
    cost = step_cost(cell(**QLORA | {"grad_accum": 4}), find_gpu("RTX-4090"), offers)
    assert cost.million_tokens_usd is not None
    assert (cost.provider, cost.hourly_usd, cost.price_date) == ("two", 3.6, "2026-11")
    rate, usd, seconds = cost.tokens_per_second, cost.million_tokens_usd, cost.step_seconds
    assert [usd.value, usd.low, usd.high] == pytest.approx([1000 / one for one in (rate.value, rate.high, rate.low)])
    tokens = 4 * 2048
    times = [tokens / one for one in (rate.value, rate.high, rate.low)]
    assert [seconds.value, seconds.low, seconds.high] == pytest.approx(times)
    unpriced = step_cost(cell(**QLORA), find_gpu("RTX-4090"), [])
    assert (unpriced.million_tokens_usd, unpriced.provider, unpriced.hourly_usd) == (None, None, None)


def test_nothing_is_said_where_nothing_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """A shape that no recipe covers, an option that none has, a recipe that was kept from before launches were
    counted."""
    monkeypatch.setattr(book, "find_recipe", None)  # nothing is recorded
    before = SimpleNamespace(launches_at=lambda shape, accumulates: None)
    for words in ({"seq_len": 100_000}, {"optim": "sgd"}):
        assert step_cost(cell(**QLORA | words), find_gpu("L40S")) is None
    monkeypatch.setattr(at_hand, "kept_for", lambda *words: before)
    assert step_cost(cell(**QLORA | {"optim": "sgd"}), find_gpu("L40S")) is None


@pytest.mark.parametrize(
    ("card", "recorded_on"), [("RTX-4090", "RTX-4090"), ("H100-SXM", "A100-80GB-SXM"), ("T4", None)]
)
def test_a_recording_of_the_card_or_of_the_a100_has_its_time(
    card: str, recorded_on: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A recording that the card's own kernels would repeat: by the card itself first, with the card's workspaces."""
    monkeypatch.undo()  # what is kept is found
    spec, gpu = cell(**QLORA), find_gpu(card)
    shipped = shipped_recipe(book.recorded_as(spec), find_gpu("A100-80GB-SXM"))
    assert shipped is not None
    for room in (at_hand, recorded):
        monkeypatch.setattr(room, "shipped_recipe", lambda *words: None)
    monkeypatch.setattr(
        at_hand, "kept_recipe", lambda spec, one, say: shipped.recipe if one.short_name == recorded_on else None
    )
    kept = at_hand.kept_for(spec, gpu)
    assert (kept is None) == (recorded_on is None)
    if kept is not None:
        assert kept.workspace_bytes == (find_gpu(str(recorded_on)).blas_workspace_bytes, gpu.blas_workspace_bytes)
        assert step_cost(spec, gpu) is not None
        replayed = at_hand.replay_at_hand(spec, gpu=gpu)
        assert replayed is not None
        assert any("cuBLAS" in note for note in replayed.notes) == (recorded_on != card)


@pytest.mark.parametrize(
    ("gpu", "words"),
    [
        ("24GiB", {}),
        ("T4", {}),  # a bf16 cell: recommend takes fp16 there
        ("RTX-4090", {"limit_vram": "20GiB"}),
        ("RTX-4090", {"num_gpus": 2, "sharding": "tp", "method": "lora"}),
        ("RTX-4090", {"num_gpus": 2, "sharding": "fsdp", "method": "lora", "offload": "params"}),
        ("RTX-4090", {"num_gpus": 2, "sharding": "fsdp", "method": "lora", "cp_size": 2}),
        ("RTX-4090", {"device": "cpu", "method": "full"}),
    ],
)
def test_what_recommend_does_not_answer_has_no_cost(gpu: str, words: dict[str, Any]) -> None:
    assert step_cost(cell(**QLORA | words), gpu_or_size(gpu)) is None


def test_predict_prints_one_line_and_has_it_in_json() -> None:
    done = vramprobe("predict", *flags(QLORA), "--gpu", "RTX-4090", "--json")
    step = json.loads(done.stdout)["step"]
    cost = step_cost(cell(**QLORA), find_gpu("RTX-4090"))
    seconds = cost.step_seconds.value
    assert step["step_seconds"]["value"] == pytest.approx(seconds)
    assert api.predict(**QLORA, gpu="RTX-4090").step == StepCost(**step)
    said = " ".join(vramprobe("predict", *flags(QLORA), "--gpu", "RTX-4090").stdout.split())
    assert f"{seconds:.2f} s (" in said
    assert said.count(" a step, ") == 1
    assert said.endswith("): predicted, 80 % intervals")
    assert f" a million tokens ({step['provider']} ${step['hourly_usd']:.2f}/h, {step['price_date']})" in said


@pytest.mark.parametrize(
    ("question", "more"),
    [
        (QLORA, []),
        (QLORA, ["--limit-vram", "RTX-4090"]),
        (QLORA | {"batch_size": 8, "seq_len": 8192}, ["--gpu", "RTX-4090"]),  # does not fit
        (QLORA, ["--gpu", "RTX-4090", "--lengths", "min=1024 p50=1100 p99=1500 max=2048"]),
    ],
)
def test_predict_has_no_step_where_it_would_be_another_s(question: dict[str, Any], more: list[str]) -> None:
    assert json.loads(vramprobe("predict", *flags(question), *more, "--json").stdout).get("step") is None

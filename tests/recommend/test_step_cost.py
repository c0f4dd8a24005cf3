"""The time and cost of a cell's step beside its memory: recommend's own figures, and nothing where none are at hand."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from command_line import vramprobe
from factories import on_ranks

from vramprobe import api
from vramprobe.catalog import find_gpu, gpu_or_size
from vramprobe.emulate.installation import NotEmulatable
from vramprobe.predict import at_hand, recorded
from vramprobe.predict.questions import cell_on_ranks
from vramprobe.recipe.recipe import shape_of
from vramprobe.recommend.prices import Offer
from vramprobe.recommend.step_cost import StepCost, step_cost
from vramprobe.spec import CellSpec
from vramprobe.speed.step import estimate

QLORA = {
    "model": "llama-3.1-8b", "method": "qlora", "batch_size": 1, "seq_len": 2048, "gradient_checkpointing": True,
}  # fmt: skip
#: A family without arithmetic.
GLM = QLORA | {"model": "glm-4-9b", "method": "lora"}


def cell(**words: Any) -> CellSpec:
    return cell_on_ranks(**{"device": "cuda"} | words)


def recommended(gpu: str, num_gpus: int, words: dict[str, Any]) -> tuple[Any, ...]:
    """Seconds of a step, tokens per second, dollars and provider that recommend has for the cell."""
    asked = {"grad_accum": 1} | words | {"gpus": [gpu], "max_gpus": num_gpus, "tokens": "1M", "replays": False}
    option = next(one for one in api.recommend(**asked).options if one.num_gpus == num_gpus)
    made = option.setting.estimate
    return made.seconds, made.tokens_per_second, option.usd, option.offer and option.offer.provider, made.condition


def same_figures(cost: StepCost | None) -> tuple[Any, ...]:
    assert cost is not None
    rate = cost.tokens_per_second
    return cost.step_seconds.value, rate, cost.million_tokens_usd, cost.provider, cost.condition


@pytest.mark.parametrize(
    ("gpu", "num_gpus", "sharding", "words"),
    [
        ("RTX-4090", 1, None, QLORA | {"grad_accum": 4}),
        ("A100-80GB-SXM", 1, None, QLORA | {"method": "full", "optim": "adamw_bnb_8bit", "model": "qwen2.5-1.5b"}),
        ("H100-SXM", 4, "fsdp", QLORA | {"method": "lora", "batch_size": 2}),
    ],
)
def test_the_figures_are_recommend_s(gpu: str, num_gpus: int, sharding: str | None, words: dict[str, Any]) -> None:
    spec = cell(**words) if sharding is None else on_ranks(cell(**words), num_gpus, sharding)
    cost = step_cost(spec, find_gpu(gpu))
    ranks = {} if sharding is None else {"sharding": sharding}
    assert same_figures(cost) == recommended(gpu, num_gpus, words | ranks)
    assert cost is not None
    assert (cost.basis, cost.num_gpus) == ("arithmetic", num_gpus)


def test_a_million_tokens_cost_their_hours_at_the_cheapest_price() -> None:
    """At $3.60 an hour for two, so rented whole, a second costs $0.001; 1,000,000 tokens take 1,000,000 / rate of them.
    One step has 4 x 2,048 tokens."""
    words = {"date": "2026-11", "terms": "on-demand", "gpu": "RTX-4090", "source": "a test"}
    offers = [
        Offer(provider="dear", num_gpus=1, usd_per_hour=3.7, **words),
        Offer(provider="two", num_gpus=2, usd_per_hour=3.6, **words),
    ]
    cost = step_cost(cell(**QLORA | {"grad_accum": 4}), find_gpu("RTX-4090"), offers)
    assert cost is not None
    assert cost.million_tokens_usd is not None
    assert (cost.provider, cost.hourly_usd, cost.price_date) == ("two", 3.6, "2026-11")
    rate, usd, seconds = cost.tokens_per_second, cost.million_tokens_usd, cost.step_seconds
    assert [usd.value, usd.low, usd.high] == pytest.approx([1000 / one for one in (rate.value, rate.high, rate.low)])
    tokens = 4 * 2048
    assert [seconds.value, seconds.low, seconds.high] == pytest.approx(
        [tokens / one for one in (rate.value, rate.high, rate.low)]
    )
    unpriced = step_cost(cell(**QLORA), find_gpu("RTX-4090"), [])
    assert unpriced is not None
    assert (unpriced.million_tokens_usd, unpriced.provider, unpriced.hourly_usd) == (None, None, None)


def rows_of(num_micro_steps: int) -> dict[str, Any]:
    """Launches of a step that moves 1.152 GB for each micro-step, and as much once more in the optimizer's."""
    same = {
        "what": "other", "shapes": "", "dtype": "bfloat16", "width": 0, "is_beside": False, "calls": 1, "flops": 0,
        "written": 0, "launches": 1,
    }  # fmt: skip
    rows = [
        same | {"phase": "forward", "name": "aten::mul", "read": num_micro_steps * 1_152_000_000},
        same | {"phase": "optimizer", "name": "aten::_fused_adamw_", "read": 1_152_000_000},
    ]
    return {"step": 2, "num_launches": 2, "num_claimed": 2, "unclaimed": {}, "moved": [], "rows": rows}


def test_without_arithmetic_the_time_follows_from_launches_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of two micro-steps as recommend records them, and of eight as if all had been counted."""
    asked: list[tuple[int, str]] = []

    def launches(spec: CellSpec, *, gpu: Any) -> dict[str, Any]:
        asked.append((spec.grad_accum, gpu.short_name))
        return rows_of(spec.grad_accum)

    def and_predict(spec: CellSpec, *, gpu: Any, say: Any) -> tuple[Any, Any]:
        return api.predict(**QLORA), rows_of(spec.grad_accum)

    monkeypatch.setattr(at_hand, "launches_at_hand", launches)
    monkeypatch.setattr("vramprobe.recommend.recorded.predict_and_count", and_predict)
    costs = [step_cost(cell(**GLM | {"grad_accum": accum}), find_gpu("L40S")) for accum in (1, 2, 8)]
    assert asked == [(1, "L40S"), (2, "L40S"), (2, "L40S")]
    for accum, cost in zip((1, 2, 8), costs, strict=True):
        assert same_figures(cost) == recommended("L40S", 1, GLM | {"grad_accum": accum})
        assert cost is not None
        assert cost.basis == "launches"
        assert cost.tokens_per_second.value == pytest.approx(accum * 2048 / cost.step_seconds.value)
    one, two, eight = (cost.step_seconds.value for cost in costs if cost is not None)
    assert eight - one == pytest.approx(7 * (two - one))  # a micro-step takes the same time each


def test_nothing_is_said_where_nothing_is_at_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    """No recipe, a shape that none covers, a recipe that was kept from before launches were counted."""

    def kept(spec: CellSpec, *words: Any, **more: Any) -> Any:
        if spec.seq_len == 64:
            raise NotEmulatable("no emulated GPU here")
        return recorded_before if spec.seq_len == 128 else None

    recorded_before = SimpleNamespace(launches=None)
    monkeypatch.setattr(at_hand, "kept_recipe", kept)
    monkeypatch.setattr(recorded, "find_recipe", None)  # nothing is recorded
    for length in (64, 128, 100_000):
        assert step_cost(cell(**GLM | {"seq_len": length}), find_gpu("L40S")) is None


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
    if gpu == "T4":
        assert step_cost(cell(**QLORA | {"dtype": "fp16", "autocast": "fp16"}), gpu_or_size(gpu)) is not None


def words_of(question: dict[str, Any], *more: str) -> list[str]:
    flags = {f"--{name.replace('_', '-')}": value for name, value in question.items()}
    return [one for name, value in flags.items() for one in ([name] if value is True else [name, str(value)])] + [*more]


def test_predict_prints_one_line_and_has_it_in_json() -> None:
    done = vramprobe("predict", *words_of(QLORA, "--gpu", "RTX-4090", "--json"))
    step = json.loads(done.stdout)["step"]
    seconds = estimate(cell(**QLORA), find_gpu("RTX-4090")).seconds
    assert step["step_seconds"]["value"] == pytest.approx(seconds)
    assert api.predict(**QLORA, gpu="RTX-4090").step == StepCost(**step)
    said = " ".join(vramprobe("predict", *words_of(QLORA, "--gpu", "RTX-4090")).stdout.split())
    assert f"{seconds:.2f} s (" in said
    assert said.count(" a step, ") == 1
    assert said.endswith("): predicted, 80 % intervals")
    assert f" a million tokens ({step['provider']} ${step['hourly_usd']:.2f}/h, {step['price_date']})" in said


@pytest.mark.parametrize(
    ("question", "more"),
    [
        (QLORA, []),
        (QLORA, ["--limit-vram", "RTX-4090"]),
        (QLORA | {"seq_len": 131_072}, ["--gpu", "RTX-4090"]),  # does not fit
        (QLORA, ["--gpu", "RTX-4090", "--lengths", "p50=250 p90=700 p99=1500 max=2048"]),
    ],
)
def test_predict_has_no_step_where_it_would_be_another_s(question: dict[str, Any], more: list[str]) -> None:
    assert json.loads(vramprobe("predict", *words_of(question, *more, "--json")).stdout).get("step") is None


def test_it_costs_predict_no_library() -> None:
    code = (
        "import sys; from vramprobe import api; "
        f"found = api.predict(**{QLORA!r}, gpu='RTX-4090', replays=False); "
        "print(found.step.basis, [name for name in ('torch', 'numpy', 'pandas') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "arithmetic []\n"


def test_launches_at_hand_are_those_that_a_prediction_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the recipe that ships, at the cell's own rows, length and rank; none of a length that it does not cover."""
    monkeypatch.setattr(recorded, "find_recipe", None)  # nothing is recorded
    monkeypatch.setattr(at_hand, "kept_recipe", lambda *words: None)
    spec, gpu = cell(**QLORA | {"method": "lora"}), find_gpu("L40S")
    launches = at_hand.launches_at_hand(spec, gpu=gpu)
    assert launches is not None
    assert launches == recorded.predict_and_count(spec, gpu=gpu)[1]
    assert at_hand.launches_at_hand(spec.model_copy(update={"seq_len": 100_000}), gpu=gpu) is None
    recipe = SimpleNamespace(launches_at=lambda shape, accumulates: {"shape": shape})
    any_rank = SimpleNamespace(recipe=recipe, shapes=((1, 1024, 16), (1, 2048, 16)))
    monkeypatch.setattr(at_hand, "counted_shipped", lambda *words: any_rank)
    eight = spec.model_copy(update={"lora_r": 8})
    assert at_hand.launches_at_hand(eight, gpu=gpu) == {"shape": shape_of(eight)} == {"shape": (1, 2048, 8)}

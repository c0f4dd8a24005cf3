"""The page's *Which GPU?* in headless Chromium: options, answers and words of `vramprobe recommend`, to the digit."""

from __future__ import annotations

import random
from collections.abc import Sequence
from datetime import date
from typing import Any, get_args

import pytest
from grids import grid
from page_engine import Engine

from vramprobe import api, catalog, spec
from vramprobe.architecture import UnsupportedArchitecture, architecture
from vramprobe.errors import VramprobeError
from vramprobe.recommend import words
from vramprobe.recommend.answer import Recommendation
from vramprobe.recommend.options import Option

#: Runs in the page: each question's answer, or its error.
ASK = """
return questions.map(({options, config, question}) => {
  try {
    const asked = vramprobe.recommend(options, config, question);
    if (asked.errors.length) return {errors: asked.errors};
    for (let before = 0; ;) {
      const step = asked.steps.next();
      if (step.done) return {...step.value, wasWhole: before === asked.total};
      before = step.value;
    }
  } catch (error) { if (error instanceof vramprobe.Refusal) return {error: error.message}; throw error; }
});
"""
NUM_QUESTIONS = 30


def some_question(rng: random.Random) -> dict[str, Any]:
    method = rng.choice(get_args(spec.Method))
    options = {
        "model": rng.choice([entry.name for entry in catalog.list_models()]),
        "method": method,
        "seq_len": rng.choice([128, 1000, 2048, 8192]),
        "optim": rng.choice([None, None, "adamw_bnb_8bit", "sgd"]),
        "attn": rng.choice([None, "eager"]),
        "dtype": rng.choice([None, None, "fp32"]),
        "autocast": rng.choice([None, None, "bf16"]),
        "fused_linear_cross_entropy": rng.choice([None, None, None, True]),
    }
    if method != "full":
        options |= {"lora_r": rng.choice([None, 64]), "lora_targets": rng.choice([None, "q_v"])}
    question = {
        "tokens": rng.choice([0.5, 50, 1234]),
        "deadline": rng.choice([None, 1, 12.5]),
        "budget": rng.choice([None, 5, 40.5]),
        "max_gpus": rng.choice([1, 2, 4, 16]),
        "global_batch": rng.choice([1, 16, 24]),
        "terms": rng.choice(["on-demand", "on-demand", "reserved"]),
        "every_method": rng.random() < 0.2,
    }
    config = catalog.find_model(options["model"]).config
    return {"options": {name: options.get(name) for name in options}, "config": config, "question": question}


def recommended(asked: dict[str, Any]) -> Recommendation:
    options = {name: value for name, value in asked["options"].items() if value is not None}
    question = asked["question"]
    if question["every_method"]:
        options["method"] = None
    found = api.recommend(
        **options,
        tokens=f"{question['tokens']}M",
        budget=question["budget"],
        today=date(2026, 3, 20),
        deadline=None if question["deadline"] is None else f"{question['deadline']}h",
        max_gpus=question["max_gpus"],
        global_batch=question["global_batch"],
        terms=question["terms"],
        replays=False,
    )
    assert isinstance(found, Recommendation)
    return found


def has_arithmetic(model: str) -> bool:
    cell = spec.resolve(model=model, method="lora", batch_size=1, seq_len=128, device="cuda")
    try:
        architecture(cell.architecture)
    except UnsupportedArchitecture:
        return False
    return True


def shown(one: Option) -> dict[str, Any]:
    """Of an option, what must be the same to the last digit."""
    setting = one.setting
    return {
        "method": one.method,
        "gpu": one.gpu,
        "num_gpus": one.num_gpus,
        "fits": one.fits,
        "why_not": one.why_not,
        "verdict": setting.verdict.verdict,
        "batch_size": setting.batch_size,
        "grad_accum": setting.grad_accum,
        "gradient_checkpointing": setting.gradient_checkpointing,
        "sharding": setting.sharding,
        "needed": setting.verdict.needed_bytes.model_dump(),
        "usable_bytes": setting.verdict.usable_bytes,
        "condition": setting.estimate.condition,
        "words": {
            "cards": words.cards_of(one),
            "setting": words.setting_of(one),
            "rate": words.rate_of(one),
            "time": words.time_of(one),
            "cost": words.cost_of(one),
            "price": words.price_of(one),
            "limits": words.limits_of(one),
        },
    }


def place_of(option: Any, options: Sequence[Any]) -> int:
    """The answer among all options, where what speaks against it may have been added."""
    return next(
        at for at, other in enumerate(options) if other.model_copy(update={"why_not": option.why_not}) == option
    )


@pytest.mark.parametrize("part", grid([3, 1], 3), ids={3: "a part", 1: "all"}.get)
def test_the_page_recommends_what_the_command_recommends_to_the_digit(answers: Engine, part: int) -> None:
    rng = random.Random(0)
    asked = [some_question(rng) for _ in range(NUM_QUESTIONS // part)]
    num_options = 0
    for one, answer in zip(asked, answers(asked, ask=ASK), strict=True):
        if not has_arithmetic(one["options"]["model"]):
            assert "error" in answer, one  # the command records it, a page cannot
            continue
        try:
            wanted = recommended(one)
        except VramprobeError:
            assert "error" in answer, one
            continue
        assert "options" in answer, (one, answer)
        assert answer["wasWhole"]
        assert answer["lacks"] == wanted.by_method
        found = answer["options"]
        assert [{name: option[name] for name in shown(wanted.options[0])} for option in found] == [
            shown(option) for option in wanted.options
        ], one
        for option, other in zip(found, wanted.options, strict=True):
            for name in ("hours", "usd"):
                figure = getattr(other, name)
                assert option[name] == (None if figure is None else pytest.approx(figure.model_dump(), rel=1e-12))
        said = [(one["question"], one["option"], one["doubt"]) for one in answer["answers"]]
        assert said == [
            (one.question, -1 if one.option is None else place_of(one.option, wanted.options), one.doubt)
            for one in wanted.answers
        ]
        num_options += len(found)
    assert num_options > 500 // (2 * part)

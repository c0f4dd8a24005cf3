"""Settings that a profile records: those of live models, and a Trainer's arguments without paths and secrets."""

from __future__ import annotations

import enum
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from vramprobe.profile.hook import settings  # noqa: E402


def test_settings_of_models_count_a_shared_parameter_once() -> None:
    first = torch.nn.Linear(4, 3, bias=False)
    second = torch.nn.Sequential(first, torch.nn.Linear(3, 2, bias=False, dtype=torch.bfloat16))
    second[1].weight.requires_grad_(False)
    second.gradient_checkpointing = True
    second.config = SimpleNamespace(_attn_implementation="eager")
    assert settings.of_models([first, second]) == {
        "parameters": "18, 12 trained",
        "dtypes of parameters": "bfloat16, float32",
        "layers checkpointed": "1",
        "attention": "eager",
    }


def test_arguments_are_numbers_and_words_and_no_path_or_secret() -> None:
    class Strategy(enum.Enum):
        STEPS = "steps"

    args = SimpleNamespace(
        gradient_checkpointing=True,
        max_length=None,
        eval_strategy=Strategy.STEPS,
        output_dir="/home/user",
        hub_token="secret",
        _n_gpu=1,
        model_init_kwargs={"dtype": "bfloat16"},
    )
    assert settings.of_arguments(args) == {
        "gradient_checkpointing": "True",
        "max_length": "None",
        "eval_strategy": "steps",
    }

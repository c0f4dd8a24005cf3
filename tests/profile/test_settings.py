"""Settings that a profile records: those of live models, and a Trainer's arguments without paths and secrets."""

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


def test_layers_that_llamafactory_does_not_checkpoint_are_counted() -> None:
    """It looks for a trained parameter in each: the linear attention of a hybrid has none where q_proj is trained."""

    def custom_gradient_checkpointing_func(function, *args):
        return function(*args)

    layers = [torch.nn.Linear(2, 2) for _ in range(4)]
    for layer in layers:
        layer.gradient_checkpointing = True
        layer._gradient_checkpointing_func = custom_gradient_checkpointing_func
    model = torch.nn.Sequential(*layers)
    assert settings.left_out_of_checkpointing([model]) is None
    for layer in layers[:3]:
        layer.requires_grad_(False)
    said = settings.left_out_of_checkpointing([model])
    assert said.startswith("gradient checkpointing leaves out 3 of 4 modules: LLaMA-Factory")
    for layer in layers:
        layer._gradient_checkpointing_func = torch.utils.checkpoint.checkpoint  # transformers' own looks at none
    assert settings.left_out_of_checkpointing([model]) is None


def test_experts_that_bitsandbytes_leaves_in_16_bits_are_said() -> None:
    class Params4bit(torch.nn.Parameter):
        pass

    class Block(torch.nn.Module):
        def __init__(self, num_experts: int, packed: torch.nn.Parameter) -> None:
            super().__init__()
            self.packed = packed
            self.experts = torch.nn.Parameter(
                torch.empty(num_experts, 64, 64, dtype=torch.bfloat16), requires_grad=False
            )

    packed = Params4bit(torch.empty(64 * 64, 1, dtype=torch.uint8), requires_grad=False)  # 8,192 of 4 bits
    said = settings.left_unquantized([Block(2**17, packed)])
    assert said.startswith(
        "quantization leaves 1.00 GiB of experts in bfloat16: bitsandbytes takes linear layers alone"
    )
    assert settings.left_unquantized([Block(2, packed)]) is None, "it reaches half"
    plain = torch.nn.Parameter(torch.empty(2, 2))
    assert settings.left_unquantized([Block(2**10, plain)]) is None, "nothing is quantized"

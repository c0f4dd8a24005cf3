"""A GPU by its size, in every verb that takes a GPU: a verdict where memory decides, one clear line elsewhere."""

import json

import pytest
from typer.main import get_command
from typer.testing import CliRunner, Result

from vramprobe.cli.verbs import app
from vramprobe.errors import SpecError

CELL = ("--model=llama-3.1-8b", "--method=qlora", "--batch-size=1", "--seq-len=2k", "--gradient-checkpointing")


def run(*words: str) -> Result:
    return CliRunner().invoke(app, words)


@pytest.mark.parametrize(
    ("size", "cell", "answer"),
    [
        ("2GiB", ("--model=smollm2-135m", "--method=full", "--batch-size=2", "--seq-len=4k"), "does not fit"),
        ("14.9GiB", CELL, "tight"),
        ("16GiB", CELL, "tight"),  # 16.0 GiB under an older transformers
        ("18GiB", CELL, "fits"),
    ],
)
def test_predict_judges_a_size_by_either_option(size: str, cell: tuple[str, ...], answer: str) -> None:
    for given in (f"--gpu={size}", f"--limit-vram={size}"):
        found = json.loads(run("predict", *cell, given, "--json").stdout)["verdict"]
        assert found["verdict"] == answer
        assert found["usable_bytes"] == round(float(size[:-3]) * 2**30) - 2**30


def test_a_limit_by_a_gpus_name_is_that_gpu() -> None:
    one, other = (run("predict", *CELL, given, "--json").stdout for given in ("--gpu=L4", "--limit-vram=L4"))
    assert json.loads(one)["verdict"] == json.loads(other)["verdict"]


def test_two_sizes_are_refused() -> None:
    said = run("predict", *CELL, "--gpu=T4", "--limit-vram=12GiB")
    assert said.exit_code == 2
    assert "both say how much memory" in said.output


def test_inverse_questions_and_an_engine_take_a_size() -> None:
    largest = run("predict", *CELL[:2], *CELL[3:], "--max-batch", "--limit-vram=24GiB", "--json")
    assert json.loads(largest.stdout)["gpu"] == "GPU of 24GiB"
    served = run("serve", "--model=qwen3-8b", "--gpu=24GiB", "--max-model-len=8k", "--json")
    assert json.loads(served.stdout)["requested_bytes"] == pytest.approx(0.9 * 24 * 2**30, abs=1)
    beside = run("grpo", "--model=qwen2.5-1.5b", "--method=lora", "--gradient-checkpointing", "--gpu=24GiB")
    assert "24GiB: fits" in beside.stdout


@pytest.mark.parametrize(
    "words",
    [
        ("recommend", *CELL[:2], "--seq-len=512", "--tokens=1M", "--gpu=12GiB"),
        ("techniques", *CELL[:4], "--gpu=12GiB"),
        ("claims", "--gpu=12GiB"),
        ("measure", *CELL[:4], "--emulate=12GiB"),
    ],
)
def test_time_price_and_emulation_need_a_gpu(words: tuple[str, ...]) -> None:
    said = run(*words)
    assert isinstance(said.exception, SpecError)
    assert "is a size of memory" in str(said.exception)


def test_no_verb_with_a_gpu_is_left_out() -> None:
    taking = {name for name, verb in get_command(app).commands.items() if any(one.name == "gpu" for one in verb.params)}
    assert taking == {"predict", "serve", "grpo", "plan", "run", "recommend", "techniques", "claims", "launch"}

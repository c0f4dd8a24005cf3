"""Reports of users' trials, verbatim in ``inputs/``, each with what the command has to say of it."""

from pathlib import Path

import pytest
from command_line import vramprobe

INPUTS = Path(__file__).parent / "inputs"
SAID = {
    "compiled_backward.log": (
        "phase: backward, a compiled graph",
        "the size of the tensor that the failing line makes, 65536 × 65536 of 2 bytes each",
    ),
    "fsdp2_allocate.log": ("phase: forward or backward, gathering sharded parameters", "each decoder layer"),
    "loading_no_figures.log": ("phase: loading the model", "something else may hold the GPU"),
    "loss_zero3.log": ("phase: forward, the loss", "at 128/984 of the last progress bar"),
    "memory_summary.log": (
        "48.16 GiB  allocated at the peak",
        "48.94 GiB  reserved at the peak",
        "0 cudaMalloc retries",
    ),
    "prepare.log": ("phase: preparing the model or its sharding",),
    "ray_actor_died.log": ("the host probably ran out of memory",),
    "ray_oom.log": ("7.59 GiB free of 1007.51 GiB", "102.17 GiB  held by the killed process"),
}
NEVER = {
    "fsdp2_allocate.log": "logits",
    "loading_no_figures.log": "load in bf16",
    "ray_oom.log": "no out-of-memory error",
}


@pytest.mark.parametrize("name", SAID)
def test_what_the_command_says_of_each(name: str) -> None:
    done = vramprobe("explain", str(INPUTS / name))
    assert done.returncode == 0, done.stderr
    assert [part for part in SAID[name] if part not in done.stdout] == []
    assert NEVER.get(name, "\0") not in done.stdout


def test_a_hint_that_has_no_arithmetic_takes_nothing_away() -> None:
    name = "loss_zero3.log"
    out = vramprobe("explain", "--model", "qwen3.5-27b", str(INPUTS / name)).stdout
    assert [part for part in SAID[name] if part not in out] == []
    assert "the request has the size of logits: 8,189 to 8,199 tokens × 248320 vocabulary in fp32" in out


def test_every_report_has_an_answer() -> None:
    assert {path.name for path in INPUTS.glob("*.log")} == set(SAID)

"""What a step asks its allocator for: a few middle layers written out to all are what all of them ask for."""

from __future__ import annotations

from typing import Any

import pytest

from vramprobe.allocator.allocator import CachingAllocator
from vramprobe.kernels.chip import Chip
from vramprobe.spec import resolve
from vramprobe.terms.step.requests import Run
from vramprobe.terms.tape.request_log import SAMPLED, WORKSPACE, Chunk, NotAlike, events, unrolled
from vramprobe.terms.tape.tape import MIDDLE_LAYER


def run_of(model: str, **options: Any) -> Run:
    spec = resolve(device="cuda", model=model, **({"batch_size": 1, "seq_len": 512} | options))
    return Run(spec, CachingAllocator(), workspace_bytes=1, chip=Chip())


def sampled(run: Run, num_micro_steps: int = 1) -> list[Chunk]:
    return run._chunks([*range(SAMPLED + 1), run.arch.num_layers - 1], num_micro_steps)


@pytest.mark.parametrize(
    "options",
    [
        {"method": "qlora", "gradient_checkpointing": True},
        {"method": "lora", "lora_targets": "q_v"},
        {"method": "full", "recipe": "mixed"},
        {"method": "full", "recipe": "all-bf16", "gradient_checkpointing": True},
    ],
    ids=lambda options: "-".join(map(str, options.values())),
)
@pytest.mark.parametrize("model", ["llama-3.2-1b", "qwen3-0.6b", "pythia-410m", "gpt2", "qwen3-30b-a3b"])
def test_a_few_layers_written_out_are_all_of_them(model: str, options: dict[str, Any]) -> None:
    require_written_out(run_of(model, **options))


def test_so_are_they_with_a_fused_loss() -> None:
    require_written_out(run_of("llama-3.2-1b", method="lora", fused_linear_cross_entropy=True))


def test_so_are_they_in_each_micro_step() -> None:
    require_written_out(run_of("llama-3.2-1b", method="qlora", gradient_checkpointing=True), 3)
    require_written_out(run_of("gpt2", method="full", recipe="mixed"), 2)


def require_written_out(run: Run, num_micro_steps: int = 1) -> None:
    num_layers = run.arch.num_layers
    found = unrolled(sampled(run, num_micro_steps), num_layers - 2)
    assert events(found) == events(run._chunks(range(num_layers), num_micro_steps))


@pytest.mark.parametrize("model", ["gemma-2-2b", "gemma-3-1b"])
def test_layers_of_several_kinds_are_all_run(model: str) -> None:
    run = run_of(model, method="lora")
    with pytest.raises(NotAlike):
        unrolled(sampled(run), run.arch.num_layers - 2)
    assert run._log.parts[0] + run._log.end(0)[0] == flat(run._chunks(range(run.arch.num_layers), 1))


def flat(chunks: list[Chunk]) -> list[int]:
    return [event for chunk in events(chunks) for event in chunk]


def made(forward: list[list], backward: list[list], last: list) -> list[Chunk]:
    """A step of middle layers alone, and what follows it."""
    found = [Chunk(("forward", MIDDLE_LAYER), tokens) for tokens in forward]
    found += [Chunk(("backward", MIDDLE_LAYER), tokens) for tokens in backward] + [Chunk(("zero_grad", "end"), last)]
    for chunk in found:
        chunk.num_requests = sum(isinstance(token, int) for token in chunk.tokens)
    return found


def test_a_step_by_hand() -> None:
    """A layer keeps 7 bytes until its backward, which makes a gradient of 3; they go last, the first layer's first."""
    backward = [[3, (layer, 0)] for layer in reversed(range(SAMPLED))]
    chunks = made([[7]] * SAMPLED, backward, [(2 * SAMPLED - 1 - layer, 0) for layer in range(SAMPLED)])
    found = flat(unrolled(chunks, 8))
    given_back = [event for layer in reversed(range(8)) for event in (3, ~layer)]
    assert found == [7] * 8 + given_back + [~(15 - layer) for layer in range(8)]


@pytest.mark.parametrize(
    ("forward", "last"),
    [
        ([[7], [7], [8], [7]], []),  # layers that differ
        ([[7, WORKSPACE]] * SAMPLED, []),  # what only the first of them would ask for
        ([[7]] * SAMPLED, [(1, 0)]),  # of which layer, where there are more?
        ([[7], [7], [7, (0, 0)], [7, (1, 0)]], []),  # not the nearest layer's
        ([[7]] * (SAMPLED + 1), []),
    ],
)
def test_what_a_few_layers_do_not_tell_is_said(forward: list[list], last: list) -> None:
    with pytest.raises(NotAlike):
        unrolled(made(forward, [[]] * SAMPLED, last), 20)


def test_the_second_step_asks_for_no_workspace() -> None:
    class Named(CachingAllocator):
        def allocate(self, name: Any, size_bytes: int, stream: int = 0) -> Any:
            names.append(name)
            return super().allocate(name, size_bytes, stream)

    names: list[Any] = []
    run = run_of("gpt2", method="full")
    run.allocator = Named()
    run.load()
    for wanted in (2, 0):
        names.clear()
        run.step()
        assert sum(isinstance(name, tuple) and name[0] == "workspace" for name in names) == wanted

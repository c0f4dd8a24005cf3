"""Finer causes: a step written down by hand, each block with its place, for a batch whose tokens equal the width."""

from typing import Any

import numpy as np
import pytest

from vramprobe.log.log import ALL_CAUSES, OUTSIDE, LayerMark, Log, PhaseMark
from vramprobe.log.refined import refined
from vramprobe.resolve import resolve
from vramprobe.spec import CellSpec

_WORDS, _WIDTH = 49152, 576
#: As wide as the batch is long: a score of each token has a head's bytes.
_SCORES = 2 * _WORDS * _WIDTH
_HIDDEN = 2 * _WIDTH * _WIDTH


def a_cell(**words: Any) -> CellSpec:
    usual = {"model": "smollm2-135m", "device": "cuda", "batch_size": 1, "gradient_checkpointing": True}
    return resolve(seq_len=_WIDTH, **usual, **words)


def a_step(blocks: list[tuple[str, str, str, int, str | None]]) -> Log:
    """A log of one step: each block's phase, place (a layer's visit, or none), cause, bytes, and where it is freed."""
    sizes, numbers, causes, marks, layers, alive = [], [], [], [], [], []

    def event(number: int, size: int, cause: str) -> None:
        sizes.append(size), numbers.append(number), causes.append(ALL_CAUSES.index(cause))

    for phase in ("forward", "backward", "optimizer_step", "zero_grad"):
        start = len(sizes)
        layers.append(OUTSIDE._replace(position=start))
        for number, (own, place, cause, size, freed_in) in enumerate(blocks, 1):
            if own != phase:
                continue
            at = OUTSIDE if place == "outside" else LayerMark(0, 0, 0, place)
            layers.append(at._replace(position=len(sizes)))
            event(number, size, cause)
            alive.append((number, size, cause, freed_in))
        for number, size, cause, freed_in in alive:
            if freed_in == phase:
                event(number, -size, cause)
        marks.append(PhaseMark(phase, 0, None, range(start, len(sizes))))
    return Log(np.array(sizes), np.array(numbers), np.array(causes, dtype=np.int8), tuple(marks), tuple(layers))


def causes_of(log: Log, spec: CellSpec) -> list[str]:
    """The cause of each allocation, in order."""
    found = refined(log, spec)
    of_block = {block: ALL_CAUSES[cause] for block, cause in zip(found.blocks, found.causes, strict=True)}
    made = found.blocks[found.size_bytes > 0]
    assert all(ALL_CAUSES[cause] == of_block[block] for block, cause in zip(found.blocks, found.causes, strict=True))
    return [of_block[block] for block in made]


def test_places_and_sizes_by_hand() -> None:
    step = a_step(
        [
            ("forward", "outside", "weights", _SCORES, None),
            ("forward", "outside", "saved_activations", _HIDDEN, "backward"),
            ("forward", "forward", "saved_activations", _HIDDEN, "backward"),
            ("forward", "forward", "temporaries", 3 * _HIDDEN, "forward"),
            ("forward", "outside", "saved_activations", _SCORES, "backward"),
            ("forward", "outside", "temporaries", 2 * _SCORES, "forward"),
            ("forward", "outside", "saved_activations", 8519680, None),
            ("backward", "outside", "temporaries", _SCORES, "backward"),
            ("backward", "outside", "temporaries", _SCORES, "backward"),
            ("backward", "backward", "temporaries", 3 * _HIDDEN, "backward"),
            ("backward", "backward", "temporaries", _SCORES, "backward"),
            ("optimizer_step", "outside", "temporaries", 64, "optimizer_step"),
        ]
    )
    assert causes_of(step, a_cell(method="full", dtype="bf16")) == [
        "weights",
        "saved_activations",
        "checkpoint_store",
        "temporaries",
        "logits",
        "logits",
        "workspaces",
        "logits",
        "gradients",  # of the tied head, before the embedding's is added
        "recomputed_layer",
        "temporaries",  # the embedding's
        "optimizer_temporaries",
    ]


@pytest.mark.parametrize(
    ("recipe", "expected"),
    [
        ("mixed", ["checkpoint_store", "cast_copies", "cast_copies", "logits"]),
        ("all-bf16", ["checkpoint_store", "checkpoint_store", "logits", "logits"]),
    ],
)
def test_a_cast_of_the_head_comes_before_the_scores(recipe: str, expected: list[str]) -> None:
    step = a_step(
        [
            ("forward", "forward", "saved_activations", _HIDDEN, "backward"),
            ("forward", "forward", "saved_activations", 3 * _HIDDEN, "backward"),
            ("forward", "outside", "saved_activations", _SCORES, "backward"),
            ("forward", "outside", "saved_activations", _SCORES, "backward"),
        ]
    )
    assert causes_of(step, a_cell(method="full", recipe=recipe)) == expected


@pytest.mark.parametrize(("trainer", "cause"), [("sft", "logits"), ("grpo", "temporaries")])
def test_a_fused_head_has_no_logits(trainer: str, cause: str) -> None:
    """The sum of its gradient in fp32 has as many bytes as scores of a batch that is as long as the model is wide."""
    step = a_step(
        [
            ("backward", "outside", "temporaries", 2 * _SCORES, "backward"),
            ("backward", "backward", "temporaries", 3 * _HIDDEN, "backward"),
        ]
    )
    spec = a_cell(method="lora", trainer=trainer)
    assert causes_of(step, spec) == [cause, "recomputed_layer"]
